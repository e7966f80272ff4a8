"""The wheels in a fresh environment, with their dependencies from the configured index."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from docs_driver import ROOT
from system_driver import environment

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheels and the extra `quickstart`, made as a user makes it."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", symlinks=True, with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    sources = [str(ROOT), *(str(path) for path in sorted((ROOT / "packages").iterdir()))]
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder / "wheels"),
    ]
    subprocess.run([*build, *sources], check=True)
    wheels = sorted((folder / "wheels").iterdir())
    (core,) = [path for path in wheels if path.name.startswith("astraflow-")]
    others = [str(path) for path in wheels if path != core]
    subprocess.run([python, str(ROOT / "tools" / "install_torch.py"), "cpu"], check=True)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run(
        [*pip, *constraints, f"{core}[quickstart,conformance,paced]", *others, "pytest"], check=True
    )
    return folder


def run(fresh: Path, *argv: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    program = str(fresh / "venv" / "bin" / argv[0])
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    return subprocess.run([program, *argv[1:]], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_the_demo_builds_its_model_and_learns(fresh: Path, tmp_path: Path) -> None:
    done = run(fresh, "astraflow", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("reward rose from 0.3"), done.stdout


def test_a_new_project_passes_its_test_and_learns(fresh: Path, tmp_path: Path) -> None:
    assert run(fresh, "astraflow", "init", "project", cwd=tmp_path).returncode == 0
    project = tmp_path / "project"
    tested = run(fresh, "python", "-m", "pytest", "-q", cwd=project)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    built = run(fresh, "astraflow", "model", "init", "model.yaml", "--out", "models/start", cwd=project)
    assert built.returncode == 0, built.stderr
    trained = run(fresh, "astraflow", "run", "recipe.yaml", "--plain", cwd=project)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    summary = (project / "runs" / "project" / "summary.json").read_text()
    before, after = scores(summary)
    assert after > before + 0.2, trained.stdout


def scores(summary: str) -> tuple[float, float]:
    """The held-out scores before and after."""
    loaded = json.loads(summary)
    return float(loaded["heldout_before"]), float(loaded["heldout_after"])
