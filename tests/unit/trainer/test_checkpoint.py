"""Checkpoints appear whole or not at all."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from astraflow.errors import DataError
from astraflow.trainer.checkpoint import RECORD_FILE, Checkpoint, CheckpointStore, sync_path


def make_store(folder: Path, *, keep: int = 2, policy: str = "actor") -> CheckpointStore:
    return CheckpointStore(folder, policy=policy, keep=keep)


def write(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    return store.finish(store.stage(step, lambda folder: fill(folder, text))).path


def fill(folder: Path, text: str) -> None:
    (folder / "model").write_text(text)
    (folder / "state").write_bytes(b"state")


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert make_store(tmp_path / "none").latest() is None


def test_the_latest_is_the_one_of_the_most_steps(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (9, 10, 100):
        write(store, step, text=f"after {step}")
    latest = make_store(tmp_path).latest()
    assert latest is not None
    assert latest.step == 100
    assert (latest.path / "model").read_text() == "after 100"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    paths = [write(store, step) for step in (1, 2, 3)]
    assert [path.exists() for path in paths] == [False, True, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_staged_checkpoint_is_not_visible(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, 1)
    store.stage(2, lambda folder: fill(folder, "half"))
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1


def test_every_file_is_durable_before_a_checkpoint_is_visible_and_its_name_after(tmp_path: Path) -> None:
    found: list[tuple[str, bool]] = []
    """What was made durable, and whether the checkpoint was visible by then."""

    def note(path: Path) -> None:
        assert path.exists()
        found.append((str(path.relative_to(tmp_path)), (tmp_path / "step-00000002").exists()))

    write(CheckpointStore(tmp_path, policy="actor", keep=2, sync=note), 2)
    staged = ".staged-00000002"
    files = [f"{staged}/model", f"{staged}/state", f"{staged}/{RECORD_FILE}"]
    assert sorted(found[:3]) == sorted((name, False) for name in files)
    assert found[3:] == [(staged, False), (".", True)]


def test_files_and_folders_reach_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path):
        calls = system_calls(lambda path=path: sync_path(path))
        assert calls == [path], calls


def system_calls(act: Callable[[], None]) -> list[Path]:
    """The files and folders that are flushed to the disk while `act` runs, as the interpreter reports it."""
    opened: dict[str, Path] = {}
    calls: list[Path] = []

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and arg is os.open:
            opened["path"] = frame.f_locals["path"]
        if event == "c_call" and arg is os.fsync:
            calls.append(opened["path"])

    sys.setprofile(watch)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def test_what_a_killed_trainer_staged_is_overwritten(tmp_path: Path) -> None:
    make_store(tmp_path).stage(2, lambda folder: fill(folder, "left over"))
    path = write(make_store(tmp_path), 2)
    assert sorted(p.name for p in path.iterdir()) == sorted([RECORD_FILE, "model", "state"])


def test_what_a_killed_trainer_staged_goes_with_the_next_checkpoint_of_another_step(tmp_path: Path) -> None:
    for step in (2, 9):
        make_store(tmp_path).stage(step, lambda folder: fill(folder, "left over"))
    assert write(make_store(tmp_path), 3).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".staged-00000009", "step-00000003"]


@pytest.mark.parametrize("damage", ["record gone", "file gone", "file cut", "file changed", "record cut"])
def test_a_torn_checkpoint_is_set_aside(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path)
    write(store, 1)
    torn = write(store, 2)
    if damage == "record gone":
        (torn / RECORD_FILE).unlink()
    elif damage == "file gone":
        (torn / "model").unlink()
    elif damage == "file cut":
        (torn / "model").write_text("wei")
    elif damage == "file changed":
        (torn / "model").write_text("heights")
    else:
        (torn / RECORD_FILE).write_bytes((torn / RECORD_FILE).read_bytes()[:-5])
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    assert "set aside as damaged-step-00000002" in caplog.text
    assert not torn.exists()


def test_a_torn_checkpoint_is_replaced_by_the_next_of_its_step(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (write(store, 2) / "model").unlink()
    write(store, 2, text="again")
    latest = store.latest()
    assert latest is not None
    assert (latest.path / "model").read_text() == "again"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    write(make_store(tmp_path, keep=1), 3)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step-by-step").is_dir()


def test_a_checkpoint_of_another_policy_is_refused(tmp_path: Path) -> None:
    shutil.copytree(write(make_store(tmp_path / "a"), 1), tmp_path / "b" / "step-00000001")
    with pytest.raises(DataError, match="belongs to policy 'actor', not 'judge'"):
        make_store(tmp_path / "b", policy="judge").latest()


def test_what_is_still_to_be_written_is_written_before_the_folder_appears(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    staged = store.stage(3, lambda folder: lambda: fill(folder, "late"))
    assert not list(staged.path.iterdir())
    path = store.finish(staged).path
    assert (path / "model").read_text() == "late"
    assert store.latest() == Checkpoint(path, 3)


def test_files_in_folders_are_recorded_and_durable_too(tmp_path: Path) -> None:
    synced_paths: list[str] = []
    store = CheckpointStore(
        tmp_path, policy="actor", keep=2, sync=lambda path: synced_paths.append(path.name)
    )

    def deep(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "factors").write_text("factors")

    path = store.finish(store.stage(1, deep)).path
    assert {"adapter", "factors"} <= set(synced_paths)
    assert store.latest() == Checkpoint(path, 1)
    (path / "adapter" / "factors").write_text("fActors")
    assert store.latest() is None


def test_the_record_of_a_checkpoint_that_training_began_with_is_replaced(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = store.finish(store.stage(1, lambda folder: (folder / RECORD_FILE).write_text("{}") and None)).path
    assert store.latest() == Checkpoint(path, 1)
