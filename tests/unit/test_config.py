from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.addons.trackers.tensorboard import TensorBoardConfig
from astraflow.config import Use, apply_overrides, check_args, dump_yaml, load_attr, parse_config
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, load_recipe

BASE: dict[str, Any] = {
    "name": "base",
    "tasks": {"sources": {"train": {"name": "reasoning_gym", "dataset": "basic_arithmetic"}}},
    "policies": {"actor": {"model": "m", "train": {"lr": 0.1}}},
}


def write(folder: Path, mapping: dict[str, Any], name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(mapping))
    return path


def test_a_recipe_reloads_from_its_own_dump_to_an_equal_object(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, BASE), ["policies.actor.train.lr=0.5", "seed=3"])
    (tmp_path / "dump.yaml").write_text(dump_yaml(recipe))
    assert load_recipe(tmp_path / "dump.yaml") == recipe
    assert recipe.policies["actor"].train.lr == 0.5
    assert recipe.seed == 3


def test_extends_merges_key_by_key_and_the_child_wins(tmp_path: Path) -> None:
    write(tmp_path, BASE, "base.yaml")
    child = {"extends": "base.yaml", "name": "child", "policies": {"actor": {"train": {"steps": 7}}}}
    recipe = load_recipe(write(tmp_path, child))
    assert (recipe.name, recipe.policies["actor"].train.steps, recipe.policies["actor"].train.lr) == (
        "child",
        7,
        0.1,
    )


VLLM: dict[str, Any] = {"name": "vllm", "dtype": "bfloat16", "num_slots": 256}
OTHER_ENGINES: list[dict[str, Any] | list[str]] = [
    ["rollout.engine.name=sglang"],
    ["rollout.engine=sglang"],
    ["rollout.engine={name: sglang}"],
    {"rollout": {"engine": {"name": "sglang"}}},
    {"rollout": {"engine": "sglang"}},
]


def changed(folder: Path, base: dict[str, Any], change: dict[str, Any] | list[str]) -> Recipe:
    """The recipe with an override, or of a file that extends it."""
    write(folder, base, "base.yaml")
    if isinstance(change, list):
        return load_recipe(folder / "base.yaml", change)
    return load_recipe(write(folder, {"extends": "base.yaml", **change}))


@pytest.mark.parametrize("change", OTHER_ENGINES, ids=str)
def test_another_variant_keeps_the_keys_that_both_have(
    tmp_path: Path, change: dict[str, Any] | list[str]
) -> None:
    engine = changed(tmp_path, {**BASE, "rollout": {"engine": VLLM}}, change).rollout.engine.model_dump()
    assert (engine["name"], engine["dtype"], engine["num_slots"]) == ("sglang", "bfloat16", 256)


@pytest.mark.parametrize("change", OTHER_ENGINES, ids=str)
def test_a_key_that_another_variant_lacks_is_refused_with_its_value_until_it_is_removed(
    tmp_path: Path, change: dict[str, Any] | list[str]
) -> None:
    base = {**BASE, "rollout": {"engine": {**VLLM, "on_update": "keep"}}}
    with pytest.raises(ConfigError, match=r"rollout\.engine\.on_update is not a key.*'keep'"):
        changed(tmp_path, base, change)
    if isinstance(change, list):
        removed: dict[str, Any] | list[str] = [*change, "rollout.engine.on_update=null"]
    else:
        engine = change["rollout"]["engine"]
        named = engine if isinstance(engine, dict) else {"name": engine}
        removed = {"rollout": {"engine": {**named, "on_update": None}}}
    kept = changed(tmp_path, base, removed).rollout.engine.model_dump()
    assert (kept["name"], kept["dtype"]) == ("sglang", "bfloat16")


def test_a_changed_backend_keeps_its_device(tmp_path: Path) -> None:
    backend = {"device": "cuda:1", "dtype": "bfloat16"}
    actor = {"model": "m", "train": {"backend": backend}}
    base = {**BASE, "policies": {"actor": actor, "critic": {"extends": "actor"}}}
    for name in ("actor", "critic"):
        recipe = changed(tmp_path, base, [f"policies.{name}.train.backend.name=megatron"])
        kept = recipe.policies[name].train.backend.model_dump()
        assert (kept["name"], kept["device"], kept["dtype"]) == ("megatron", "cuda:1", "bfloat16")
    base["policies"]["actor"]["train"]["backend"]["lora"] = {"rank": 8}
    with pytest.raises(ConfigError, match=r"backend\.lora is not a key; .*'rank': 8"):
        changed(tmp_path, base, ["policies.actor.train.backend.name=megatron"])


def test_a_component_of_your_own_and_a_variant_replace_each_other_with_their_common_keys(
    tmp_path: Path,
) -> None:
    own = {"use": "my:reward", "args": {"bonus": 1}}
    tasks = {**BASE["tasks"], "reward": own}
    other = changed(tmp_path, {**BASE, "tasks": tasks}, ["tasks.reward.use=my:other"]).tasks.reward
    assert other.model_dump() == {"name": "use", "use": "my:other", "args": {"bonus": 1}}
    trl = changed(tmp_path, {**BASE, "tasks": tasks}, ["tasks.reward.name=trl"]).tasks.reward
    assert trl.model_dump() == {"name": "trl", "use": "my:reward", "args": {"bonus": 1}}
    with pytest.raises(
        ConfigError, match=r"(?s)reward\.args is not a key.*'bonus': 1.*reward\.use is not a key.*my:reward"
    ):
        changed(tmp_path, {**BASE, "tasks": tasks}, ["tasks.reward=exact"])
    tasks = {**BASE["tasks"], "reward": {"name": "format", "pattern": "x"}}
    with pytest.raises(ConfigError, match=r"reward\.pattern is not a key"):
        changed(tmp_path, {**BASE, "tasks": tasks}, ["tasks.reward=my:reward"])


def test_a_variant_in_a_list_keeps_its_keys(tmp_path: Path) -> None:
    curators = [{"name": "weighted", "weights": {"sums": 2.0}}]
    base = {**BASE, "tasks": {**BASE["tasks"], "curators": curators}}
    with pytest.raises(ConfigError, match=r"curators\.0\.weights is not a key.*'sums': 2\.0"):
        changed(tmp_path, base, ["tasks.curators.0.name=shuffle"])


def test_defaults_of_a_resolved_config_are_not_lost_values(tmp_path: Path) -> None:
    recipe = changed(tmp_path, {**BASE, "rollout": {"engine": VLLM}}, [])
    engine = apply_overrides(recipe, ["rollout.engine.name=torch"]).rollout.engine.model_dump()
    assert (engine["name"], engine["dtype"], engine["num_slots"]) == ("torch", "bfloat16", 256)
    recipe = apply_overrides(recipe, ["rollout.engine.on_update=keep"])
    with pytest.raises(ConfigError, match=r"on_update is not a key.*'keep'"):
        apply_overrides(recipe, ["rollout.engine.name=torch"])
    assert apply_overrides(recipe, []) == recipe


def test_a_policy_may_extend_another_policy(tmp_path: Path) -> None:
    mapping = {**BASE, "policies": {**BASE["policies"], "critic": {"extends": "actor", "model": "n"}}}
    critic = load_recipe(write(tmp_path, mapping)).policies["critic"]
    assert (critic.model, critic.train.lr) == ("n", 0.1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "policies.actor.train.loss.name=gpro",
            r'policies\.actor\.train\.loss\.name = "gpro" is not a loss; did you mean "grpo"\?',
        ),
        ("policies.actor.train.lrr=1", r'policies\.actor\.train\.lrr is not a key; did you mean "lr"\?'),
        ("policies.actor.train.leaning_rate=1", r'train\.leaning_rate is not a key; did you mean "lr"\?'),
        ("policis={}", r'policis is not a key; did you mean "policies"\?'),
        ("policies.actor.train.steps=many", r"policies\.actor\.train\.steps = 'many': .*valid integer"),
        ("policies.actor.train.minibatches=0", r"minibatches = 0: .*greater than or equal to 1"),
        ("policies.actor.table.engine_lag=9", r"engine_lag \(9\) must not exceed max_staleness \(2\)"),
        ("policies.actor.sampling.top_p=0.5", r"top_p must be 1 and top_k 0"),
        ("policies.actor.extends=acto", r'"actor"'),
        ("seed", r"not of the form a\.b=value"),
        ("name.x=1", r"name = 'base' is not a section"),
    ],
)
def test_a_wrong_key_or_value_names_path_and_remedy(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(tmp_path, BASE), [override])


def test_several_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, BASE), ["sede=1", "policies.actor.train.lrr=1"])
    assert "sede" in str(caught.value)
    assert "lrr" in str(caught.value)


def test_a_missing_file_and_broken_yaml_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_recipe(tmp_path / "no.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_recipe(tmp_path / "bad.yaml")


def test_use_stands_where_a_built_in_may_stand() -> None:
    mapping = {**BASE, "workflow": {"name": "use", "use": "my.module:fn", "args": {"rounds": 2}}}
    assert parse_config(mapping, Recipe).workflow == Use(use="my.module:fn", args={"rounds": 2})


@pytest.mark.parametrize("text", ["[tensorboard]", "[{name: tensorboard}]"])
def test_in_a_list_of_variants_a_name_stands_for_its_defaults(tmp_path: Path, text: str) -> None:
    recipe = load_recipe(write(tmp_path, BASE), [f"trackers={text}"])
    assert recipe.trackers == (TensorBoardConfig(),)


def test_an_unknown_name_in_a_list_of_variants_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='did you mean "wandb"'):
        load_recipe(write(tmp_path, BASE), ["trackers=[wandbb]"])
    with pytest.raises(ConfigError, match="trackers: wandb is named twice"):
        load_recipe(write(tmp_path, BASE), ["trackers=[wandb, {name: wandb, project: x}]"])


def test_use_must_name_module_and_attribute(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="module:attr"):
        load_recipe(write(tmp_path, BASE), ["workflow={use: nonsense}"])


def test_policies_of_one_recipe_share_their_group_size(tmp_path: Path) -> None:
    mapping = {**BASE, "policies": {**BASE["policies"], "b": {"model": "m", "table": {"group_size": 4}}}}
    with pytest.raises(ConfigError, match="group_size must be equal"):
        load_recipe(write(tmp_path, mapping))


def test_load_attr_names_the_nearest_attribute() -> None:
    assert load_attr("json:dumps")([1]) == "[1]"
    with pytest.raises(ConfigError, match='did you mean "dumps"'):
        load_attr("json:dumpss")
    with pytest.raises(ConfigError, match="does not import"):
        load_attr("no_such_module_here:x")


def test_a_module_that_is_not_found_hints_at_the_nearest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_odd_rewards.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_attr("my_odd_reward:score", where="tasks.reward.use")
    assert str(caught.value) == (
        "tasks.reward.use = 'my_odd_reward:score': module 'my_odd_reward' does not import here: no such "
        'module is installed, nor in the current folder or the recipe\'s; did you mean "my_odd_rewards"?'
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("limit = limits['low']", "NameError: name 'limits' is not defined"),
        ("from json import lods", "ImportError: cannot import name 'lods' from 'json'"),
    ],
)
def test_a_module_that_fails_when_it_is_imported_is_told_by_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    (tmp_path / "failing_rewards.py").write_text(f"import json\n\n{code}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_attr("failing_rewards:score", where="tasks.reward.use")
    assert f"'failing_rewards' does not import here: {reason}" in str(caught.value)
    assert f"failing_rewards.py, line 3: {code})" in str(caught.value)


def test_a_module_that_calls_exit_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_script.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'a_script' calls exit"):
        load_attr("a_script:reward")


def test_check_args_names_the_nearest_argument() -> None:
    def component(*, clip_low: float, clip_high: float = 0.2) -> None: ...

    check_args(component, {"clip_low": 0.1}, where="loss.args")
    with pytest.raises(
        ConfigError, match=r"loss\.args\.clip_lo is not an argument; did you mean \"clip_low\""
    ):
        check_args(component, {"clip_lo": 0.1}, where="loss.args")


def test_a_key_of_a_section_left_at_its_default_changes_the_default_variant(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, BASE), ["policies.actor.train.backend.device=cuda:0", "rollout.engine.num_slots=7"]
    )
    backend, engine = recipe.policies["actor"].train.backend, recipe.rollout.engine
    assert (backend.name, engine.name) == ("torch", "torch")
    assert backend.model_dump()["device"] == "cuda:0"
    assert engine.model_dump()["num_slots"] == 7
    with pytest.raises(
        ConfigError, match=r'rollout\.engine\.num_slot is not a key; did you mean "num_slots"'
    ):
        load_recipe(tmp_path / "recipe.yaml", ["rollout.engine.num_slot=7"])
