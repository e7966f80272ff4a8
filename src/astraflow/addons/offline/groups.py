"""Offline data: adds groups from an earlier run or an expert to the fresh groups of each batch.

    train: {auxiliary: {offline: {folder: earlier/batches/actor, ratio: 0.25}}}

The folder contains batches as saved by `astraflow run --only rollout`: whole groups with their advantages. A
batch of n fresh groups is trained together with `ratio * n` of them. Their order is shuffled, and every group
is used once before any is reused. It depends only on the seed and the step, so a resumed trainer uses the
same groups.

Their tokens count as sampled by version 0, so losses treat them as far off-policy, and no staleness bound
applies. They appear in no table and no audit; the trainer's metrics `offline_groups` and `offline_tokens`
count them.
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
from astraflow.protocols import Learner, SampleRulesProvider, StepResult, Write
from astraflow.types import Batch, BatchTotals, MetricItem, Sample, SampleRules, VersionSpan
from astraflow.types.host_tensors import HostTensor

__all__ = ["MixedLearner", "OfflineGroups", "load_batch", "offline_files", "with_version_0"]

_Group = tuple[Sample, ...]


def offline_files(folder: Path) -> tuple[Path, ...]:
    """The saved batches of a folder, in order. Raises: DataError if there is none."""
    paths = tuple(sorted(folder.glob("*.msgpack")))
    if not paths:
        raise DataError(
            f"train.auxiliary.offline.folder: {folder} has no saved batch; collect some with `astraflow run "
            "RECIPE --only rollout --run-dir DIR`, and set it to DIR/batches/POLICY"
        )
    return paths


class OfflineGroups:
    """The groups of a folder, in memory: about 13 bytes per token."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        """Raises: DataError if there is no file, or one is not a saved batch of a single rank."""
        self._seed = seed
        self._groups = [group for path in offline_files(folder) for group in _groups_of(path)]
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, first: int, num: int) -> list[_Group]:
        """Groups `first` to `first + num` of the infinite sequence of groups."""
        size = len(self._groups)
        return [self._groups[self._order(at // size)[at % size]] for at in range(first, first + num)]

    def _shuffle(self, turn: int) -> Sequence[int]:
        return np.random.default_rng((self._seed, turn)).permutation(len(self._groups)).tolist()


def load_batch(path: Path) -> Batch:
    """A saved batch. Raises: DataError if the file does not contain one."""
    body = path.read_bytes()
    try:
        return wire.decode(body, Batch, limit=len(body))
    except WireError as err:
        raise DataError(f"{path} is not a saved batch: {err}") from err


def with_version_0(sample: Sample) -> Sample:
    """The sample, with version 0 for all sampled tokens."""
    trajectory = sample.trajectory
    spans = tuple(VersionSpan(span.start, span.length, 0) for span in trajectory.versions)
    return msgspec.structs.replace(sample, trajectory=msgspec.structs.replace(trajectory, versions=spans))


def _groups_of(path: Path) -> list[_Group]:
    batch = load_batch(path)
    if batch.world != 1:
        raise DataError(f"{path} is the slice of rank {batch.rank} of {batch.world}; use whole batches")
    samples = sorted(batch.samples, key=lambda sample: sample.group_id)
    return [tuple(group) for _, group in groupby(samples, key=lambda sample: sample.group_id)]


class MixedLearner:
    """A learner that adds offline groups to its batches. Implements `Learner`.

    Example: `MixedLearner(inner, OfflineConfig(folder="earlier/batches/actor", ratio=0.25), seed=0)`.
    """

    def __init__(self, inner: Learner, config: OfflineConfig, *, seed: int) -> None:
        self.inner = inner
        """The learner that makes the steps."""
        self._ratio = config.ratio
        self._groups = OfflineGroups(Path(config.folder).expanduser(), seed=seed)

    @property
    def sample_rules(self) -> SampleRules:
        """The inner learner's rules, if it has any."""
        return self.inner.sample_rules if isinstance(self.inner, SampleRulesProvider) else SampleRules()

    def train_step(self, batch: Batch) -> StepResult:
        """Trains the batch together with its share of offline groups."""
        wanted = self._ratio * batch.totals.num_groups
        first = int(batch.step * wanted)
        last = int((batch.step + 1) * wanted)
        chosen = [  # with ids that no group of the run has
            [msgspec.structs.replace(with_version_0(sample), group_id=-1 - idx) for sample in group]
            for idx, group in enumerate(self._groups.take(first, last - first))
        ]
        mine = [sample for group in chosen[batch.rank :: batch.world] for sample in group]
        samples = [sample for group in chosen for sample in group]
        mixed = msgspec.structs.replace(
            batch, samples=(*batch.samples, *mine), totals=_add_to_totals(batch.totals, len(chosen), samples)
        )
        result = self.inner.train_step(mixed)
        num_tokens = sum(sample.trajectory.mask.count(1) for sample in samples)
        counts = (MetricItem("offline_groups", len(chosen)), MetricItem("offline_tokens", num_tokens))
        return replace(result, metrics=(*result.metrics, *counts))

    def export(self) -> Iterable[HostTensor]:
        """The inner learner's weights."""
        return self.inner.export()

    def save(self, folder: Path) -> Write | None:
        """Like the inner learner: the next groups follow from the step, so there is nothing to add."""
        return self.inner.save(folder)

    def load(self, folder: Path) -> None:
        """Like the inner learner."""
        self.inner.load(folder)


def _add_to_totals(totals: BatchTotals, num_groups: int, samples: Sequence[Sample]) -> BatchTotals:
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
