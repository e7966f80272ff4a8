"""A running request, and the columns of all requests that run together.

`Rows` is a struct of arrays in host memory: row i of every column belongs to `jobs[i]`. Live rows are dense:
when rows are freed, the last ones move into the holes. A row's keys and values are those of its branch. Its
newest token is not in the cache yet. The next decoding step stores it and picks the token after it. So the
last token of a prompt needs no separate call.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow import added
from astraflow.rollout.engines.pages import Page
from astraflow.rollout.engines.requests import StopText
from astraflow.rollout.engines.sampling import Restriction, SamplingRows, uniforms
from astraflow.types import FinishReason, Generation, Media, Sampling

__all__ = ["Job", "Outcome", "Rows"]

Outcome = Generation | Exception

_SEED_MASK = 2**64 - 1


@dataclass(slots=True, eq=False)
class Job:
    """One request in an engine.

    `resolve` is called once with the result or the error, unless the request is dropped.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    max_new: int
    """Number of tokens that it may generate: `max_tokens`, or fewer if the context has less room."""
    stop: StopText | None
    resolve: Callable[[Outcome], None]
    media: Media = ()
    """The images in the prompt, with their positions among its tokens."""
    version: int = -1
    """-1 follows the live version; any other number asks for exactly this one."""
    num_begun: int = 0
    """Number of tokens at the prompt's end that are the beginning of the completion."""
    policy: str = ""
    """Whose request it is, if several policies share the engine."""
    adapter: int = 0
    """The adapter that generates; 0 if the model has none."""
    prompt_key: int = 0
    """Hash of the prompt, for finding requests that can share the prompt's keys and values."""
    row: int = -1
    """Its row while it runs, otherwise -1."""
    held: Sequence[Page] | None = None
    """The pages that it holds while it waits; None if they have not been looked up yet."""
    ended: Generation | None = None
    """Its result, once it has one."""
    marks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Pairs of a position in the completion and the version that generates from there on."""

    def __post_init__(self) -> None:
        self.use(self.adapter)

    def use(self, adapter: int) -> None:
        """Sets the adapter that generates."""
        self.adapter = adapter
        self.prompt_key = hash(self.full_prompt)

    @property
    def full_prompt(self) -> tuple[tuple[int, ...], Media, int]:
        """The prompt with its images and its adapter. Requests for which this is equal can share keys and
        values."""
        return self.prompt, self.media, self.adapter


class Rows:
    """Columns of up to `num_slots` running requests."""

    def __init__(
        self,
        num_slots: int,
        max_context: int,
        vocab_size: int,
        recorder: "added.ExpertRecorder | None" = None,
    ) -> None:
        self.jobs: list[Job] = []
        self.tokens = np.zeros((num_slots, max_context), np.int64)
        """The tokens of prompt and completion."""
        self.positions = np.zeros(num_slots, np.int64)
        """Position of the newest token."""
        self.newest = np.zeros(num_slots, np.int64)
        """The newest token itself."""
        self.branches = np.zeros(num_slots, np.int64)
        """The branch of each row, which rows with the same tokens share."""
        self.logprobs = np.zeros((num_slots, max_context), np.float32)
        self._seeds = np.zeros(num_slots, np.uint64)
        self.prompt_lengths = np.zeros(num_slots, np.int64)
        self._last = np.zeros(num_slots, np.int64)
        """Position of the last token that may be generated."""
        self._inverse_temperatures = np.ones(num_slots, np.float32)
        self._is_greedy = np.zeros(num_slots, np.bool_)
        self._top_p = np.ones(num_slots, np.float64)
        self._top_k = np.zeros(num_slots, np.int64)
        self._vocab_size = vocab_size
        self._recorder = recorder if recorder is not None and recorder.width else None
        self._experts = np.zeros((num_slots, max_context, 0), np.uint8)
        """The experts that predicted each token. Without a recorder, the last axis has size 0."""
        if self._recorder is not None:
            self._experts = np.zeros((num_slots, max_context, self._recorder.width), self._recorder.dtype)
        self._columns = (
            self._experts,
            self.tokens,
            self.positions,
            self.newest,
            self.branches,
            self.logprobs,
            self.prompt_lengths,
            self._seeds,
            self._last,
            self._inverse_temperatures,
            self._is_greedy,
            self._top_p,
            self._top_k,
        )
        """All columns that move with a row."""
        self._order = np.arange(num_slots)
        self._needs: Counter[str] = Counter()
        """Number of live rows by what they need beyond plain sampling. What no row needs is not computed."""

    @property
    def count(self) -> int:
        """Number of live rows."""
        return len(self.jobs)

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self.positions) - len(self.jobs)

    @property
    def has_stops(self) -> bool:
        """Whether a live row watches for stop texts."""
        return self._needs["stop"] > 0

    def holds(self, job: Job) -> bool:
        """Whether a job runs here. Its row number doesn't tell, because all lanes use the same numbers."""
        return 0 <= job.row < len(self.jobs) and self.jobs[job.row] is job

    def add(self, job: Job, branch: int, version: int) -> None:
        """Gives a job the next row."""
        row = len(self.jobs)
        job.row = row
        self.jobs.append(job)
        job.marks.append((0, version))
        length = len(job.prompt)
        sampling = job.sampling
        self.tokens[row, :length] = job.prompt
        self.newest[row] = job.prompt[-1]
        self.branches[row] = branch
        self.positions[row] = length - 1
        self._last[row] = length - 1 + job.max_new
        self._is_greedy[row] = sampling.temperature == 0
        # The trainer has the temperature in float32 and divides in float32, so this does too.
        self._inverse_temperatures[row] = np.float32(1) / np.float32(sampling.temperature or 1)
        self._seeds[row] = sampling.seed & _SEED_MASK
        self.prompt_lengths[row] = length
        self._top_p[row] = sampling.top_p
        self._top_k[row] = sampling.top_k or self._vocab_size
        for need in _needs(job):
            self._needs[need] += 1

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Frees rows, given in ascending order, and moves live rows from the end into the holes."""
        for row in map(int, rows):
            self.jobs[row].row = -1
            for need in _needs(self.jobs[row]):
                self._needs[need] -= 1
        num_left = len(self.jobs) - len(rows)
        # The holes are the freed rows below `num_left`. As many live rows are at or above it, and fill them.
        targets = rows[rows < num_left]
        is_kept = np.ones(len(rows), np.bool_)
        is_kept[rows[len(targets) :] - num_left] = False
        sources = num_left + np.flatnonzero(is_kept)
        if sources.size:
            for column in self._columns:
                column[targets] = column[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.jobs[target] = self.jobs[source]
            self.jobs[target].row = target
        del self.jobs[num_left:]

    def sampling_rows(self, device: torch.device) -> SamplingRows:
        """The sampling columns of the next step."""
        n = len(self.jobs)

        def column(values: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        needs = self._needs
        places = self.positions[:n] + 1 - self.prompt_lengths[:n]
        restriction = None
        if needs["restriction"]:
            restriction = Restriction(column(self._top_p[:n]), column(self._top_k[:n]))
        return SamplingRows(
            uniforms=column(uniforms(self._seeds[:n], places)),
            inverse_temperatures=column(self._inverse_temperatures[:n]) if needs["temperature"] else None,
            is_greedy=column(self._is_greedy[:n]) if needs["greedy"] else None,
            restriction=restriction,
        )

    @property
    def num_experts(self) -> int:
        """Number of values per token in the `experts` of `extend`."""
        return self._experts.shape[-1]

    def extend(
        self,
        picked: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        experts: NDArray[Any] | None = None,
    ) -> NDArray[np.bool_]:
        """Appends one token to every live row. `experts` [B, W]: the experts that predicted it.

        Returns: [B] whether a row has reached its last token.
        """
        n = len(self.jobs)
        positions = self.positions[:n]
        positions += 1  # a view: this moves the rows' own positions
        self.tokens[self._order[:n], positions] = picked
        self.logprobs[self._order[:n], positions] = logprobs
        if experts is not None:
            self._experts[self._order[:n], positions] = experts
        self.newest[:n] = picked
        return positions >= self._last[:n]

    def completion(self, row: int) -> NDArray[np.int64]:
        """The tokens that a row has generated so far, after those that the completion began with."""
        job = self.jobs[row]
        return self.tokens[row, len(job.prompt) - job.num_begun : self.positions[row] + 1]

    def beginning(self, row: int) -> Generation | None:
        """What a row has generated so far; None if there is nothing, or experts are recorded with it."""
        is_empty = self.positions[row] < self.prompt_lengths[row]
        return None if is_empty or self._recorder is not None else self.generation(row, "abort")

    def generation(self, row: int, reason: FinishReason) -> Generation:
        """The result of a row."""
        job = self.jobs[row]
        start = len(job.prompt)
        end = int(self.positions[row]) + 1
        return Generation(
            token_ids=tuple(self.tokens[row, start:end].tolist()),
            logprobs=tuple(self.logprobs[row, start:end].tolist()),
            versions=_versions(job.marks, end - start),
            finish_reason=reason,
            streams=() if self._recorder is None else (self._recorder.stream(self._experts[row, start:end]),),
        )

    def mark_version(self, version: int, adapter: int) -> None:
        """Notes that another version of an adapter generates all its tokens from here on."""
        for job, position in zip(self.jobs, self.positions.tolist(), strict=False):
            if job.adapter == adapter:
                job.marks.append((position + 1 - len(job.prompt), version))


def _needs(job: Job) -> tuple[str, ...]:
    """What a row needs beyond sampling from the whole vocabulary at temperature 1."""
    sampling = job.sampling
    is_restricted = sampling.top_p < 1 or sampling.top_k > 0
    if sampling.temperature == 1 and not is_restricted and job.stop is None:
        return ()
    needs = {
        "temperature": sampling.temperature not in {0, 1},
        "greedy": sampling.temperature == 0,
        "restriction": is_restricted,
        "stop": job.stop is not None,
    }
    return tuple(name for name, is_needed in needs.items() if is_needed)


def _versions(marks: list[tuple[int, int]], count: int) -> tuple[int, ...]:
    """The version of each of the `count` tokens of a completion."""
    if len(marks) == 1:
        return (marks[0][1],) * count
    ends = [start for start, _ in marks[1:]] + [count]
    spans = zip(marks, ends, strict=True)
    return tuple(version for (start, version), end in spans for _ in range(start, end))
