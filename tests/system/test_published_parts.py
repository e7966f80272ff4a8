"""A stranger's package with a source, a tracker, a rule of the watchdog, and a check, all used in one run."""

import subprocess
from pathlib import Path

import pytest

from drivers.package_driver import environment_with
from drivers.system_driver import ROOT, Runs

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PACKAGE = ROOT / "tests" / "stand_ins" / "parts_package"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with the package."""
    return environment_with(PACKAGE, tmp_path_factory.mktemp("env"))


def astraflow(python: str, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    argv = [python, "-m", "astraflow", *arguments]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def test_a_package_adds_a_source_a_tracker_a_rule_and_a_check(python: str, runs: Runs) -> None:
    tasks = {"sources": {"doubles": {"name": "doubles"}}, "reward": {"name": "exact"}}
    recipe = str(runs.recipe(tasks=tasks, steps=30, trackers=[{"name": "lines"}]))
    mistakes = ("tasks.sources.doubles.size=2000", "trackers=[{name: lines, file: ''}]")
    refused = astraflow(python, "run", recipe, "--dry-run", *mistakes, folder=runs.folder)
    assert refused.returncode == 2
    assert "trackers.lines.file is empty" in refused.stderr
    assert "tasks.sources.doubles.size = 2000: there are only five doubles" in refused.stderr
    done = astraflow(python, "run", recipe, "--run-dir", "run", "--plain", folder=runs.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (steps,) = (runs.folder / "run").rglob("steps.txt")
    assert steps.read_text().splitlines() == [f"actor {step}" for step in range(1, 31)]
    assert "the run goes on; have lunch" in done.stdout + done.stderr, done.stdout
