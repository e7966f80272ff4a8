"""The numbered examples train in one process. Other tests run 06 and 07, and read a run with 08."""

from pathlib import Path

import pytest

from astraflow.addons.one_process.in_one_process import train_in_one_process
from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.recipe.recipe import load_recipe
from drivers.system_driver import ROOT

EXAMPLES = ROOT / "examples"
NUMBERED = sorted(EXAMPLES.glob("0*.py"))
TRAINED = {
    "01_own_reward": {"actor": "quickstart"},
    "02_own_environment": {"actor": "quickstart"},
    "03_tools": {"actor": "search"},
    "04_two_policies": {"actor": "quickstart", "verifier": "verifier"},
    "05_own_loss": {"actor": "quickstart"},
}
"""Example -> the untrained model of each policy."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("quickstart", "search", "verifier"):
        spec = ROOT / "recipes" / "models" / f"{name}.yaml"
        init_model(load_spec(spec, {"warm_start.steps": 0}), folder / name)
    return folder


@pytest.mark.parametrize("name", TRAINED)
async def test_an_example_trains_every_policy_for_a_step(name: str, models: Path) -> None:
    changes: dict[str, object] = {"rollout.max_episodes": 8}
    for policy, model in TRAINED[name].items():
        changes[f"policies.{policy}.model"] = str(models / model)
        changes[f"policies.{policy}.table.groups_per_batch"] = 2
        changes[f"policies.{policy}.table.group_size"] = 2
    recipe = load_recipe(EXAMPLES / f"{name}.yaml", changes)
    lines: list[str] = []
    await train_in_one_process(recipe, num_steps=1, tell=lines.append)
    trained = [line for line in lines if line.startswith("train ")]
    assert len(trained) == len(TRAINED[name]), lines


def test_an_example_is_short_and_on_the_page() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert len(NUMBERED) == 8
    for path in NUMBERED:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path.name
        assert f"(../examples/{path.name})" in page
