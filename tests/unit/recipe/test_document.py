"""A recipe with one policy may have that policy's keys at its top; it is resolved to the full form."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.cli.main import main
from astraflow.config import dump_yaml
from astraflow.errors import ConfigError
from astraflow.recipe.document import POLICY_KEYS, full_mapping, keys_as_written
from astraflow.recipe.recipe import PolicyConfig, Recipe, load_recipe
from astraflow.recipe.scale import scale_mapping
from astraflow.run.preflight import check_recipe
from drivers.recipe_builders import make_digit_recipe

TASKS = {"sources": {"mine": {"name": "jsonl", "path": "tasks.jsonl"}}, "reward": "exact"}
SHORT: dict[str, Any] = {"name": "mine", "tasks": TASKS, "model": "./m", "train": {"lr": 0.1}}
POLICY = {"model": "./m", "train": {"lr": 0.1}}
FULL: dict[str, Any] = {"name": "mine", "tasks": TASKS, "policies": {"actor": POLICY}}
TWO: dict[str, Any] = {**FULL, "policies": {"solver": POLICY, "verifier": POLICY}}


def write(folder: Path, mapping: dict[str, Any], name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(mapping))
    return path


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(file, overrides)
    return str(caught.value).removeprefix(f"{file}: ")


def test_the_keys_are_those_of_a_policy_and_of_no_section() -> None:
    assert set(POLICY_KEYS) < set(PolicyConfig.model_fields)
    assert not set(POLICY_KEYS) & set(Recipe.model_fields)


def test_the_short_form_is_the_full_form_with_a_policy_actor(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SHORT))
    assert recipe == load_recipe(write(tmp_path, FULL, "full.yaml"))
    (tmp_path / "resolved.yaml").write_text(dump_yaml(recipe))
    assert list(yaml.safe_load(dump_yaml(recipe))["policies"]) == ["actor"]
    assert load_recipe(tmp_path / "resolved.yaml") == recipe


@pytest.mark.parametrize("form", [SHORT, FULL], ids=["short", "full"])
@pytest.mark.parametrize("prefix", ["", "policies.actor."], ids=["short", "full"])
def test_overrides_of_either_form_work_on_either_form(
    tmp_path: Path, form: dict[str, Any], prefix: str
) -> None:
    keys = {"model": "./other", "train.loss.name": "gspo", "train.lr": 0.2, "sampling.max_tokens": 9}
    recipe = load_recipe(write(tmp_path, form), {f"{prefix}{key}": value for key, value in keys.items()})
    actor = recipe.policies["actor"]
    assert (actor.model, actor.train.loss.name, actor.train.lr) == ("./other", "gspo", 0.2)
    assert actor.sampling.max_tokens == 9


@pytest.mark.parametrize("base", [SHORT, FULL], ids=["short", "full"])
@pytest.mark.parametrize(
    "change", [{"train": {"steps": 7}}, {"policies": {"actor": {"train": {"steps": 7}}}}], ids=str
)
def test_a_recipe_of_one_form_may_extend_one_of_the_other(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any]
) -> None:
    write(tmp_path, base, "base.yaml")
    train = load_recipe(write(tmp_path, {"extends": "base.yaml", **change})).policies["actor"].train
    assert (train.steps, train.lr) == (7, 0.1)


def test_the_keys_are_those_of_the_policy_that_the_extended_recipe_names(tmp_path: Path) -> None:
    write(tmp_path, {**FULL, "policies": {"solver": POLICY}}, "base.yaml")
    child = write(tmp_path, {"extends": "base.yaml", "model": "./other"})
    assert {name: p.model for name, p in load_recipe(child).policies.items()} == {"solver": "./other"}


def test_both_forms_in_one_file_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {**SHORT, "policies": {"actor": {"model": "./m"}}})
    message = refusal(file)
    assert "keys of a policy at the top (model, train) and a section `policies`" in message
    assert "move these keys into policies.NAME" in message


def test_keys_at_the_top_of_a_recipe_with_two_policies_are_refused(tmp_path: Path) -> None:
    write(tmp_path, TWO, "base.yaml")
    message = refusal(write(tmp_path, {"extends": "base.yaml", "train": {"lr": 1}}))
    assert "keys of a policy at the top (train), but its policies are solver and verifier" in message
    message = refusal(tmp_path / "base.yaml", "train.lr=1")
    assert "train is not a key" in message
    assert "policies.NAME.train.lr" in message


@pytest.mark.parametrize(
    ("form", "override", "message"),
    [
        (SHORT, "train.lrr=1", 'train.lrr is not a key; did you mean "lr"?'),
        (
            SHORT,
            "rollout.lr=1",
            "rollout.lr is not a key; did you mean train.lr or train.auxiliary.critic.lr?",
        ),
        (SHORT, "learning_rate=1", "learning_rate is not a key; did you mean train.lr?"),
        (SHORT, "limiter=tickets", "limiter is not a key; did you mean table.limiter?"),
        (SHORT, "dataflow.sampler=fifo", "dataflow.sampler is not a key; did you mean table.sampler?"),
        (FULL, "remover=keep", "remover is not a key; did you mean policies.actor.table.remover?"),
        (SHORT, "policies.actor.train.lrr=1", 'policies.actor.train.lrr is not a key; did you mean "lr"?'),
        (FULL, "train.lrr=1", 'train.lrr is not a key; did you mean "lr"?'),
        (FULL, "policies.actor.train.lrr=1", 'policies.actor.train.lrr is not a key; did you mean "lr"?'),
        (FULL, "learning_rate=1", "learning_rate is not a key; did you mean policies.actor.train.lr?"),
    ],
)
def test_a_mistake_has_the_path_that_the_user_typed(
    tmp_path: Path, form: dict[str, Any], override: str, message: str
) -> None:
    assert refusal(write(tmp_path, form), override).startswith(message)


def test_a_mistake_at_the_top_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"name": "mine", "tasks": TASKS}) + "model: ./m\ntrain:\n  steps: -1\n")
    lines = file.read_text().count("\n")
    assert refusal(file) == f"train.steps = -1: Input should be greater than or equal to 0 (line {lines})"
    child = write(tmp_path, {"extends": "recipe.yaml", "seed": 3}, "child.yaml")
    assert refusal(child).endswith(f"(line {lines} of {file})")


def test_a_policy_without_a_model_is_told_by_the_short_key(tmp_path: Path) -> None:
    file = write(tmp_path, {key: value for key, value in SHORT.items() if key != "model"})
    assert refusal(file) == "model is required and missing"


def test_a_command_names_the_short_key_of_what_it_finds_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    write(tmp_path, SHORT)
    for command in (["run", "recipe.yaml", "--dry-run"], ["try", "recipe.yaml"]):
        with pytest.raises(SystemExit):
            main(command)
        message = capsys.readouterr().err
        assert "model = './m'" in message
        assert "policies" not in message


def test_policies_of_the_wrong_kind_are_left_to_the_check_of_the_recipe(tmp_path: Path) -> None:
    assert full_mapping(write(tmp_path, {"policies": [1]})) == {"policies": [1]}
    write(tmp_path, {"policies": 1}, "base.yaml")
    assert "policies" in refusal(write(tmp_path, {"extends": "base.yaml", "name": "x"}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("table.group_size=1", "table.group_size = 1: the credit"),
        ("policies.actor.table.group_size=1", "policies.actor.table.group_size = 1: the credit"),
        ("train.loss=my_losses:loss", "train.loss.use = 'my_losses:loss'"),
    ],
)
def test_checks_of_the_whole_recipe_name_the_key_that_the_user_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, FULL)
    with keys_as_written(file, [override]), pytest.raises(ConfigError) as caught:
        check_recipe(load_recipe(file, [override]), tmp_path / "run")
    assert any(line.lstrip(" -").startswith(message) for line in str(caught.value).splitlines())


def test_a_text_of_the_users_own_is_never_taken_for_a_key(tmp_path: Path) -> None:
    file = write(tmp_path, SHORT)
    with keys_as_written(file), pytest.raises(ConfigError, match=r"say policies\.actor\.train\.lr aloud"):
        raise ConfigError("the task 'say policies.actor.train.lr aloud' has no answer")


def test_an_error_keeps_its_type_and_fields_on_its_way_to_the_user(tmp_path: Path) -> None:
    error = HubError("no network", code=7)
    with pytest.raises(HubError) as caught, keys_as_written(write(tmp_path, SHORT)):
        raise error
    assert caught.value is error


class HubError(ConfigError):
    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


@pytest.mark.parametrize(
    ("child", "policies"),
    [
        ({"policies": {"solver": POLICY, "verifier": POLICY}}, ["solver", "verifier"]),
        # The keys of `actor` are still there to begin from.
        (
            {"policies": {"solver": {"extends": "actor"}, "verifier": {"extends": "solver"}}},
            ["solver", "verifier"],
        ),
        ({"policies": {"actor": {"role": "trained"}, "verifier": POLICY}}, ["actor", "verifier"]),
        ({"policies": {"judge": {"model": "./m", "role": "frozen"}}}, ["actor", "judge"]),
        (
            {"policies": {"twin": POLICY, "old": {"role": "following", "follows": "actor"}}},
            ["actor", "old", "twin"],
        ),
        (
            {"policies": {"twin": POLICY}, "workflow": {"use": "m:f", "args": {"first": "actor"}}},
            ["actor", "twin"],
        ),
        ({}, ["actor"]),
    ],
)
def test_a_recipe_that_names_other_policies_than_its_base_does_not_keep_those(
    tmp_path: Path, child: dict[str, Any], policies: list[str]
) -> None:
    write(tmp_path, SHORT, "base.yaml")
    mapping = full_mapping(write(tmp_path, {"extends": "base.yaml", **child}))
    assert sorted(mapping["policies"]) == policies
    assert all(policy["model"] == "./m" for policy in mapping["policies"].values() if "follows" not in policy)


def test_a_grandchild_may_have_the_keys_of_the_only_policy_that_is_left(tmp_path: Path) -> None:
    write(tmp_path, SHORT, "base.yaml")
    write(tmp_path, {"extends": "base.yaml", "policies": {"solver": POLICY}}, "middle.yaml")
    top = write(tmp_path, {"extends": "middle.yaml", "train": {"lr": 0.5}})
    recipe = load_recipe(top, {"sampling.max_tokens": 9, "steps": 3})
    assert list(recipe.policies) == ["solver"]
    solver = recipe.policies["solver"]
    assert (solver.train.lr, solver.train.steps, solver.sampling.max_tokens) == (0.5, 3, 9)


def test_an_override_may_refer_to_a_policy_that_the_base_has(tmp_path: Path) -> None:
    write(tmp_path, SHORT, "base.yaml")
    top = write(tmp_path, {"extends": "base.yaml", "policies": {"solver": POLICY}})
    assert list(full_mapping(top)["policies"]) == ["solver"]
    assert sorted(full_mapping(top, {"workflow.policy": "actor"})["policies"]) == ["actor", "solver"]


def test_a_list_of_followed_policies_is_refused_like_any_other_wrong_value(tmp_path: Path) -> None:
    follower = {"model": "./m", "role": "follower", "follows": ["actor"]}
    answer = refusal(write(tmp_path, {**FULL, "policies": {"actor": POLICY, "old": follower}}))
    assert answer.startswith("policies.old.follows: Input should be a valid string")


def test_the_arguments_of_ones_own_component_may_have_a_key_use(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SHORT), {"train.loss": {"use": "m:f", "args": {"of": {"use": "x"}}}})
    assert recipe.policies["actor"].train.loss.model_dump()["args"] == {"of": {"use": "x"}}


def test_a_scale_leaves_the_arguments_of_own_components_alone(tmp_path: Path) -> None:
    mapping = json.loads(make_digit_recipe(tmp_path, tmp_path).model_dump_json())
    args = {"name": "prepared"}
    mapping["tasks"]["environments"] = {"shop": {"use": "my_shop:Shop", "args": dict(args)}}
    scale_mapping(mapping, "smoke")
    assert mapping["tasks"]["environments"]["shop"]["args"] == args
