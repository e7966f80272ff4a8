"""A sweep of values and seeds as a user runs it: killed in the middle, resumed, and compared."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.addons.view.sweeps import ComparedRuns, Results, ViewedSweep, sweep_page
from drivers.system_driver import Place, Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SUMS = {
    "name": "reasoning_gym",
    "dataset": "basic_arithmetic",
    "split": "heldout",
    "size": 16,
    "args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]},
}
EVAL = {"every": 2, "sets": {"heldout": {"num_tasks": 16, "source": SUMS}}}


def start(*arguments: str, out: Path) -> "subprocess.Popen[bytes]":
    with out.open("wb") as file:
        process = Place().start(["sweep", *arguments], file.fileno())
    assert isinstance(process, subprocess.Popen)
    return process


def wait_for(is_so: Callable[[], bool], out: Path) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.1)


def state_of(run: Path) -> str:
    record = run / "run.json"
    return str(json.loads(record.read_text())["state"]) if record.exists() else ""


def test_a_sweep_survives_its_death_and_that_of_a_member(runs: Runs) -> None:
    recipe = str(runs.recipe(steps=2, eval=EVAL))
    group = runs.folder / "group"
    out = runs.folder / "sweep.txt"
    first, second = (f"lr={lr}_seed=0" for lr in ("1e-4", "1e-3"))

    sweep = start(recipe, "train.lr=1e-4,1e-3", "--seeds", "1", "--group-dir", str(group), out=out)
    wait_for(lambda: state_of(group / first) == "running", out)
    sweep.kill()
    sweep.wait()

    sweep = start(str(group), out=out)
    wait_for(lambda: state_of(group / second) == "running", out)
    os.kill(json.loads((group / second / "run.json").read_text())["launcher_pid"], signal.SIGKILL)
    assert sweep.wait() == 1, out.read_text()
    assert f"{second} failed (killed by SIGKILL" in out.read_text()
    assert state_of(group / first) == "finished"

    redone = astraflow("sweep", str(group), "--redo", second)
    assert redone.returncode == 0, redone.stdout + redone.stderr
    assert "1 of 2 runs have ended before" in redone.stdout
    check_comparison(group, runs.folder / "curves.png")


def check_comparison(group: Path, picture: Path) -> None:
    """The comparison has a row per variant, a sentence, a picture, and a page."""
    compared = astraflow("compare", str(group), "--markdown", "--png", str(picture))
    assert compared.returncode == 0, compared.stderr
    assert "| lr=0.0001 | 1 |" in compared.stdout
    assert "| lr=0.001 | 1 |" in compared.stdout
    assert "- actor on heldout: lr=0.001 is " in compared.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = sweep_page(ViewedSweep("group", group), Results(), {})["compared"]
    assert isinstance(page, ComparedRuns)
    assert page.comparison is not None
    assert page.comparison.verdict.figure == "actor on heldout"
    assert [member.state for member in page.members] == ["finished"] * 2
