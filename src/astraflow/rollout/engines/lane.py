"""A lane is one version of the model and the batch that runs on it. An engine has up to two (`lanes`).

A `Lane` admits requests, advances them token by token, and replaces the weights. It is passive: it has no
threads and no clock. Its owner calls `step` while `has_work` is true, and results go out through
`Job.resolve`. Requests join and leave between any two steps. If several requests share a prompt, it is
prefilled once, and as long as they sample the same tokens, they are computed as one (`branches`). A request
that shares a prefix with an earlier one, as the next turn of a conversation does, continues from that
prefix's keys and values (`pages`). A long prompt is prefilled in pieces, between which the running requests
are advanced. After the weights are replaced, the keys and values of all running requests are recomputed (once
for a shared prompt). So every later logprob is that of a full forward pass with the new version.

If the model has adapters, each request runs on one of them, and each adapter has its own version. What is
replaced, recomputed, or shared between requests is always that of one adapter.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astraflow import added
from astraflow.errors import RolloutError
from astraflow.protocols import TokenScores
from astraflow.rollout.engines.branches import Branches
from astraflow.rollout.engines.cache import PAGE, KvCache, row_moves
from astraflow.rollout.engines.forward import Forward, score
from astraflow.rollout.engines.jobs import Job, Outcome, Rows
from astraflow.rollout.engines.pages import Page, Pages
from astraflow.rollout.engines.sampling import pick_tokens
from astraflow.types import Generation

__all__ = ["Lane"]

_PREFILL_TOKENS = 4096
"""Largest number of tokens in one prefill call, including padding. It bounds the call's memory, and how long
the running requests have to wait for it. A longer prompt is prefilled in pieces of this size."""
_CPU_PREFILL_TOKENS = 1024
"""The same on a CPU, whose caches hold the activations of fewer tokens."""
_STRETCH_POSITIONS = 65_536
"""Largest number of cached positions that one call of `_extend` attends to. Each layer copies all of them."""
_MIN_FILL = 0.6
"""Each row in a prefill call has at least this share of the longest row's length. Shorter rows would be
mostly padding."""
_ADMISSION_CALLS = 4
"""A step admits no more requests once their prompts fill this many prefill calls."""
_MAX_PASSED = 8
"""The oldest request has to wait for at most this many admissions per slot of others that continue a kept
prefix. In a crowded lane, it costs the others' prefixes their pages."""
_MAX_DELAY_STEPS = 4
"""Largest number of steps for which admission is delayed. A prefill call costs about as much as a step, so it
pays to wait for other requests to share it."""
_ADMISSION_SHARE = 16
"""Admission is not delayed once there is a waiting request for every 16 running ones."""


class Lane:
    """A batch of requests that run on one version, or on one of each adapter.

    In its columns, row i belongs to the i-th running request. Its cache and its forward passes have one row
    per branch. The newest token is not in the cache yet: a step stores it and picks the token that follows.
    So prefill leaves out the last token of a prompt, and the first step after it does the rest.
    Example: `lane.submit(job)`, then `lane.step()` while `lane.has_work`.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        num_slots: int,
        max_context: int,
        stop_ids: frozenset[int],
        version: int,
        num_spare: int = 0,
        recorder: "added.ExpertRecorder | None" = None,
    ) -> None:
        """`num_spare`: the size of the pool for prefixes, in slots. `recorder`: records the experts that the
        model of `forward` chooses; None records none."""
        self.versions = [version]
        """The version of each adapter; one entry if the model has none."""
        self.generated_tokens = 0
        """Number of tokens generated since the lane was made. It never decreases."""
        shape = forward.cache_shape
        vocab_size = forward.vocab_size
        self._forward = forward
        self._device = shape.device
        self._max_tokens = _CPU_PREFILL_TOKENS if shape.device.type == "cpu" else _PREFILL_TOKENS
        self.cache = KvCache(shape, num_slots=num_slots + num_spare, max_context=max_context)
        self._recorder = recorder
        self._rows = Rows(num_slots, max_context, vocab_size, recorder)
        self._branches = Branches(num_slots)
        self._pages = Pages(self.cache, num_spare)
        self._waiting: deque[Job] = deque()
        self._num_passed = 0
        """Number of admissions in a row that were not of the oldest request."""
        self._staged: Job | None = None
        """The request whose prompt is prefilled in pieces, in the last slot of the rows."""
        self._num_staged = 0
        """Number of its tokens whose keys and values are there."""
        self.num_calls = 0
        """Number of model calls for prompts since the lane was made. It shows that a long step goes on."""
        self._num_delays = 0
        """Number of steps for which admission has been delayed since the last one."""
        self._is_stop = np.zeros(vocab_size, np.bool_)
        self._is_stop[sorted(stop_ids)] = True

    @property
    def version(self) -> int:
        """The version of a model without adapters."""
        return self.versions[0]

    @property
    def jobs(self) -> list[Job]:
        """All requests that are here, running and waiting."""
        return [*self._rows.jobs, *self._queued]

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary. All token ids are below it."""
        return self._forward.vocab_size

    @property
    def num_running(self) -> int:
        """Number of requests in the batch."""
        return self._rows.count

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row."""
        return len(self._queued)

    @property
    def has_work(self) -> bool:
        """Whether a step would advance or admit a request."""
        return bool(self._rows.count or self._queued)

    @property
    def is_held(self) -> bool:
        """Whether requests for exactly this version run or wait here."""
        return any(job.version >= 0 for job in self.jobs)

    @property
    def _queued(self) -> list[Job]:
        return [*self._waiting] if self._staged is None else [self._staged, *self._waiting]

    @property
    def _num_free(self) -> int:
        """Number of rows for further requests."""
        return self._rows.num_free - (self._staged is not None)

    def submit(self, job: Job) -> None:
        """Queues a request."""
        self._waiting.append(job)
        if not self._pages.has_parked:
            self._hold_prefixes()

    def _hold_prefixes(self) -> None:
        """Holds the kept prefixes that waiting requests need. An image is not in the tokens, so a prompt with
        images continues nothing."""
        for job in self._waiting:
            if job.held is None:
                job.held = () if job.media else self._pages.hold(job.prompt, job.adapter)

    def drop(self, job: Job) -> Generation | None:
        """Removes a request that is here, without calling its `resolve`. Returns what it has generated."""
        begun = job.ended
        if self._rows.holds(job):
            begun = self._rows.beginning(job.row)
            self._release(np.array([job.row]))
        elif job is self._staged:
            self._staged = None
        elif job in self._waiting:
            self._leave(job)
        return begun

    def drain(self) -> list[Job]:
        """Removes and returns all requests, running and waiting."""
        jobs = self.jobs
        self._release(np.arange(self._rows.count), is_kept=False)
        self._waiting.clear()
        self._staged = None
        return jobs

    def replace(self, install: Callable[[], None], version: int, adapter: int = 0) -> None:
        """Installs another version, of the model or of one adapter. Its running requests continue on it, with
        recomputed keys and values."""
        install()
        self._forward.refresh()
        self.versions[adapter] = version
        self._rows.mark_version(version, adapter)
        self.recompute(adapter)

    def recompute(self, adapter: int | None = None) -> None:
        """Computes the keys and values of running requests again, and forgets all other ones: those of one
        adapter, or of all."""
        self._forget(adapter)
        if self._staged is not None and adapter in (None, self._staged.adapter):
            self._num_staged = 0
        self._refill(adapter)

    def _forget(self, adapter: int | None = None) -> None:
        """Forgets all kept prefixes, or those of an adapter."""
        for job in self._waiting:
            if adapter in (None, job.adapter):
                self._pages.release(job.held or ())
                job.held = None
        self._pages.clear(adapter)

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1."""
        if len(token_ids) < 2:
            return np.zeros(0, np.float32)
        tokens = torch.tensor(token_ids, device=self._device)
        return np.asarray(score(self._forward, tokens).cpu().numpy(), np.float32)

    def score_top(self, token_ids: Sequence[int], num: int, temperature: float) -> TokenScores:
        """Scores tokens 1..T-1, with the `num` most likely ones in place of each. Raises: RolloutError."""
        if num > self.vocab_size:
            raise RolloutError(f"the {num} most likely of {self.vocab_size} tokens", is_retryable=False)
        tokens = torch.tensor(token_ids, device=self._device)
        parts: list[tuple[Tensor, ...]] = []
        start = 1
        for logits in self._forward.sequence_logits(tokens):
            whole = torch.log_softmax(logits.float() / temperature, -1)
            given = tokens[start : start + len(logits), None]
            top = whole.topk(num)
            parts.append((whole.gather(1, given)[:, 0], top.indices.int(), top.values))
            start += len(logits)
        return TokenScores(*(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)))

    # --- stepping ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Admits waiting requests, advances every running one by a token, and resolves those that end."""
        if self._staged is not None:
            self._extend_staged(self._staged)
        if self._is_admission_due():
            self._admit()
        rows = self._rows
        if not rows.count:
            return  # the first piece of a prompt
        count = self._branches.count
        newest = torch.from_numpy(self._branches.newest[:count]).to(self._device)
        logits = self._forward.decode(newest, self._branches.positions[:count], self.cache)
        experts = self._recorder.last() if self._recorder is not None and rows.num_experts else None
        of_rows = rows.branches[: rows.count]
        if not np.array_equal(of_rows, np.arange(count)):
            logits = logits[torch.from_numpy(of_rows).to(self._device)]
            experts = None if experts is None else experts[of_rows]
        picked, logprobs = pick_tokens(logits, rows.sampling_rows(self._device))
        host_picked = picked.cpu().numpy()
        host_logprobs = logprobs.cpu().numpy()
        is_last = rows.extend(host_picked, host_logprobs, experts)
        self.generated_tokens += rows.count
        # A row without finite logprobs has a meaningless token too; `_finish` turns it into an error.
        self._finish(self._is_stop[host_picked], is_last, np.isfinite(host_logprobs))

    def _finish(
        self, is_stop: NDArray[np.bool_], is_last: NDArray[np.bool_], is_finite: NDArray[np.bool_]
    ) -> None:
        """Resolves rows that end here: at a stop, at their last token, or with a logprob that isn't
        finite."""
        rows = self._rows
        for row, job in enumerate(rows.jobs if rows.has_stops else ()):  # most batches have no stop texts
            if job.stop is not None:
                tail = rows.completion(row)[-job.stop.num_tokens :]
                is_stop[row] |= job.stop.is_reached(tail.tolist())
        of_rows = rows.branches[: rows.count]
        if not is_finite.all():
            # A branch fails as a whole, because it is cleared.
            is_finite = ~np.isin(of_rows, of_rows[~is_finite])
        ended = np.flatnonzero(is_stop | is_last | ~is_finite)
        jobs = [rows.jobs[row] for row in ended.tolist()]
        outcomes: list[Outcome] = []
        for row in ended.tolist():
            if is_finite[row]:
                result = rows.generation(row, "stop" if is_stop[row] else "length")
                rows.jobs[row].ended = result
                outcomes.append(result)
            else:
                # The next request in this slot must not find infinities there: no mask hides them.
                self.cache.clear(int(of_rows[row]))
                version = self.versions[rows.jobs[row].adapter]
                message = f"version {version} gives logprobs that are not finite; have the weights diverged?"
                outcomes.append(RolloutError(message))
        # The results were read above, because `_release` moves other rows into these. `resolve` comes last,
        # so that the rows are free before a caller submits another request.
        self._release(ended, is_kept=bool(is_finite.all()))
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.resolve(outcome)

    def _release(self, ended: NDArray[np.int64], *, is_kept: bool = True) -> None:
        """Frees rows, given in ascending order, and then forks and frees branches. `is_kept`: whether to keep
        the ended sequences; otherwise all prefixes are forgotten."""
        rows = self._rows
        if not is_kept:
            self._forget()
        sequences = self._sequences(ended) if is_kept and ended.size else {}
        rows.remove(ended)
        live = slice(rows.count)
        rows.branches[live], sources, targets = self._branches.regroup(
            rows.branches[live], rows.positions[live], rows.newest[live]
        )
        self._pages.park(sequences, needed=targets.tolist())
        self._share(sources, targets, self._branches.positions)

    def _sequences(self, ended: NDArray[np.int64]) -> dict[int, tuple[int, ...]]:
        """Branch -> the tokens in the cache, for the branches all of whose rows end. Images aren't tokens, so
        sequences with images are left out."""
        rows = self._rows
        of_rows = rows.branches[: rows.count]
        others = set(np.delete(of_rows, ended).tolist())
        return {
            int(of_rows[row]): tuple(rows.tokens[row, : rows.positions[row]].tolist())
            for row in ended.tolist()
            if int(of_rows[row]) not in others and not rows.jobs[row].media
        }

    # --- admission --------------------------------------------------------------------------------

    def _is_admission_due(self) -> bool:
        """Whether this step admits. Up to `_MAX_DELAY_STEPS`, it waits for more requests to share a
        prefill."""
        num_ready = min(len(self._waiting), self._num_free)
        if num_ready == 0:
            return False
        running = self._rows.count
        if self._num_delays < _MAX_DELAY_STEPS and num_ready * _ADMISSION_SHARE < running:
            self._num_delays += 1
            return False
        self._num_delays = 0
        return True

    def _next(self) -> Job:
        """Takes the next request from the queue: the oldest one that continues a kept prefix, unless the
        oldest of all has waited for too many of these.

        In the order of arrival, a crowded lane would drop each prefix shortly before it is needed.
        """
        oldest = self._waiting[0]
        job = oldest
        if self._num_passed < _MAX_PASSED * len(self._branches.positions):
            kept = (job for job in self._waiting if job.held and 2 * PAGE * len(job.held) >= len(job.prompt))
            job = next(kept, oldest)
        self._num_passed = 0 if job is oldest else self._num_passed + 1
        self._leave(job)
        return job

    def _leave(self, job: Job) -> None:
        """Removes a request from the queue."""
        self._waiting.remove(job)
        self._pages.release(job.held or ())
        job.held = None

    def _admit(self) -> None:
        """Gives free rows to waiting requests, and computes what is new in their prompts, once.

        A request that shares its prompt with another one admitted in this step shares its branch. One that
        shares it with a running row gets a branch with a copy of that row's prefix. Any other one gets a copy
        of the longest kept prefix.
        """
        rows = self._rows
        branches = self._branches
        known = {job.prompt_key: job for job in rows.jobs}
        num_before = rows.count
        fresh = dict[int, Job]()
        starts = np.zeros(len(branches.positions), np.int64)
        shared = list[tuple[int, int]]()
        room = _ADMISSION_CALLS * self._max_tokens
        while self._waiting and self._num_free and room > 0:
            job = self._next()
            source = known.get(job.prompt_key, job)
            # Prompts are compared too, because keys are hashes and may collide.
            is_shared = source is not job and source.full_prompt == job.full_prompt
            if is_shared and source.row >= num_before:
                rows.add(job, int(rows.branches[source.row]), self.versions[job.adapter])
                continue
            is_whole = is_shared or bool(job.media)
            pages, num_found = ([], 0) if is_whole else self._pages.find(job.prompt[:-1], job.adapter)
            num_new = len(job.prompt) - 1 - num_found
            if num_new > self._max_tokens and not is_whole:
                if self._staged is not None:
                    self._waiting.appendleft(job)
                    break
                self._stage(job, pages, num_found)
                continue
            branch = branches.open(job.prompt)
            # The slot may have the shift of an earlier request. `prefill` sets it again if there are images.
            self.cache.shifts[branch] = 0
            self.cache.adapters[branch] = job.adapter
            if is_shared:
                shared.append((int(rows.branches[source.row]), branch))
            else:
                fresh[branch] = job
                self._pages.copy(pages, branch)
                starts[branch] = num_found
                room -= num_new
            rows.add(job, branch, self.versions[job.adapter])
            known[job.prompt_key] = job
        self._fill(fresh, starts, shared)

    def _fill(
        self, fresh: dict[int, Job], starts: NDArray[np.int64], shared: Sequence[tuple[int, int]]
    ) -> None:
        """Computes or copies the prefixes of new branches: those of `fresh` from each one's start on, and
        those of `shared` from another branch."""
        branches = self._branches
        self._pages.flush()
        self._hold_prefixes()
        # A branch's position is that of its newest token, so as a length it leaves that token out.
        self._prefill([branch for branch in fresh if not starts[branch]], branches.positions)
        self._extend([branch for branch in fresh if starts[branch]], starts[: branches.count])
        sources, targets = np.array(shared, np.int64).reshape(-1, 2).T
        self._share(sources, targets, branches.positions)
        prompts = {branch: job.prompt[:-1] for branch, job in fresh.items() if not job.media}
        self._pages.keep(prompts, is_running=True)
        self._pages.flush()
        # New branches stand at the end whatever their length. Branches of similar length are moved together
        # now, since each block of the cache costs as much as its longest row.
        movers, places = row_moves(branches.positions[: branches.count] + 1)
        if len(movers):
            self.cache.move(movers, places, int(branches.positions[movers].max()))
            live = slice(self._rows.count)
            self._rows.branches[live] = branches.move(self._rows.branches[live], movers, places)

    def _stage(self, job: Job, pages: Sequence[Page], num_found: int) -> None:
        """Begins to prefill a prompt in pieces, after what is known of it."""
        self._staged = job
        self._num_staged = num_found
        slot = len(self._branches.positions) - 1
        self._pages.copy(pages, slot)
        self.cache.shifts[slot] = 0
        self.cache.adapters[slot] = job.adapter

    def _extend_staged(self, job: Job) -> None:
        """Computes the next piece of a long prompt. After the last one, the request gets its row."""
        slot = len(self._branches.positions) - 1
        start = self._num_staged
        end = min(start + self._max_tokens, len(job.prompt) - 1)
        rows = torch.tensor([slot], device=self._device)
        stretch = self.cache.stretch(rows, torch.full_like(rows, start), end - start, reach=end)
        tokens = torch.tensor([job.prompt[start:end]], device=self._device)
        self._forward.extend(tokens, stretch, self.cache)
        self._num_staged = end
        if end == len(job.prompt) - 1:
            self._staged = None
            self._pages.flush()
            branch = self._branches.open(job.prompt)
            self.cache.move(np.array([slot]), np.array([branch]), end)
            self._rows.add(job, branch, self.versions[job.adapter])
            self._pages.keep({branch: job.prompt[:-1]}, is_running=True)
            self._pages.flush()

    def _refill(self, adapter: int | None) -> None:
        """Recomputes the keys and values of all branches, or of those of an adapter, whose weights have been
        replaced.

        A branch that shares its prompt with no other is prefilled as a whole. A prompt that several branches
        share is prefilled in the first of them and copied to the others. Then the completion of each is
        added.
        """
        by_prompt: dict[object, list[int]] = {}
        rows = self._rows_of_branches()
        for branch, row in enumerate(map(int, rows)):
            job = self._rows.jobs[row]
            if adapter in (None, job.adapter):
                by_prompt.setdefault(job.full_prompt, []).append(branch)
        alone = [branches[0] for branches in by_prompt.values() if len(branches) == 1]
        groups = [branches for branches in by_prompt.values() if len(branches) > 1]
        prefixes = self._rows.prompt_lengths[rows] - 1
        self._prefill(alone, self._branches.positions)
        self._prefill([branches[0] for branches in groups], prefixes)
        sources = [branches[0] for branches in groups for _ in branches[1:]]
        targets = [branch for branches in groups for branch in branches[1:]]
        self._share(np.array(sources, np.int64), np.array(targets, np.int64), prefixes)
        self._extend([branch for branches in groups for branch in branches], prefixes)

    def _rows_of_branches(self) -> NDArray[np.int64]:
        """A row of each branch. All of them have the same tokens."""
        rows = np.zeros(self._branches.count, np.int64)
        rows[self._rows.branches[: self._rows.count]] = np.arange(self._rows.count)
        return rows

    def _prefill(self, branches: Sequence[int], lengths: NDArray[np.int64]) -> None:
        """Computes the keys and values of the first `lengths[branch]` positions of each given branch."""
        rows = self._rows_of_branches()
        for chunk, longest in _chunks(branches, lengths, len(branches), self._max_tokens):
            tokens = torch.from_numpy(self._rows.tokens[rows[chunk], :longest]).to(self._device)
            media = [self._rows.jobs[row].media for row in map(int, rows[chunk])]
            at = torch.from_numpy(chunk).to(self._device)
            self._forward.prefill(tokens, at, self.cache, media if any(media) else None)
            self.num_calls += 1

    def _share(
        self, sources: NDArray[np.int64], targets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """Copies the keys and values of the first `lengths[target]` positions from sources to targets."""
        if len(sources):
            self.cache.move(sources, targets, int(lengths[targets].max()))

    def _extend(self, branches: Sequence[int], starts: NDArray[np.int64]) -> None:
        """Computes the keys and values of the given branches, from each one's start on.

        The newest token is left out, as always. The padding of a chunk lies after the last entry of each row.
        """
        rows = self._rows_of_branches()
        ends = self._branches.positions[: len(starts)]
        longest_branch = int(ends[branches].max(initial=1))
        max_rows = max(1, _STRETCH_POSITIONS // longest_branch)
        for chunk, longest in _chunks(branches, ends - starts, max_rows, self._max_tokens):
            stretch = self.cache.stretch(
                torch.from_numpy(chunk).to(self._device),
                torch.from_numpy(starts[chunk]).to(self._device),
                longest,
                reach=int(ends[chunk].max()),
            )
            tokens = self._rows.tokens[rows[chunk][:, None], stretch.positions.cpu().numpy()]
            self._forward.extend(torch.from_numpy(tokens).to(self._device), stretch, self.cache)
            self.num_calls += 1


def _chunks(
    rows: Sequence[int], lengths: NDArray[np.int64], max_rows: int, max_tokens: int
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Divides rows into calls of rows with similar lengths. Yields each call's rows and its largest length.

    Rows of length 0 need no call and are left out.
    """
    ordered = np.array(sorted((row for row in rows if lengths[row] > 0), key=lambda row: -lengths[row]), int)
    start = 0
    while start < len(ordered):
        longest = int(lengths[ordered[start]])
        num_fitting = min(max_rows, max(1, max_tokens // longest))
        chunk = ordered[start : start + num_fitting]
        # The rows are sorted, so this cuts off a tail, with which the next chunk begins.
        chunk = chunk[lengths[chunk] >= _MIN_FILL * longest]
        yield chunk, longest
        start += len(chunk)
