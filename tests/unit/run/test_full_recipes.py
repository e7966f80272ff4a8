"""Recipes of full size: short, valid, the same at both sizes; `scale=smoke` keeps what they are about."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from astraflow.config import dump_yaml
from astraflow.errors import ConfigError, DataError
from astraflow.recipe import gallery
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.sources import open_sources
from drivers.system_driver import ROOT

FULL = sorted(
    entry.name for entry in gallery.entries() if entry.name.rpartition("/")[2].startswith(("1.7b", "8b"))
)
FULL = [name for name in FULL if not name.startswith("sizes/")]
FAMILIES = {
    "alfworld",
    "code",
    "code-multi-agent",
    "deepdive",
    "math",
    "math-multi-agent",
    "efficient-math",
    "search",
    "terminal-bench",
    "textcraft",
    "webshop",
}
WORLDS = ("alfworld", "deepdive", "terminal-bench", "textcraft", "webshop")
"""Families whose tasks are generated."""
SMOKE = {"model": "tiny", "scale": "smoke"}


def recipe_of(name: str, **overrides: Any) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)


def mapping_of(config: BaseModel, *left_out: str) -> dict[str, Any]:
    return json.loads(config.model_dump_json(exclude=set(left_out)))


def test_each_family_has_both_sizes() -> None:
    found = {(name.partition("/")[0], name.partition("/")[2].partition("-")[0]) for name in FULL}
    assert found >= {(family, size) for family in FAMILIES for size in ("1.7b", "8b")}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_full_recipe_and_its_parts_have_less_than_30_lines(path: Path) -> None:
    is_full = path.stem.startswith(("1.7b", "8b", "full"))
    assert not is_full or len(path.read_text().splitlines()) < 30


@pytest.mark.parametrize("name", FULL)
def test_a_full_recipe_resolves_to_one_that_reloads(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name)
    (tmp_path / "resolved.yaml").write_text(dump_yaml(recipe))
    assert load_recipe(tmp_path / "resolved.yaml") == recipe


@pytest.mark.parametrize("name", FULL)
def test_a_full_recipe_has_the_settings_of_the_paper(name: str) -> None:
    recipe = recipe_of(name)
    for policy in recipe.trained.values():
        assert policy.table.group_size * policy.table.groups_per_batch == 256
        assert policy.table.group_size == 8
        assert policy.train.lr == 5e-6
        is_agent = recipe.workflow.name != "single_turn"
        assert policy.train.loss.name == "m2po"
        assert policy.train.loss.budget == (0.004 if is_agent else 0.01)
    gpus = set(recipe.rollout.gpus)
    backends = [mapping_of(policy.train.backend) for policy in recipe.trained.values()]
    trainers = [backend["device"].removeprefix("cuda:") for backend in backends]
    assert gpus.isdisjoint(trainers)
    assert gpus | set(trainers) <= {str(idx) for idx in range(8 if "8b" in name else 2)}
    assert recipe.rollout.services == len(recipe.rollout.gpus)


@pytest.mark.parametrize("name", [name for name in FULL if not name.startswith(WORLDS)])
def test_missing_data_name_the_command_that_gets_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(name, model="tiny")
    with pytest.raises(DataError, match=r"not prepared .* `astraflow data prepare [\w-]+ --out"):
        open_sources(recipe)


@pytest.mark.parametrize("name", FULL)
def test_smoke_keeps_what_a_recipe_is_about(name: str) -> None:
    whole = recipe_of(name)
    small = recipe_of(name, **SMOKE)
    assert mapping_of(small.workflow, "index") == mapping_of(whole.workflow, "index")
    assert small.tasks.reward == whole.tasks.reward
    assert small.tasks.extract == whole.tasks.extract
    assert small.tasks.curators == whole.tasks.curators
    assert {name: policy.model for name, policy in small.policies.items()} == dict.fromkeys(
        whole.policies, "./models/tiny"
    )
    for key, policy in small.trained.items():
        full = whole.trained[key]
        assert policy.train.loss == full.train.loss
        assert policy.train.steps == 3
        sizes = {"group_size", "groups_per_batch"}
        assert mapping_of(policy.table, *sizes) == mapping_of(full.table, *sizes)


@pytest.mark.parametrize("name", [name for name in FULL if "/8b" in name])
def test_both_sizes_are_one_recipe_in_small(name: str) -> None:
    """So that a run of the one at `scale=smoke` is a run of the other."""
    other = name.replace("/8b", "/1.7b")
    assert mapping_of(recipe_of(name, **SMOKE), "name") == mapping_of(recipe_of(other, **SMOKE), "name")


def test_smoke_plays_easy_tasks_of_the_same_environment() -> None:
    environment = recipe_of("alfworld/1.7b", **SMOKE).tasks.environments["household"]
    assert environment.use == recipe_of("alfworld/1.7b").tasks.environments["household"].use
    assert environment.args["commands_left"] == 1
    assert environment.args["max_turns"] == 50


def test_other_overrides_win_over_the_scale() -> None:
    recipe = recipe_of("math/1.7b", **SMOKE, steps=5, **{"rollout.services": 2})
    assert recipe.policies["actor"].train.steps == 5
    assert recipe.rollout.services == 2


def test_an_unknown_scale_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"scale = 'smok' .*did you mean \"smoke\"\?"):
        recipe_of("math/1.7b", scale="smok")


def test_a_model_is_a_folder_or_the_name_of_a_spec() -> None:
    assert recipe_of("math/1.7b", model="some/folder").policies["actor"].model == "some/folder"
    assert recipe_of("math/1.7b", model="tiny").policies["actor"].model == "./models/tiny"
