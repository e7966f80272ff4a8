"""Rules of recipes: corrections that go with the loss, data types on GPUs, room for each turn."""

import re
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.doctor.recipe_rules import RULES_CHECK
from astraflow.addons.gallery.listing import full_recipes
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.checks import Examined, Finding
from astraflow.run.preflight import all_checks, check_recipe
from drivers.gpu_recipes import gpu_recipe
from drivers.recipe_builders import make_digit_model, make_digit_recipe
from drivers.system_driver import ROOT

SHOWN = [entry.name for entry in full_recipes() if re.search("/(1.7b|2b|32b|30b-a3b|llama3-8b)$", entry.name)]
"""Recipes of full size with the longest and the shortest contexts."""


def findings(recipe: Recipe, **known: Any) -> list[Finding]:
    examined = Examined(recipe, **known)
    RULES_CHECK.look(examined)
    return examined.findings


@pytest.mark.parametrize("name", SHOWN)
def test_recipes_of_full_size_follow_the_rules(name: str) -> None:
    assert findings(load_recipe(ROOT / "recipes" / f"{name}.yaml")) == []


@pytest.mark.parametrize(
    ("loss", "correction", "is_refused"),
    [
        ("m2po", "masked", True),
        ("m2po_mask", "geometric", True),
        ("decoupled_ppo", "truncated", True),
        ("m2po", "none", False),
        ("grpo", "masked", False),
    ],
)
def test_a_loss_that_weighs_behavior_itself_takes_no_correction(
    loss: str, correction: str, is_refused: bool, tmp_path: Path
) -> None:
    model = make_digit_model(tmp_path / "digits")
    overrides = (f"train.loss={{name: {loss}}}", f"train.auxiliary.correction={{name: {correction}}}")
    recipe = make_digit_recipe(tmp_path, model, *overrides)
    assert RULES_CHECK in all_checks()
    if not is_refused:
        check_recipe(recipe)
        return
    with pytest.raises(ConfigError, match=rf"correction.name = '{correction}': the loss {loss} already"):
        check_recipe(recipe)


VLLM = {"name": "vllm", "max_context": 256}


@pytest.mark.parametrize(
    ("rollout", "backend", "places"),
    [
        ({}, {}, ["train.backend"]),
        ({}, {"dtype": "bfloat16"}, []),
        ({}, {"device": "cpu"}, []),
        ({"engine": {"name": "torch", "device": "cuda:1"}}, {"dtype": "bfloat16"}, ["rollout.engine"]),
        ({"engine": VLLM, "gpus": ["0"]}, {}, ["train.backend", "rollout.engine"]),
        ({"engine": {**VLLM, "dtype": "bfloat16"}, "gpus": ["0"]}, {"dtype": "bfloat16"}, []),
        ({"engine": VLLM}, {"dtype": "bfloat16"}, []),
    ],
)
def test_float32_on_a_gpu_is_named(
    rollout: dict[str, Any], backend: dict[str, Any], places: list[str], tmp_path: Path
) -> None:
    recipe = gpu_recipe(tmp_path, rollout=rollout, **backend)
    found = findings(recipe)
    named = [each.detail.partition(".dtype")[0].removeprefix("policies.actor.") for each in found]
    assert (named, {each.level for each in found}) == (places, {"warn"} if places else set())
    assert findings(recipe, sound=["actor"]) == [], "a tiny model takes no time in any data type"


@pytest.mark.parametrize(("max_turns", "max_tokens", "is_named"), [(31, 2048, True), (16, 2048, False)])
def test_turns_without_room_in_the_context_are_named(max_turns: int, max_tokens: int, is_named: bool) -> None:
    changes = {"workflow.max_turns": max_turns, "sampling.max_tokens": max_tokens, "max_context": 10_752}
    changes["rollout.engine.max_context"] = changes.pop("max_context")
    found = findings(load_recipe(ROOT / "recipes" / "terminal-bench" / "32b.yaml", changes))
    assert [each.check for each in found] == ["room for turns"] * is_named
    assert not is_named or "31 turns have 346 tokens each, but a reply alone may have 2048" in found[0].detail
