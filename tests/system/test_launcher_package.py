"""The package on the page about launchers: installed into its own environment, and named in a recipe."""

import json
import subprocess
from pathlib import Path

import pytest

from drivers.package_driver import environment_with
from drivers.system_driver import ROOT, Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PACKAGE = ROOT / "examples" / "launcher_package"
COMMAND = """sh -c 'echo by the command; exec "$@"' sh"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with the package."""
    return environment_with(PACKAGE, tmp_path_factory.mktemp("env"))


def in_environment(python: str, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """What a command of AstraFlow prints there."""
    argv = [python, "-m", "astraflow", *arguments]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def test_the_page_shows_the_package() -> None:
    page = (ROOT / "docs" / "extend" / "launcher.md").read_text()
    for file in ("pyproject.toml", "prefix_launcher.py"):
        assert f"{{literalinclude}} ../../examples/launcher_package/{file}" in page


@pytest.mark.long
def test_a_whole_run_is_started_by_an_installed_launcher(python: str, runs: Runs) -> None:
    """In CI, `test_own_launcher.py` starts a run by a launcher that is not installed."""
    recipe = runs.recipe(steps=2, launcher={"name": "prefix", "commands": {"rollout-*": COMMAND}})
    run_dir = runs.folder / "run"
    done = in_environment(
        python, "run", str(recipe), "--run-dir", str(run_dir), "--plain", folder=runs.folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {log.stem for log in (run_dir / "logs").iterdir() if "by the command" in log.read_text()}
    assert logs == {"rollout-0"}


def test_the_option_on_names_it_and_its_keys_are_checked(python: str, runs: Runs) -> None:
    recipe = str(runs.recipe())
    done = in_environment(python, "run", recipe, "--dry-run", "--on", "prefix", folder=runs.folder)
    assert done.returncode == 2
    assert "launcher.commands is required and missing" in done.stderr
    done = in_environment(
        python,
        *("run", recipe, "--dry-run", "--on", "prefix", f"launcher.commands={json.dumps({'*': 'nice'})}"),
        folder=runs.folder,
    )
    assert done.returncode == 0, done.stderr
    assert "name: prefix" in done.stdout


def test_devices_of_its_services_are_checked_on_this_machine(python: str, runs: Runs) -> None:
    launcher = {"name": "prefix", "commands": {"*": "nice"}}
    recipe = str(runs.recipe(launcher=launcher))
    done = in_environment(
        python, "run", recipe, "--dry-run", "rollout.engine.device=cuda:999", folder=runs.folder
    )
    assert "rollout.engine.device = 'cuda:999' needs a GPU" in done.stderr


def test_without_the_package_its_name_is_not_a_launcher(runs: Runs) -> None:
    recipe = str(runs.recipe(launcher={"name": "prefix", "commands": {}}))
    done = astraflow("run", recipe, "--dry-run")
    assert done.returncode == 2
    assert 'launcher.name = "prefix" is not a launcher' in done.stderr
