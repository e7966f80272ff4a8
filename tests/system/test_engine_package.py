"""The package on the page about engines: installed into its own environment, and named in a recipe."""

import subprocess
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.recipe.recipe import load_recipe
from drivers.package_driver import environment_with
from drivers.system_driver import ROOT, Runs

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PACKAGE = ROOT / "examples" / "engine_package"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with the package."""
    return environment_with(PACKAGE, tmp_path_factory.mktemp("env"))


@pytest.fixture
def recipe(runs: Runs) -> str:
    """A recipe that names the engine."""
    return str(runs.recipe(rollout={"services": 1, "engine": {"name": "generate", "max_context": 64}}))


def astraflow(python: str, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """What a command prints in an environment."""
    argv = [python, "-m", "astraflow", *arguments]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def test_the_page_shows_the_package() -> None:
    page = (ROOT / "docs" / "extend" / "engine.md").read_text()
    for file in ("pyproject.toml", "generate_config.py"):
        assert f"{{literalinclude}} ../../examples/engine_package/{file}" in page


def test_an_installed_engine_generates_and_serves_new_versions(python: str, recipe: str, runs: Runs) -> None:
    argv = ("run", recipe, "--run-dir", "run", "--plain", "policies.actor.train.steps=2")
    done = astraflow(python, *argv, folder=runs.folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_settings_are_checked(python: str, recipe: str, runs: Runs) -> None:
    argv = ("run", recipe, "--dry-run", "rollout.engine.max_context=1")
    done = astraflow(python, *argv, folder=runs.folder)
    assert done.returncode == 2
    assert "rollout.engine.max_context = 1" in done.stderr


def test_without_the_package_its_name_is_not_an_engine(recipe: str) -> None:
    with pytest.raises(ConfigError, match=r'rollout\.engine\.name = "generate" is not an engine'):
        load_recipe(Path(recipe))
