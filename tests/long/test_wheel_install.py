"""The wheels in a fresh environment, with their dependencies from the configured index.

The core is installed first, and asked for its demo; then what it answers is typed.
"""

import json
import re
import shlex
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from drivers.system_driver import ROOT, environment

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Fresh:
    """An environment made as a user makes it."""

    folder: Path
    answer: "subprocess.CompletedProcess[str]"
    """What `astraflow demo` said before the extra `quickstart` was installed."""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """The core's wheel, then the command that the demo names, then the packages beside the core."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", symlinks=True, with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    sources = [str(ROOT), *(str(path) for path in sorted((ROOT / "packages").iterdir()))]
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*build, "--wheel-dir", str(folder / "wheels"), *sources], check=True)
    wheels = sorted((folder / "wheels").iterdir())
    (core,) = [path for path in wheels if path.name.startswith("astraflow-")]
    others = [str(path) for path in wheels if path != core]
    subprocess.run([*pip, "install", *constraints, str(core)], check=True)
    made = Fresh(folder, run(folder, "astraflow", "demo", cwd=folder))
    if named := re.search(r"pip (install '[^']+')", made.answer.stderr):
        subprocess.run([python, str(ROOT / "tools" / "install_torch.py"), "cpu"], check=True)
        subprocess.run([*pip, *shlex.split(named[1]), *constraints], check=True)
    subprocess.run(
        [*pip, "install", *constraints, f"{core}[conformance,paced]", *others, "pytest"], check=True
    )
    return made


def run(folder: Path, *argv: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """A command of the environment in a folder."""
    program = str(folder / "venv" / "bin" / argv[0])
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    return subprocess.run([program, *argv[1:]], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_the_core_alone_says_in_one_line_what_the_demo_needs(fresh: Fresh) -> None:
    assert fresh.answer.returncode == 2, fresh.answer.stderr
    (line,) = fresh.answer.stderr.splitlines()
    assert "which the extra quickstart installs: pip install 'astraflow[quickstart]'" in line


def test_the_demo_builds_its_model_and_learns(fresh: Fresh, tmp_path: Path) -> None:
    done = run(fresh.folder, "astraflow", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("reward rose from 0.3"), done.stdout


def test_a_new_project_passes_its_test_and_learns(fresh: Fresh, tmp_path: Path) -> None:
    assert run(fresh.folder, "astraflow", "init", "project", cwd=tmp_path).returncode == 0
    project = tmp_path / "project"
    tested = run(fresh.folder, "python", "-m", "pytest", "-q", cwd=project)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    built = run(
        fresh.folder, "astraflow", "model", "init", "model.yaml", "--out", "models/start", cwd=project
    )
    assert built.returncode == 0, built.stderr
    trained = run(fresh.folder, "astraflow", "run", "recipe.yaml", "--plain", cwd=project)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    summary = (project / "runs" / "project" / "summary.json").read_text()
    before, after = scores(summary)
    assert after > before + 0.2, trained.stdout


def scores(summary: str) -> tuple[float, float]:
    """The held-out scores before and after."""
    loaded = json.loads(summary)
    return float(loaded["heldout_before"]), float(loaded["heldout_after"])
