"""What the dataflow and joining services are told of a recipe."""

import json
import sys
from pathlib import Path

import pytest

from astraflow.config import Use
from astraflow.errors import ConfigError
from astraflow.processes.rollout_process import own_rollout, recipe_of
from astraflow.recipe.access import check_allowed
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import code_fingerprint, fingerprints, run_info, run_plan, uses
from astraflow.rollout.engine_config import TorchEngineConfig


def make_recipe(folder: Path, **changes: object) -> Recipe:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text('{"hidden_size": 64, "transformers_version": "5"}')
    fields: dict[str, object] = {
        "name": "demo",
        "seed": 3,
        "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {
            "actor": {
                "model": f"{folder}/model",
                "table": {"engine_lag": 2},
                "sampling": {"max_tokens": 9, "stop": ["."]},
                "train": {"steps": 7},
            }
        },
    }
    return Recipe.model_validate_json(json.dumps(fields | changes))


def test_the_core_gets_sizes_and_limits(tmp_path: Path) -> None:
    plan = run_plan(make_recipe(tmp_path), {"train": 100})
    assert (plan.seed, plan.group_size, plan.sources) == (3, 8, {"train": 100})
    assert plan.policies["actor"].num_steps == 7


def test_a_joiner_gets_sampling_lag_and_a_recipe_that_reads_back(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    info = run_info(recipe)
    (policy,) = info.policies
    assert (policy.name, policy.is_trained, policy.max_lag) == ("actor", True, 2)
    assert (policy.sampling.max_tokens, policy.sampling.stop) == (9, (".",))
    assert recipe_of(info, "http://x") == recipe


def test_a_joiner_learns_what_to_do_with_an_agents_own_sampling(tmp_path: Path) -> None:
    policy = {"model": f"{tmp_path}/model", "sampling": {"agent_overrides": "ignore"}}
    ignores = make_recipe(tmp_path, policies={"actor": policy})
    assert run_info(make_recipe(tmp_path)).policies[0].agent_overrides == "refuse"
    assert run_info(ignores).policies[0].agent_overrides == "ignore"


def test_a_joiner_gets_the_template_arguments_and_they_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    policy = {
        "model": f"{tmp_path}/model",
        "template_args": {"enable_thinking": False},
        "renderer": "template",
    }
    plain = run_info(make_recipe(tmp_path, policies={"actor": {"model": f"{tmp_path}/model"}}))
    info = run_info(make_recipe(tmp_path, policies={"actor": policy}))
    assert plain.policies[0].template_args == "{}"
    assert json.loads(info.policies[0].template_args) == {"enable_thinking": False}
    assert (plain.policies[0].renderer, info.policies[0].renderer) == ("auto", "template")
    assert info.fingerprints.recipe != plain.fingerprints.recipe


def test_an_architecture_differs_by_what_matters(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    first = fingerprints(recipe)
    config = tmp_path / "model" / "config.json"
    config.write_text('{"transformers_version": "6", "hidden_size": 64}')
    assert fingerprints(recipe).models == first.models
    config.write_text('{"hidden_size": 128}')
    assert fingerprints(recipe).models != first.models


def test_the_code_of_a_recipe_includes_its_own_modules(tmp_path: Path) -> None:
    workflow = {"name": "use", "use": "astraflow.workflows.single_turn:single_turn", "args": {}}
    plain, own = make_recipe(tmp_path), make_recipe(tmp_path, workflow=workflow)
    assert code_fingerprint(plain) == code_fingerprint(plain) != code_fingerprint(own)


def test_the_code_of_a_recipe_includes_what_its_own_modules_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_flow.py").write_text("import own_rules\n")
    (tmp_path / "own_rules.py").write_text("RULES = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = make_recipe(tmp_path, workflow={"name": "use", "use": "own_flow:flow", "args": {}})
    before = code_fingerprint(recipe)
    (tmp_path / "own_rules.py").write_text("RULES = 2\n")
    assert code_fingerprint(recipe) != before


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, workflow={"name": "use", "use": "no_such_module:solve", "args": {}})
    with pytest.raises(ConfigError, match="module 'no_such_module'"):
        code_fingerprint(recipe)


@pytest.mark.parametrize("name", ["parent_pkg.part", "parent_pkg.inner.part", "space_pkg.inner.part"])
def test_looking_at_the_code_of_a_recipe_imports_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path.joinpath("modules", *name.split(".")[:-1])
    inner.mkdir(parents=True)
    (inner / "part.py").write_text("raise AssertionError('imported')\nx = 1\n")
    if name.startswith("parent_pkg"):
        for folder in (inner, tmp_path / "modules" / "parent_pkg"):
            (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    recipe = make_recipe(tmp_path, workflow={"name": "use", "use": f"{name}:x", "args": {}})
    before = code_fingerprint(recipe)
    (inner / "part.py").write_text("x = 2\n")
    assert code_fingerprint(recipe) != before
    assert name.partition(".")[0] not in sys.modules


@pytest.mark.parametrize("name", ["sys", "json.nothing", "json.decoder.nothing", "no_package.part"])
def test_what_has_no_file_is_named(name: str, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, workflow={"name": "use", "use": f"{name}:x", "args": {}})
    with pytest.raises(ConfigError, match=f"module '{name}', which the recipe names, is not installed"):
        code_fingerprint(recipe)


def test_every_part_of_a_recipe_that_a_joiner_runs_must_be_allowed(tmp_path: Path) -> None:
    use = {"name": "use", "args": {}}
    tasks = {"sources": {"train": use | {"use": "a.b:c"}}, "reward": use | {"use": "d:e"}}
    sets = {"held": {"source": use | {"use": "f:g"}}}
    engine = use | {"use": "h.i:j"}
    recipe = make_recipe(tmp_path, tasks=tasks, eval={"sets": sets}, rollout={"engine": engine})
    with pytest.raises(ConfigError, match=r"imports a\.b, d, f, h\.i here"):
        check_allowed(recipe, ("a", "h"))
    check_allowed(recipe, ("a.b", "d", "f", "h.i"))


def test_components_are_found_wherever_they_stand(tmp_path: Path) -> None:
    use = {"name": "use", "use": "m:a", "args": {}}
    tasks = {"sources": {"train": use | {"use": "m:b"}}, "curators": [use | {"use": "m:c"}]}
    recipe = make_recipe(tmp_path, workflow=use, tasks=tasks)
    assert {u.use for u in uses(recipe)} == {"m:a", "m:b", "m:c"}
    assert all(isinstance(u, Use) for u in uses(recipe))


def test_code_of_the_network_must_be_allowed(tmp_path: Path) -> None:
    workflow = {"name": "use", "use": "my_agents:solve", "args": {}}
    curators = [{"name": "use", "use": "my_curators:next", "args": {}}]
    source = {"train": {"name": "jsonl", "path": "tasks.jsonl"}}
    recipe = make_recipe(tmp_path, workflow=workflow, tasks={"sources": source, "curators": curators})
    with pytest.raises(ConfigError, match=r"imports my_agents here.*--allow my_agents"):
        check_allowed(recipe, ("other",))
    check_allowed(recipe, ("my_agents",))


def test_a_joining_service_may_differ_in_its_rollout_section_only(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    mine = own_rollout(recipe, ("rollout.engine.device=cuda:0", "rollout.max_episodes=7"))
    assert isinstance(mine.engine, TorchEngineConfig)
    assert (mine.engine.device, mine.max_episodes) == ("cuda:0", 7)
    assert own_rollout(recipe, ()) == recipe.rollout
    other = own_rollout(recipe, ("rollout.engine={use: 'my_agents:engine', args: {speed: 2}}",))
    assert isinstance(other.engine, Use)
    with pytest.raises(ConfigError, match=r"seed=3 can't be changed for one service; only rollout\.\*"):
        own_rollout(recipe, ("rollout.services=1", "seed=3"))
    with pytest.raises(ConfigError, match="num_slot"):
        own_rollout(recipe, ("rollout.engine.num_slot=3",))
