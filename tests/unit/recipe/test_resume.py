"""Which changes of a recipe a resume allows, and what it says about the others."""

import json
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.resume import (
    MAY_CHANGE,
    changes_between,
    check_resume,
    has_more_steps,
    refuse_changes,
    refuse_fewer_steps,
    steps_done,
)
from astraflow.recipe.run_folder import RunFolder

ROOT = Path(__file__).parents[3]
_SET = {"source": {"name": "jsonl", "path": "held.jsonl"}, "num_tasks": 8}


def make_recipe(**changes: object) -> Recipe:
    policy = {"model": "models/a", "train": {"steps": 3}}
    fields: dict[str, object] = {
        "name": "demo",
        "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {"actor": policy},
    }
    return Recipe.model_validate_json(json.dumps(fields | changes))


def test_a_run_goes_on_with_another_number_of_services(tmp_path: Path) -> None:
    changes = changes_between(make_recipe(), make_recipe(rollout={"services": 5}))
    assert [(c.key, c.old, c.new) for c in changes] == [("rollout.services", "2", "5")]
    refuse_changes(changes, tmp_path)


def test_the_order_of_the_keys_of_an_argument_is_no_change() -> None:
    def with_own_reward(*pairs: tuple[str, int]) -> Recipe:
        reward = {"name": "use", "use": "my_rewards:grade", "args": {"levels": [dict(pairs)]}}
        tasks = {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}, "reward": reward}
        return make_recipe(tasks=tasks)

    one, other = ("a", 1), ("b", 2)
    assert changes_between(with_own_reward(one, other), with_own_reward(other, one)) == ()
    (change,) = changes_between(with_own_reward(one), with_own_reward(other))
    assert change.key == "tasks.reward.args.levels"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"tasks": {"sources": {"train": {"name": "jsonl", "path": "b.jsonl"}}}}, "tasks.sources.train.path"),
        ({"policies": {"actor": {"model": "models/b", "train": {"steps": 3}}}}, "policies.actor.model"),
        ({"dataflow": {"max_attempts": 9}}, "dataflow.max_attempts"),
    ],
)
def test_a_change_that_would_break_the_run_is_refused(
    change: dict[str, object], key: str, tmp_path: Path
) -> None:
    changes = changes_between(make_recipe(), make_recipe(**change))
    with pytest.raises(ConfigError, match=key):
        refuse_changes(changes, tmp_path)


def test_a_run_of_a_full_recipe_whose_loss_has_changed_since_is_told_what_stops_it(tmp_path: Path) -> None:
    path = ROOT / "recipes" / "math" / "8b.yaml"
    now = load_recipe(path)
    loss = "policies.actor.train.loss={name: m2po, budget: 0.02}"
    correction = "policies.actor.train.auxiliary.correction={name: masked}"
    folder = RunFolder(tmp_path)
    folder.save_recipe(load_recipe(path, [loss]))
    # A trainer may go on with another loss, which is recorded. The rest determined what is in the journal.
    changes = {change.key: (change.old, change.new) for change in check_resume(folder, now).changes}
    assert changes["policies.actor.train.loss.name"] == ('"m2po"', '"m2po_prototype"')
    folder.save_recipe(load_recipe(path, [loss, correction]))
    with pytest.raises(ConfigError) as refused:
        check_resume(folder, now)
    assert 'train.auxiliary.correction.name was "masked" and is "none"' in str(refused.value)
    assert "undo the change to resume this one" in str(refused.value)


def test_keys_that_may_change_exist() -> None:
    leaves = {c.key for c in changes_between(make_recipe(), make_recipe(policies={"b": {"model": "x"}}))}
    leaves |= set(_leaf_keys(make_recipe(eval={"sets": {"held": _SET}}).model_dump(mode="json")))
    for pattern in MAY_CHANGE:
        parts = pattern.split(".")
        assert any(
            len(key.split(".")) >= len(parts)
            and all(p in ("*", k) for p, k in zip(parts, key.split("."), strict=False))
            for key in leaves
        ), pattern


def _leaf_keys(node: object, path: str = "") -> list[str]:
    if not isinstance(node, dict) or not node:
        return [path]
    return [leaf for k, v in node.items() for leaf in _leaf_keys(v, f"{path}.{k}" if path else str(k))]


@pytest.mark.parametrize(
    "change",
    [
        {"policies": {"actor": {"model": "models/a", "train": {"steps": 50}}}},
        {"eval": {"every": 3, "sets": {"held": _SET}}},
        {"eval": {"deadline_s": 9.0, "sets": {"held": _SET}}},
        {"eval": {"sets": {"held": {**_SET, "samples": 4}}}},
        {"eval": {"sets": {"held": _SET, "more": _SET}}},
        {"eval": {"sets": {}}},
        {"eval": {"sets": {"held": _SET}, "best": {"metric": "held"}}},
    ],
    ids=str,
)
def test_a_run_may_train_longer_and_evaluate_otherwise(change: dict[str, object], tmp_path: Path) -> None:
    before = make_recipe(eval={"sets": {"held": _SET}})
    after = make_recipe(**{"eval": {"sets": {"held": _SET}}, **change})
    changes = changes_between(before, after)
    assert changes
    refuse_changes(changes, tmp_path)


def test_an_evaluation_set_that_comes_is_one_change() -> None:
    before = make_recipe(eval={"sets": {"held": _SET}})
    after = make_recipe(eval={"sets": {"more": _SET}})
    changes = {change.key: change for change in changes_between(before, after)}
    assert changes.keys() == {"eval.sets.held", "eval.sets.more"}
    assert changes["eval.sets.held"].new == changes["eval.sets.more"].old == ""
    assert json.loads(changes["eval.sets.more"].new)["num_tasks"] == 8


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"sets": {"held": {**_SET, "num_tasks": 9}}}, "eval.sets.held.num_tasks was 8 and is 9"),
        ({"sets": {"held": _SET}, "temperature": 0.5}, "eval.temperature was 1.0 and is 0.5"),
    ],
)
def test_scores_that_could_not_be_compared_are_refused(
    now: dict[str, object], said: str, tmp_path: Path
) -> None:
    changes = changes_between(make_recipe(eval={"sets": {"held": _SET}}), make_recipe(eval=now))
    with pytest.raises(ConfigError, match=said) as refused:
        refuse_changes(changes, tmp_path)
    assert "give a changed evaluation set a new name" in str(refused.value)


def test_steps_that_are_done_cannot_be_undone(tmp_path: Path) -> None:
    recipe = make_recipe()
    refuse_fewer_steps(recipe, {"actor": 3}, tmp_path)
    with pytest.raises(ConfigError, match=r"actor\.train\.steps = 3, .* 4 steps"):
        refuse_fewer_steps(recipe, {"actor": 4}, tmp_path)


def test_a_run_has_more_steps_if_one_policy_has(tmp_path: Path) -> None:
    recipe = make_recipe()
    assert [has_more_steps(recipe, recipe, {"actor": done}) for done in (0, 2, 3)] == [True, True, False]
    assert has_more_steps(recipe, recipe, steps_done(tmp_path))


def test_a_run_that_its_stop_ended_has_more_steps_with_another_stop() -> None:
    before = make_recipe(stop={"epochs": 1})
    for stop, done, expected in (({"epochs": 1}, 2, False), ({"epochs": 2}, 2, True), ({}, 3, False)):
        assert has_more_steps(make_recipe(stop=stop), before, {"actor": done}) is expected
