"""The example package: installed into an environment of its own, and used by its name in a recipe."""

import json
import subprocess
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.recipe.recipe import load_recipe
from drivers.package_driver import environment_with
from drivers.system_driver import ROOT
from drivers.weight_files import write_model_folder

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PACKAGE = ROOT / "examples" / "reward_package"
SCORE = """
from astraflow.errors import ConfigError
from astraflow.protocols import ScoringCall
from astraflow.recipe.recipe import load_recipe
from astraflow.types import Task
score = load_recipe("recipe.yaml").tasks.reward.make()
task = Task(id="train/0", source="train", prompt="40 + 2", answer="42")
print(*(score(ScoringCall(task, text, text)) for text in ("42", "40", "100", "many")))
try:
    load_recipe("recipe.yaml", {"tasks.reward.tolerance": 0})
except ConfigError as err:
    print(err)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with the package."""
    return environment_with(PACKAGE, tmp_path_factory.mktemp("env"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe that names the reward."""
    write_model_folder(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "40 + 2", "answer": "42"}) + "\n")
    recipe = {
        "name": "sums",
        "tasks": {
            "sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}},
            "reward": {"name": "close_answer", "tolerance": 20.0},
        },
        "policies": {"actor": {"model": "model"}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    return tmp_path


def test_an_installed_reward_is_used_by_its_name_and_its_settings_are_checked(
    python: str, folder: Path
) -> None:
    done = subprocess.run([python, "-c", SCORE], cwd=folder, capture_output=True, text=True, check=False)
    scores, *refusal = done.stdout.splitlines()
    assert scores == "1.0 0.9 0.0 0.0", done.stderr
    assert "tasks.reward.tolerance = 0" in "\n".join(refusal)


def test_without_the_package_its_name_is_not_a_reward(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r'tasks\.reward\.name = "close_answer" is not a reward'):
        load_recipe(folder / "recipe.yaml")


def test_the_package_is_small() -> None:
    lines = [line for path in PACKAGE.iterdir() if path.is_file() for line in path.read_text().splitlines()]
    assert len(lines) < 60
