"""Recipes of full size: short, valid, the same at both sizes; `scale=smoke` keeps what they are about."""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from astraflow.addons.gallery.listing import full_recipes
from astraflow.config import dump_yaml
from astraflow.errors import ConfigError, DataError
from astraflow.losses.m2po import m2po_prototype
from astraflow.losses.policy import LossInputs
from astraflow.recipe import gallery
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.sources import open_sources
from astraflow.tasks.variants import PromptsConfig
from astraflow.user_input.yaml_files import place_in
from drivers.system_driver import ROOT

ALL = [entry.name for entry in full_recipes()]
FULL = [name for name in ALL if name.startswith("math/") or "/1.7b" in name or "/8b" in name]
"""Each family at two sizes, and each size of one family."""
FULL = [name for name in FULL if name.startswith("math/") or not ("-1gpu" in name or "-80gb" in name)]
FAMILIES = {
    "adapt-textcraft",
    "agentbench-alfworld",
    "agentbench-webshop",
    "alfworld",
    "alfworld-like",
    "code",
    "code-multi-agent",
    "deepdive",
    "math",
    "math-multi-agent",
    "efficient-math",
    "math-efficient-data",
    "search",
    "terminal",
    "terminal-bench",
    "textcraft",
    "textcraft-like",
    "webshop",
    "webshop-like",
}
WORLDS = ("agentbench", "alfworld", "deepdive", "terminal", "textcraft", "webshop")
"""Families whose tasks are generated, or come from a server."""
PROTOTYPE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("prototype.toml").read_text())
OWN = {"terminal": {"train_batch_size": 256, "lr": 5e-6, "m2_threshold": 0.004}}
"""Settings of the families that the prototype doesn't have."""
_TEMPLATE = 256
"""Tokens that a chat template adds at most."""
SMOKE = {"model": "tiny", "scale": "smoke"}


def recipe_of(name: str, **overrides: Any) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)


def mapping_of(config: BaseModel, *left_out: str) -> dict[str, Any]:
    return json.loads(config.model_dump_json(exclude=set(left_out)))


def test_each_family_has_both_sizes() -> None:
    found = {(name.partition("/")[0], name.partition("/")[2].partition("-")[0]) for name in FULL}
    assert found >= {(family, size) for family in FAMILIES for size in ("1.7b", "8b")}


def test_sizes_and_families_are_joined_under_a_name_and_a_path() -> None:
    assert {"math/14b", "alfworld/qwen2.5-7b", "code-multi-agent/8b-select"} < set(ALL)
    assert "math-multi-agent/14b" not in ALL
    recipe = recipe_of("efficient-math/8b-80gb")
    assert recipe.name == "efficient-math-8b-80gb"
    assert recipe.policies["actor"].train.ranks == 4
    assert recipe.policies["actor"].table.replay.share == 0.3
    assert gallery.recipe_file("math/4b") == (gallery.gallery_root() / "recipes" / "math" / "4b.yaml", True)
    with pytest.raises(ConfigError, match=r"no recipe or model is named 'math/5b'; did you mean"):
        gallery.recipe_file("math/5b")


def test_a_mistake_names_the_file_that_has_it() -> None:
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        recipe_of("math/8b", **{"train.stepz": 3})
    assert place_in(ROOT / "recipes" / "math" / "8b.yaml", ["tasks", "reward"]).endswith("math/full.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_full_recipe_and_its_parts_have_less_than_30_lines(path: Path) -> None:
    is_full = path.stem.startswith("full") or path.stem[0].isdigit() or path.parent.name == "sizes"
    assert not is_full or len(path.read_text().splitlines()) <= 30


@pytest.mark.parametrize("name", FULL)
def test_a_full_recipe_resolves_to_one_that_reloads(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name)
    (tmp_path / "resolved.yaml").write_text(dump_yaml(recipe))
    assert load_recipe(tmp_path / "resolved.yaml") == recipe


@pytest.mark.parametrize("name", FULL)
def test_a_full_recipe_has_the_numbers_of_the_prototype(name: str) -> None:
    facts = {**PROTOTYPE["families"], **OWN}[name.partition("/")[0]]
    for policy in recipe_of(name).trained.values():
        assert policy.table.group_size * policy.table.batch_groups == facts["train_batch_size"]
        assert policy.table.group_size == 8
        assert policy.table.max_staleness == 8
        assert policy.train.lr == facts["lr"]
        assert policy.train.loss.name == "m2po_prototype"
        assert policy.train.loss.budget == facts["m2_threshold"]


def test_every_family_of_the_prototype_is_here() -> None:
    assert {*PROTOTYPE["families"], *OWN} == FAMILIES


def test_m2po_clips_at_the_limits_of_the_prototype_where_its_square_allows_more() -> None:
    low, high = PROTOTYPE["m2po"]["min_ratio"], PROTOTYPE["m2po"]["max_ratio"]
    ratios = torch.tensor([high + 1, low / 2])
    inputs = LossInputs(
        logprobs=ratios.log(), proximal_logprobs=None, behavior_logprobs=torch.zeros(2),
        advantages=torch.tensor([1.0, -1.0]), statistics={"tau": torch.tensor(math.inf)},
    )  # fmt: skip
    assert m2po_prototype(inputs, budget=0.01).per_token.tolist() == pytest.approx([-high, low])


def test_full_recipes_publish_deltas_and_services_of_other_nodes_pass_them_on() -> None:
    weights = {name: recipe_of(name).weights for name in ALL}
    assert all(config.delta for config in weights.values())
    is_elsewhere = {name: not recipe_of(name).has_services_here for name in ALL}
    assert {name for name, config in weights.items() if config.peers} == {n for n in ALL if is_elsewhere[n]}


@pytest.mark.parametrize("name", FULL)
def test_trainers_and_services_have_gpus_of_their_own(name: str) -> None:
    recipe = recipe_of(name)
    if not recipe.rollout.gpus or "-1gpu" in name:
        return  # the services are on other nodes, or share the only GPU
    gpus = [gpu for entry in recipe.rollout.gpus for gpu in entry.split(",")]
    trainers: set[str] = set()
    for policy in recipe.trained.values():
        first = int(mapping_of(policy.train.backend)["device"].removeprefix("cuda:"))
        trainers |= {str(gpu) for gpu in range(first, first + policy.train.ranks)}
    assert len(gpus) == len(set(gpus))
    assert trainers.isdisjoint(gpus)
    assert trainers | set(gpus) == {str(idx) for idx in range(len(gpus) + len(trainers))}
    assert recipe.rollout.services == len(recipe.rollout.gpus)


@pytest.mark.parametrize(
    ("share", "fresh"), list(zip(PROTOTYPE["replay"]["replay_ratio"], (32, 23, 16, 10), strict=True))
)
@pytest.mark.parametrize("curators", ["", "tasks.curators=[shuffle]"])
@pytest.mark.parametrize("family", ["efficient-math", "math-efficient-data"])
def test_the_grid_of_the_paper_is_two_overrides(share: float, fresh: int, curators: str, family: str) -> None:
    """The prototype replays `int(256 * share)` of 256 samples; here, groups of 8 of them are whole."""
    overrides = [f"table.replay.share={share}" if share else "table.replay={}", *filter(None, [curators])]
    recipe = load_recipe(ROOT / "recipes" / family / "8b.yaml", overrides)
    table = recipe.policies["actor"].table
    assert (table.batch_groups, table.least_fresh, table.max_replayed) == (32, fresh, 32 - fresh)
    assert abs(8 * table.max_replayed - int(256 * share)) < 8
    assert len(recipe.tasks.curators) == (1 if curators else 2)


def test_selective_rollout_has_the_floors_of_the_prototype() -> None:
    recipe = recipe_of("efficient-math/8b")
    facts = PROTOTYPE["replay"]
    greso = mapping_of(recipe.tasks.curators[1])
    assert (greso["floor_easy"], greso["floor_hard"]) == (facts["min_submit_easy"], facts["min_submit_hard"])
    assert mapping_of(recipe.tasks.sources["train"])["limit"] == facts["max_samples"]


def test_sglang_and_megatron_load_as_written() -> None:
    sglang, megatron = recipe_of("math/8b-sglang"), recipe_of("math/8b-megatron")
    engine, backend = sglang.rollout.engine, megatron.policies["actor"].train.backend
    assert (engine.name, mapping_of(engine)["args"]) == ("sglang", ["--mem-fraction-static", "0.6"])
    assert (backend.name, mapping_of(backend)["tensor"]) == ("megatron", 4)
    assert megatron.policies["actor"].train.ranks == 4


@pytest.mark.parametrize("order", ["edf", "sweep", "fifo"])
def test_an_order_is_one_override(order: str) -> None:
    recipe = recipe_of("math/8b", **{"table.sampler": order})
    assert recipe.policies["actor"].table.sampler.name == order


@pytest.mark.parametrize("name", [name for name in FULL if not name.startswith(WORLDS)])
def test_missing_data_name_the_command_that_gets_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(name, model="tiny")
    with pytest.raises(DataError, match=r"not prepared .* `astraflow data prepare [\w-]+ --out|: git clone "):
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


@pytest.mark.parametrize("name", [name for name in FULL if re.search(r"/8b(-80gb|-select|-single)?$", name)])
def test_both_sizes_are_one_recipe_in_small(name: str) -> None:
    """So that a run of the one at `scale=smoke` is a run of the other."""
    other = name.replace("/8b-80gb", "/1.7b").replace("/8b", "/1.7b")
    assert mapping_of(recipe_of(name, **SMOKE), "name") == mapping_of(recipe_of(other, **SMOKE), "name")


@pytest.mark.parametrize("name", ["alfworld", "webshop", "textcraft"])
def test_the_old_name_of_a_look_alike_is_the_same_recipe(name: str) -> None:
    """`tiny` also resumes: its modules and the run's name are what they were."""
    for size in ("8b", "tiny"):
        old, new = recipe_of(f"{name}/{size}"), recipe_of(f"{name}-like/{size}")
        assert mapping_of(old, "name") == mapping_of(new, "name")
    assert recipe_of(f"{name}/tiny").name == name


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


@pytest.mark.parametrize("name", [name for name in ALL if re.search(r"/(1\.7b|2b|32b|30b)|nodes", name)])
def test_no_setting_of_a_full_recipe_breaks_its_first_hour(name: str) -> None:
    """Servers of a GPU start in turn, evaluations outlast their episodes, and jobs reserve what they need."""
    recipe = recipe_of(name)
    engine: Any = recipe.rollout.engine
    shares = engine.gpu_shares(num_policies=len(recipe.policies), has_evals=True)
    assert engine.start_timeout_s >= 600 * len(shares)
    assert recipe.eval.deadline_s >= 2 * recipe.rollout.episode_timeout_s
    slowest_s = recipe.policies["actor"].sampling.max_tokens / 20  # tokens per second and request
    assert recipe.rollout.episode_timeout_s >= 2 * slowest_s
    if recipe.launcher.name == "slurm":
        needs = recipe.cluster.rollout
        assert (
            recipe.dataflow.host == recipe.weights.host == "127.0.0.1"
        )  # until the launcher says where it is
        assert needs.cpus >= 8 * needs.gpus
        assert needs.memory_gb >= 200


def test_every_full_recipe_is_valid_and_leaves_room_for_a_whole_answer_to_the_longest_prompt() -> None:
    recipes = [recipe_of(name) for name in ALL]
    assert len(recipes) > 100
    for recipe in recipes:
        engine: Any = recipe.rollout.engine
        sources = [*recipe.tasks.sources.values(), *(each.source for each in recipe.eval.sets.values())]
        limits = [source.max_prompt_tokens for source in sources if isinstance(source, PromptsConfig)]
        for policy in recipe.trained.values():
            room = engine.context - max(limits, default=0) - _TEMPLATE
            assert policy.sampling.max_tokens <= room, recipe.name
            assert policy.train.token_budget >= engine.context, recipe.name
