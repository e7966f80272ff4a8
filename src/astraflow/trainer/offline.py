"""Offline data: groups of an earlier run, or an expert's, beside the fresh ones of each batch.

    train: {auxiliary: {offline: {folder: earlier/batches/actor, ratio: 0.25}}}

The folder holds batches as `astraflow run --only rollout` saves them: whole groups with their advantages. A
batch of n fresh groups is trained with `ratio * n` of them besides. They come in a shuffled order, every
group once before any comes again, which follows from seed and step alone: a resumed trainer takes the same.

Their tokens count as sampled by version 0, so that losses treat them as off-policy as can be; no bound on
staleness holds for them. They are in no table and no audit: the trainer's metrics `offline_groups` and
`offline_tokens` count them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from astraflow import wire
from astraflow.errors import DataError, WireError
from astraflow.losses.config import OfflineConfig
from astraflow.protocols import HasSampleRules, Learner, StepResult, Write
from astraflow.types import Batch, BatchTotals, MetricItem, Sample, SampleRules, VersionSpan
from astraflow.types.host_tensors import HostTensor

__all__ = ["MixedLearner", "OfflineGroups", "as_of_version_0", "load_batch", "offline_files"]

_Group = tuple[Sample, ...]


def offline_files(folder: Path) -> tuple[Path, ...]:
    """The saved batches of a folder, in order. Raises: DataError if there is none."""
    paths = tuple(sorted(folder.glob("*.msgpack")))
    if not paths:
        raise DataError(
            f"train.auxiliary.offline.folder: {folder} holds no saved batch; collect some with `astraflow "
            "run RECIPE --only rollout --run-dir DIR`, and name DIR/batches/POLICY"
        )
    return paths


class OfflineGroups:
    """The groups of a folder, in memory: about 13 bytes per token."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        """Raises: DataError if a file is no saved batch of one rank, or there is none."""
        self._seed = seed
        self._groups = [group for path in offline_files(folder) for group in _groups_of(path)]
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, first: int, num: int) -> list[_Group]:
        """Groups `first` to `first + num` of the order without end."""
        size = len(self._groups)
        return [self._groups[self._order(at // size)[at % size]] for at in range(first, first + num)]

    def _shuffled(self, turn: int) -> Sequence[int]:
        return np.random.default_rng((self._seed, turn)).permutation(len(self._groups)).tolist()


def load_batch(path: Path) -> Batch:
    """A saved batch. Raises: DataError if the file is none."""
    body = path.read_bytes()
    try:
        return wire.decode(body, Batch, limit=len(body))
    except WireError as err:
        raise DataError(f"{path} is no saved batch: {err}") from err


def as_of_version_0(sample: Sample) -> Sample:
    """The sample with all of its tokens sampled by version 0."""
    trajectory = sample.trajectory
    spans = tuple(VersionSpan(span.start, span.length, 0) for span in trajectory.versions)
    return msgspec.structs.replace(sample, trajectory=msgspec.structs.replace(trajectory, versions=spans))


def _groups_of(path: Path) -> list[_Group]:
    batch = load_batch(path)
    if batch.world != 1:
        raise DataError(f"{path} is of rank {batch.rank} of {batch.world}; whole batches are needed")
    samples = sorted(batch.samples, key=lambda sample: sample.group_id)
    return [tuple(group) for _, group in groupby(samples, key=lambda sample: sample.group_id)]


class MixedLearner:
    """A learner whose batches get offline groups. Implements `Learner`.

    Example: `MixedLearner(inner, OfflineConfig(folder="earlier/batches/actor", ratio=0.25), seed=0)`.
    """

    def __init__(self, inner: Learner, config: OfflineConfig, *, seed: int) -> None:
        self._inner = inner
        self._ratio = config.ratio
        self._groups = OfflineGroups(Path(config.folder).expanduser(), seed=seed)

    @property
    def sample_rules(self) -> SampleRules:
        """The inner one's, if it has any."""
        return self._inner.sample_rules if isinstance(self._inner, HasSampleRules) else SampleRules()

    def train_step(self, batch: Batch) -> StepResult:
        """Trains the batch with its share of offline groups."""
        wanted = self._ratio * batch.totals.num_groups
        first = int(batch.step * wanted)
        last = int((batch.step + 1) * wanted)
        chosen = [_relabelled(g, -1 - idx) for idx, g in enumerate(self._groups.take(first, last - first))]
        mine = [sample for group in chosen[batch.rank :: batch.world] for sample in group]
        samples = [sample for group in chosen for sample in group]
        mixed = msgspec.structs.replace(
            batch, samples=(*batch.samples, *mine), totals=_with(batch.totals, len(chosen), samples)
        )
        result = self._inner.train_step(mixed)
        num_tokens = sum(sample.trajectory.mask.count(1) for sample in samples)
        counts = (MetricItem("offline_groups", len(chosen)), MetricItem("offline_tokens", num_tokens))
        return replace(result, metrics=(*result.metrics, *counts))

    def export(self) -> Iterable[HostTensor]:
        """The inner one's."""
        return self._inner.export()

    def save(self, folder: Path) -> Write | None:
        """The inner one's: which groups come follows from the step."""
        return self._inner.save(folder)

    def load(self, folder: Path) -> None:
        """The inner one's."""
        self._inner.load(folder)


def _relabelled(group: _Group, group_id: int) -> _Group:
    """With a number that no group of the run has, and all of version 0."""
    return tuple(msgspec.structs.replace(as_of_version_0(s), group_id=group_id) for s in group)


def _with(totals: BatchTotals, num_groups: int, samples: Sequence[Sample]) -> BatchTotals:
    """The sums with these samples in them."""
    weighted = [
        (sample.trajectory.mask.count(1, span.start, span.end), span.value)
        for sample in samples
        for span in sample.advantages
    ]
    return BatchTotals(
        num_groups=totals.num_groups + num_groups,
        num_samples=totals.num_samples + len(samples),
        num_tokens=totals.num_tokens + sum(len(s.trajectory.mask) for s in samples),
        num_trained_tokens=totals.num_trained_tokens + sum(s.trajectory.mask.count(1) for s in samples),
        advantage_sum=totals.advantage_sum + sum(num * value for num, value in weighted),
        advantage_square_sum=totals.advantage_square_sum + sum(num * v * v for num, v in weighted),
        reward_sum=totals.reward_sum + sum(s.trajectory.reward for s in samples),
    )
