import os
import shutil
from pathlib import Path

import pytest

from astraflow.addons.view import runs
from astraflow.addons.view.runs import ViewedRuns
from astraflow.recipe.run_folder import RunFolder, RunRecord


def test_many_folders_that_cannot_be_read_hide_no_good_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_MAX_RUNS", 3)
    for idx in range(5):
        (tmp_path / f"bad-{idx}").mkdir()
        (tmp_path / f"bad-{idx}" / "run.json").write_text("{")
    good = RunFolder(tmp_path / "good")
    good.create()
    good.save_record(RunRecord(name="good", state="finished"))
    shown = ViewedRuns([tmp_path])
    assert {run.name for run in shown.all()} == {"good", "bad-0", "bad-1"}
    shown.close()


def test_a_run_that_is_known_is_found_without_a_look_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for idx in range(50):
        (tmp_path / f"run-{idx}" / "journal").mkdir(parents=True)
    shown = ViewedRuns([tmp_path])
    known = shown.get("run-7")
    resolved: list[object] = []
    resolve = os.path.realpath

    def count(path: Path) -> str:
        resolved.append(path)
        return resolve(path)

    monkeypatch.setattr(os.path, "realpath", count)
    assert shown.get("run-7") is known is not None
    assert resolved == []
    shutil.rmtree(tmp_path / "run-7")
    assert shown.get("run-7") is None
    shown.close()
