from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from astraflow import wire
from astraflow.addons.offline.groups import MixedLearner, OfflineGroups
from astraflow.errors import DataError
from astraflow.losses.config import AuxiliaryConfig, OfflineConfig
from astraflow.protocols import StepResult
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.types import Batch, MetricItem, Sample
from astraflow.types.host_tensors import HostTensor
from drivers.trainer_builders import make_batch, make_sample, save_model

GROUP_SIZE = 2


def group_of(group_id: int, *, advantage: float = 1.0, version: int = 0) -> list[Sample]:
    return [
        make_sample(group_id=group_id, episode_idx=idx, advantage=advantage, version=version)
        for idx in range(GROUP_SIZE)
    ]


def saved(folder: Path, *sizes: int) -> Path:
    """Files of so many groups, numbered through; the task says which group it is."""
    folder.mkdir()
    number = 0
    for step, size in enumerate(sizes):
        samples: list[Sample] = []
        for group_id in range(size):
            for idx in range(GROUP_SIZE):
                sample = make_sample(sampled=(8, 9), group_id=group_id, episode_idx=idx, version=7)
                samples.append(msgspec.structs.replace(sample, task_id=f"offline/{number}"))
            number += 1
        (folder / f"{step:06d}.msgpack").write_bytes(wire.encode(make_batch(samples, step=step)))
    return folder


class Seen:
    """A backend that keeps what it gets."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def train_step(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        return StepResult(metrics=(MetricItem("loss", 0.5),))

    def export(self) -> Sequence[HostTensor]:
        return ()

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


def fresh(step: int, *, num_groups: int = 4, rank: int = 0, world: int = 1) -> Batch:
    samples = [sample for group_id in range(rank, num_groups, world) for sample in group_of(group_id)]
    batch = make_batch(samples, step=step)
    totals = msgspec.structs.replace(batch.totals, num_groups=num_groups, num_samples=num_groups * GROUP_SIZE)
    return msgspec.structs.replace(batch, rank=rank, world=world, totals=totals)


def offline_tasks(batch: Batch) -> list[str]:
    """Task ids of the offline groups of a batch, one per group."""
    return [s.task_id for s in batch.samples if s.group_id < 0 and s.episode_idx == 0]


def test_every_group_comes_once_before_any_comes_again(tmp_path: Path) -> None:
    groups = OfflineGroups(saved(tmp_path / "b", 3, 4), seed=5)
    names = [group[0].task_id for group in groups.take(0, 3 * len(groups))]
    assert len(groups) == 7
    for turn in range(3):
        assert sorted(names[7 * turn : 7 * (turn + 1)]) == [f"offline/{i}" for i in range(7)]
    assert names[:7] != names[7:14]
    assert [len(group) for group in groups.take(0, 7)] == [GROUP_SIZE] * 7


@pytest.mark.parametrize("ratio", [0.1, 0.25, 1.0, 2.5])
def test_the_ratio_holds_over_time_and_a_resumed_trainer_takes_the_same(tmp_path: Path, ratio: float) -> None:
    folder = saved(tmp_path / "b", 3, 4)
    whole, resumed = Seen(), Seen()
    for inner, first in ((whole, 0), (resumed, 6)):
        backend = MixedLearner(inner, OfflineConfig(folder=str(folder), ratio=ratio), seed=1)
        for step in range(first, 20):
            result = backend.train_step(fresh(step))
            counts = {item.name: item.value for item in result.metrics}
            chosen = offline_tasks(inner.batches[-1])
            assert counts == {
                "loss": 0.5, "offline_groups": len(chosen), "offline_tokens": 2 * GROUP_SIZE * len(chosen)
            }  # fmt: skip
    assert whole.batches[6:] == resumed.batches
    assert sum(len(offline_tasks(batch)) for batch in whole.batches) == int(20 * 4 * ratio)


def test_a_mixed_batch_is_whole(tmp_path: Path) -> None:
    inner = Seen()
    backend = MixedLearner(inner, OfflineConfig(folder=str(saved(tmp_path / "b", 8)), ratio=0.5), seed=1)
    backend.train_step(fresh(0))
    (batch,) = inner.batches
    assert [s.group_id for s in batch.samples if s.group_id >= 0] == [s.group_id for s in fresh(0).samples]
    assert Counter(s.group_id for s in batch.samples if s.group_id < 0) == {-1: GROUP_SIZE, -2: GROUP_SIZE}
    spans = {span.version for s in batch.samples if s.group_id < 0 for span in s.trajectory.versions}
    assert spans == {0}
    before, after = fresh(0).totals, batch.totals
    assert (after.num_groups, after.num_samples) == (6, 6 * GROUP_SIZE)
    assert after.num_trained_tokens - before.num_trained_tokens == 2 * GROUP_SIZE * 2
    assert after.num_tokens - before.num_tokens == 5 * GROUP_SIZE * 2
    assert after.advantage_sum - before.advantage_sum == after.advantage_square_sum == 2 * GROUP_SIZE * 2


def test_ranks_share_the_offline_groups(tmp_path: Path) -> None:
    config = OfflineConfig(folder=str(saved(tmp_path / "b", 8)), ratio=0.75)
    alone, ranks = Seen(), [Seen(), Seen()]
    MixedLearner(alone, config, seed=1).train_step(fresh(3))
    for rank, inner in enumerate(ranks):
        MixedLearner(inner, config, seed=1).train_step(fresh(3, rank=rank, world=2))
    shared = [name for inner in ranks for name in offline_tasks(inner.batches[0])]
    assert sorted(shared) == sorted(offline_tasks(alone.batches[0]))
    assert all(offline_tasks(inner.batches[0]) for inner in ranks)
    assert {inner.batches[0].totals.num_samples for inner in ranks} == {alone.batches[0].totals.num_samples}


def test_a_folder_without_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no saved batch; collect some with"):
        OfflineGroups(tmp_path, seed=0)
    (tmp_path / "000000.msgpack").write_bytes(b"\x93no")
    with pytest.raises(DataError, match=r"000000\.msgpack is not a saved batch"):
        OfflineGroups(tmp_path, seed=0)


def test_offline_groups_change_what_the_model_learns_and_equal_seeds_agree(tmp_path: Path) -> None:
    model, folder = save_model(tmp_path / "model"), saved(tmp_path / "b", 4)

    def trained(offline: OfflineConfig | None) -> list[bytes]:
        config = TrainConfig(steps=2, auxiliary=AuxiliaryConfig(offline=offline))
        backend = make_learner(config, model_dir=model, seed=3)
        for step in range(2):
            backend.train_step(make_batch(group_of(0, advantage=0.5), step=step))
        return [tensor.data.tobytes() for tensor in backend.export()]

    mixed = OfflineConfig(folder=str(folder), ratio=1.0)
    assert trained(mixed) == trained(mixed)
    assert trained(mixed) != trained(None)
