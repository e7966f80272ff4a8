"""A lane is one version of the model and the batch that runs on it; an engine has up to two lanes.

A `Lane` admits requests, advances them token by token, and replaces the weights. It is passive: it has no
threads and no clock. Its owner calls `step` while `has_work`; results go out through `Job.resolve`. Requests
join and leave between any two steps. A prompt that several requests share is prefilled once, its keys and
values are copied, and the logits of its first completion token are computed once. After the weights are
replaced, the keys and values of all running requests are recomputed (once for a shared prompt), so that every
later logprob is that of a full forward under the new version.

`Lanes` are the weight slots of an engine: `live` follows the newest version, `pinned` serves exactly one
version, for evaluation. The pinned lane runs on a second copy of the model, which is built when it is first
needed. A request for exactly one version runs in the lane that has it and holds it. A held lane changes its
version only when its holders are done, and takes no new holders while a change waits. Requests for the newest
version hold nothing.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow.errors import RolloutError
from astraflow.models.images import image_rules
from astraflow.models.loading import FittedTensors, empty_causal_lm, install_tensors
from astraflow.protocols import SlotName
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.cache import KvCache
from astraflow.rollout.engines.experts import ExpertRecorder
from astraflow.rollout.engines.forward import Forward, make_forward
from astraflow.rollout.engines.jobs import Job, Outcome, Rows
from astraflow.rollout.engines.requests import stop_ids
from astraflow.rollout.engines.sampling import pick_tokens
from astraflow.types.host_tensors import WeightSnapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Lane", "Lanes", "LoadedModel"]

_PREFILL_TOKENS = 4096
"""Most tokens of one prefill call, padding included. Bounds the call's memory, and the time for which running
requests stand still."""
_STRETCH_POSITIONS = 65_536
"""Most cached positions that one call of `_extend` attends to. Each layer's call copies all of
them."""
_MIN_FILL = 0.6
"""Rows in a prefill call have at least this share of its longest row's length; shorter ones would be mostly
padding."""
_MAX_DELAY_STEPS = 4
"""Most steps for which admission is put off. A prefill call costs about as much as a step, so it pays to wait
for others to share it."""
_ADMISSION_SHARE = 16
"""Admission is not put off once there is a waiting request for every 16 running ones."""


class Lane:
    """A batch of requests under one version.

    In its cache and its columns, row i belongs to the i-th running request. The newest token of a row is not
    in the cache yet: a step stores it and picks the token that follows. So prefill leaves out a prompt's last
    token, and the first step after it does the rest.
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
        recorder: ExpertRecorder | None = None,
    ) -> None:
        """`recorder`: listens to the model of `forward`, if the experts that it chooses are wanted."""
        self.version = version
        self.generated_tokens = 0
        """Tokens generated since the lane was made; never falls."""
        shape = forward.cache_shape
        vocab_size = forward.vocab_size
        self._forward = forward
        self._device = shape.device
        self._cache = KvCache(shape, num_slots=num_slots, max_context=max_context)
        self._recorder = recorder
        self._rows = Rows(num_slots, max_context, vocab_size, recorder)
        self._waiting: deque[Job] = deque()
        self._num_delays = 0
        """Number of steps for which admission has been put off since the last one."""
        self._twins_of: list[int] = []
        """The rows whose prompts the last rows ("twins") share, in the twins' order. Twins were admitted in
        this step together with those rows, and take over their logits and their cache. Empty between two
        steps."""
        self._is_stop = np.zeros(vocab_size, np.bool_)
        self._is_stop[sorted(stop_ids)] = True

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are below it."""
        return self._forward.vocab_size

    @property
    def num_running(self) -> int:
        """Number of requests in the batch."""
        return self._rows.count

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """True while there is a request that a step would advance."""
        return bool(self._rows.count or self._waiting)

    @property
    def is_held(self) -> bool:
        """True while requests for exactly this version run or wait here."""
        return any(job.version >= 0 for job in (*self._rows.jobs, *self._waiting))

    def submit(self, job: Job) -> None:
        """Queues a request."""
        self._waiting.append(job)

    def drop(self, job: Job) -> None:
        """Forgets a request without calling its `resolve`; does nothing if another lane has it."""
        if self._rows.holds(job):
            self._release(np.array([job.row]))
        elif job in self._waiting:
            self._waiting.remove(job)

    def drain(self) -> list[Job]:
        """Takes out all requests, running or waiting, and returns them."""
        jobs = [*self._rows.jobs, *self._waiting]
        self._waiting.clear()
        self._rows.remove(np.arange(self._rows.count))
        return jobs

    def replace(self, weights: FittedTensors, version: int) -> None:
        """Installs another version; running requests continue under it with recomputed keys and values."""
        weights.install()
        self._forward.refresh()
        self.version = version
        self._rows.mark_version(version)
        self._refill()

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1."""
        if len(token_ids) < 2:
            return np.zeros(0, np.float32)
        tokens = torch.tensor(token_ids, device=self._device)
        return np.asarray(self._forward.score(tokens).cpu().numpy(), np.float32)

    # --- stepping ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Admits waiting requests, advances every running one by a token, and resolves those that end."""
        if self._is_admission_due():
            self._admit()
        rows = self._rows
        num_rows = rows.count
        num_computed = num_rows - len(self._twins_of)
        newest = torch.from_numpy(rows.newest[:num_computed]).to(self._device)
        logits = self._forward.decode(newest, rows.positions[:num_computed], self._cache)
        experts = self._recorder.last() if self._recorder is not None and rows.num_experts else None
        if self._twins_of:
            computed_by = self._fill_twins(num_computed)
            logits = logits[torch.from_numpy(computed_by).to(self._device)]
            experts = None if experts is None else experts[computed_by]
        picked, logprobs = pick_tokens(logits, rows.sampling_rows(self._device))
        host_picked = picked.cpu().numpy()
        host_logprobs = logprobs.cpu().numpy()
        is_last = rows.extend(host_picked, host_logprobs, experts)
        self.generated_tokens += num_rows
        # A row without finite logprobs has a meaningless token too; `_finish` turns it into an error.
        self._finish(self._is_stop[host_picked], is_last, np.isfinite(host_logprobs))

    def _fill_twins(self, first_twin: int) -> NDArray[np.int64]:
        """Copies the cache of the twins, after a step that computed all other rows.

        The copy comes after the step, so that it includes the prompt's last token.
        Returns: for each row, the one that was computed for it.
        """
        logits_of = np.concatenate([np.arange(first_twin), self._twins_of])
        longest = int(self._rows.prompt_lengths[self._twins_of].max())
        self._cache.move(logits_of[first_twin:], np.arange(first_twin, len(logits_of)), longest)
        self._twins_of.clear()
        return logits_of

    def _finish(
        self, is_stop: NDArray[np.bool_], is_last: NDArray[np.bool_], is_finite: NDArray[np.bool_]
    ) -> None:
        """Resolves the rows that end with this step; the columns [B] say what is known of each row."""
        rows = self._rows
        for row, job in enumerate(rows.jobs if rows.has_stops else ()):  # most batches have no stop texts
            if job.stop is not None:
                tail = rows.completion(row)[-job.stop.num_tokens :]
                is_stop[row] |= job.stop.is_reached(tail.tolist())
        ended = np.flatnonzero(is_stop | is_last | ~is_finite)
        if not ended.size:
            return
        jobs = [rows.jobs[row] for row in ended.tolist()]
        outcomes: list[Outcome] = []
        for row in ended.tolist():
            if is_finite[row]:
                outcomes.append(rows.generation(row, "stop" if is_stop[row] else "length"))
            else:
                self._cache.clear(row)
                message = (
                    f"version {self.version} gives logprobs that are not finite; have the weights diverged?"
                )
                outcomes.append(RolloutError(message))
        # Rows are free before anyone hears of it, and the results were read before their rows are reused.
        self._release(ended)
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.resolve(outcome)

    def _release(self, rows: NDArray[np.int64]) -> None:
        """Frees rows, given in ascending order; the last live rows move into the holes."""
        sources, targets = self._rows.remove(rows)
        if sources.size:
            self._cache.move(sources, targets, int(self._rows.positions[targets].max()))

    # --- admission --------------------------------------------------------------------------------

    def _is_admission_due(self) -> bool:
        """Decides whether this step admits: soon enough for each request, and with company if possible."""
        num_ready = min(len(self._waiting), self._rows.num_free)
        if num_ready == 0:
            return False
        running = self._rows.count
        if self._num_delays < _MAX_DELAY_STEPS and num_ready * _ADMISSION_SHARE < running:
            self._num_delays += 1
            return False
        self._num_delays = 0
        return True

    def _admit(self) -> None:
        """Gives free rows to waiting requests, and prefills each prompt that is not in the cache yet, once.

        A request whose prompt is that of a running row gets a copy of that row's prefix. One whose prompt is
        that of a request admitted with it becomes its twin. Twins must be the last rows, since the forward
        pass of this step leaves them out. So they are added last, after rows have been moved.
        """
        known = {job.prompt_key: job for job in self._rows.jobs}
        num_before = self._rows.count
        fresh = list[int]()
        sources = list[int]()
        targets = list[int]()
        twins: list[tuple[Job, Job]] = []
        for _ in range(min(len(self._waiting), self._rows.num_free)):
            job = self._waiting.popleft()
            source = known.setdefault(job.prompt_key, job)
            is_shared = source is not job and source.shown == job.shown  # keys are hashes and may collide
            if is_shared and source.row >= num_before:
                twins.append((job, source))
                continue
            self._rows.add(job, self.version)
            self._cache.shifts[job.row] = 0  # until its images are seen
            if is_shared:
                sources.append(source.row)
                targets.append(job.row)
            else:
                fresh.append(job.row)
        self._prefill(fresh, self._rows.positions)
        self._share(sources, targets)
        positions = self._rows.positions[: self._rows.count]
        movers, places = self._cache.moves(positions)
        if len(movers):
            self._cache.move(movers, places, int(positions[movers].max()))
            self._rows.move(movers, places)
        for job, source in twins:
            self._rows.add(job, self.version)
            self._twins_of.append(source.row)

    def _refill(self) -> None:
        """Recomputes the keys and values of all rows, after the weights were replaced.

        A row with a prompt of its own is prefilled as a whole. For a prompt that several rows share, the
        prompt is prefilled in the first of these rows and copied to the others, and then each row's
        completion is added.
        """
        by_prompt: dict[object, list[int]] = {}
        for job in self._rows.jobs:
            by_prompt.setdefault(job.shown, []).append(job.row)
        alone = [rows[0] for rows in by_prompt.values() if len(rows) == 1]
        groups = [rows for rows in by_prompt.values() if len(rows) > 1]
        self._prefill(alone, self._rows.positions)
        self._prefill([rows[0] for rows in groups], self._rows.prompt_lengths - 1)
        sources = [rows[0] for rows in groups for _ in rows[1:]]
        targets = [row for rows in groups for row in rows[1:]]
        self._share(sources, targets)
        self._extend([row for rows in groups for row in rows])

    def _prefill(self, rows: Sequence[int], lengths: NDArray[np.int64]) -> None:
        """Computes keys and values of the first `lengths[row]` positions of the given rows."""
        for chunk, longest in _chunks(rows, lengths, len(rows)):
            tokens = torch.from_numpy(self._rows.tokens[chunk, :longest]).to(self._device)
            media = [self._rows.jobs[row].media for row in map(int, chunk)]
            at = torch.from_numpy(chunk).to(self._device)
            self._forward.prefill(tokens, at, self._cache, media if any(media) else None)

    def _share(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the keys and values of the sources' prompts, without the last token, to the targets."""
        if sources:
            longest = int(self._rows.prompt_lengths[sources].max()) - 1
            self._cache.move(np.array(sources), np.array(targets), longest)

    def _extend(self, rows: Sequence[int]) -> None:
        """Computes the given rows' keys and values from the last prompt token on.

        The newest token is left out, as always. A chunk's padding lies behind its rows' last entries.
        """
        starts = self._rows.prompt_lengths - 1
        ends = self._rows.positions
        longest_row = int(ends[rows].max(initial=1))
        most_rows = max(1, _STRETCH_POSITIONS // longest_row)
        for chunk, longest in _chunks(rows, ends - starts, most_rows):
            stretch = self._cache.stretch(
                torch.from_numpy(chunk).to(self._device),
                torch.from_numpy(starts[chunk]).to(self._device),
                longest,
                reach=int(ends[chunk].max()),
            )
            tokens = self._rows.tokens[chunk[:, None], stretch.positions.cpu().numpy()]
            self._forward.extend(torch.from_numpy(tokens).to(self._device), stretch, self._cache)


def _chunks(
    rows: Sequence[int], lengths: NDArray[np.int64], most_rows: int
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Sorts rows into calls: for each call its rows, of similar lengths, and the greatest of these lengths.

    Rows of length 0 need no call and are left out.
    """
    ordered = np.array(sorted((row for row in rows if lengths[row] > 0), key=lambda row: -lengths[row]), int)
    start = 0
    while start < len(ordered):
        longest = int(lengths[ordered[start]])
        most = min(most_rows, max(1, _PREFILL_TOKENS // longest))
        chunk = ordered[start : start + most]
        chunk = chunk[lengths[chunk] >= _MIN_FILL * longest]
        yield chunk, longest
        start += len(chunk)


# --- the weight slots of an engine ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and the lane that runs on it."""

    model: "PreTrainedModel"
    lane: Lane


class Lanes:
    """The live and the pinned lane of one policy's engine; the first snapshot goes live.

    The stepping thread owns it.
    Example: `lanes.lane_for(request.version, changing=frozenset()).submit(job)`.
    Raises: DataError or WeightsError if the first snapshot cannot serve.
    """

    def __init__(self, config: TorchEngineConfig, snapshot: WeightSnapshot, *, exact: bool = False) -> None:
        """`exact`: every logprob is the trainer's, to the last bit."""
        self._config = config
        self._exact = exact
        self.policy = snapshot.policy
        self.images = image_rules(snapshot.model_dir)
        """How the model sees images; None if it reads text alone."""
        self.live = self.build(snapshot)
        self.pinned: LoadedModel | None = None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that exist."""
        pinned = self.pinned
        return (self.live.lane,) if pinned is None else (self.live.lane, pinned.lane)

    def loaded(self, name: SlotName) -> LoadedModel | None:
        """What a slot holds; None while nothing was ever pinned."""
        return self.live if name == "live" else self.pinned

    def is_held(self, name: SlotName) -> bool:
        """True while requests for exactly the slot's version run or wait in it."""
        loaded = self.loaded(name)
        return loaded is not None and loaded.lane.is_held

    def build(self, snapshot: WeightSnapshot) -> LoadedModel:
        """Makes another model that serves a snapshot, and its lane; touches neither slot."""
        config = self._config
        model = empty_causal_lm(snapshot.model_dir, dtype=config.dtype, device=config.device)
        install_tensors(model, snapshot.tensors)
        who = f"policy {snapshot.policy!r}"
        forward = make_forward(
            model, max_context=config.context, name=who, exact=self._exact, images=self.images
        )
        lane = Lane(
            forward,
            num_slots=config.num_slots,
            max_context=config.context,
            stop_ids=stop_ids(model, snapshot.model_dir),
            version=snapshot.version,
            recorder=ExpertRecorder(model) if config.record_experts else None,
        )
        return LoadedModel(model, lane)

    def pin(self, loaded: LoadedModel) -> None:
        """Puts a model into the pinned slot."""
        self.pinned = loaded

    def drop(self, job: Job) -> None:
        """Forgets a request, whichever lane has it."""
        for lane in self.lanes:
            lane.drop(job)

    def lane_for(self, version: int, *, changing: frozenset[SlotName]) -> Lane:
        """The lane that serves a request for a version; -1 asks for the newest.

        `changing` names the slots that wait for their holders to finish.
        Raises: RolloutError (retryable) if no lane can serve the version now.
        """
        if version < 0:
            return self.live.lane
        # The pinned lane comes first: a holder there does not hold up the next live version.
        names: tuple[SlotName, ...] = ("pinned", "live")
        for name in names:
            loaded = self.loaded(name)
            if loaded is not None and loaded.lane.version == version and name not in changing:
                return loaded.lane
        pinned = "nothing" if self.pinned is None else f"version {self.pinned.lane.version}"
        about = f"; {' and '.join(sorted(changing))} about to change" if changing else ""
        raise RolloutError(
            f"version {version} of {self.policy!r} is in no slot: live is version {self.live.lane.version}, "
            f"pinned is {pinned}{about}; load it into the pinned slot first"
        )
