import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from astraflow.addons.view.status import RunStatus
from astraflow.addons.view.top import show_top, state_text
from astraflow.errors import DataError
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.recipe.service_state import ServiceState
from astraflow.types.alarm import Alarm
from drivers.shown_runs import make_status, make_step


def text_of(shown: object) -> str:
    """What a wide terminal shows of it."""
    file = io.StringIO()
    Console(width=300, file=file).print(shown)
    return file.getvalue()


def test_a_running_run_has_the_screen_of_its_launcher() -> None:
    status = RunStatus(
        where="runs/demo",
        name="demo",
        state="running",
        elapsed_s=42.0,
        services=(ServiceState(name="rollout-0", pid=7, state="running"),),
        alarms=(Alarm(rule="disk_low", subject="disk", since_s=0.0, evidence="the disk is nearly full"),),
        dataflow=make_status(),
        steps=(make_step(0),),
    )
    text = text_of(state_text(status))
    for part in ("astraflow demo  running  0:42", "the disk is nearly full", "3/10", "rollout-0 running"):
        assert part in text


def test_an_ended_run_says_why_without_escapes() -> None:
    status = RunStatus(
        where="runs/a",
        name="a",
        state="failed",
        reason="bad \x1b[2J news",
        alarms=(Alarm(rule="disk_low", subject="disk", since_s=0.0, evidence="no \x07"),),
    )
    text = text_of(state_text(status))
    assert "runs/a is failed: bad \\x1b[2J news" in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text


def test_the_screen_of_a_run_that_has_ended_ends_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.save_record(RunRecord(name="demo", state="failed", reason="the port is taken"))
    recipe = {
        "name": "demo",
        "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {"actor": {"model": "models/a", "train": {"steps": 3}}},
    }
    folder.recipe.write_text(json.dumps(recipe))
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    show_top(str(folder.path), None, console, every_s=60.0)
    assert "is failed: the port is taken" in " ".join(out.getvalue().split())


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has no run"):
        show_top(str(tmp_path), None, Console(file=io.StringIO()), every_s=60.0)


def test_a_run_whose_dataflow_does_not_answer_has_its_processes() -> None:
    services = (ServiceState(name="rollout-0", pid=7, state="running", age_s=3.0),)
    status = RunStatus(where="runs/a", name="a", state="running", services=services)
    text = text_of(state_text(status))
    assert "runs/a is running, but its dataflow does not answer" in text
    assert "rollout-0 running, starting for 3 s" in text
