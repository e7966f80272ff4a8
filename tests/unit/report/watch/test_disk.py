"""The room on a run's disk, and what its next checkpoints take."""

from pathlib import Path

from astraflow.recipe.run_folder import RunFolder
from astraflow.report.watch.disk import DiskGauge


def checkpoint(folder: RunFolder, policy: str, step: int, num_bytes: int) -> None:
    path = folder.checkpoints / policy / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "state").write_bytes(bytes(num_bytes))


def test_the_newest_checkpoint_of_each_policy_says_what_the_next_ones_take(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    gauge = DiskGauge(folder)
    first = gauge.measure()
    assert first is not None
    assert first.checkpoint_bytes == 0
    assert first.free_bytes > 0
    checkpoint(folder, "actor", 10, 1000)
    checkpoint(folder, "actor", 20, 2000)
    checkpoint(folder, "critic", 10, 400)
    second = gauge.measure()
    assert second is not None
    assert second.checkpoint_bytes == 2400


def test_a_folder_that_is_gone_has_no_disk(tmp_path: Path) -> None:
    assert DiskGauge(RunFolder(tmp_path / "none")).measure() is None
