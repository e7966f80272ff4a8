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
