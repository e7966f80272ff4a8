"""A model that thinks aloud has room for its answer, or the recipe says that it shall not think."""

from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.doctor.chat_templates import check_thinking
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, load_recipe
from drivers.chat_folders import CHATML, make_folder
from drivers.system_driver import ROOT

THINKS = CHATML + "{% if not enable_thinking %}<think></think>{% endif %}"


def recipe_of(folder: Path, **overrides: Any) -> Recipe:
    dotted = {"model": str(folder), "template_args": {}, **overrides}
    return load_recipe(ROOT / "recipes" / "alfworld" / "1.7b.yaml", dotted)


def test_a_thought_longer_than_the_answer_may_be_is_refused_with_what_to_set(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template=THINKS)
    with pytest.raises(ConfigError, match=r"max_tokens = 512, .*think aloud.*\{enable_thinking: false\}"):
        check_thinking(recipe_of(folder))


@pytest.mark.parametrize(
    "overrides",
    [
        {"template_args": {"enable_thinking": False}},
        {"template_args": {"enable_thinking": True}},
        {"sampling.max_tokens": 8000},
    ],
)
def test_a_recipe_that_decides_or_has_room_is_accepted(tmp_path: Path, overrides: dict[str, Any]) -> None:
    check_thinking(recipe_of(make_folder(tmp_path, template=THINKS), **overrides))


def test_a_model_that_never_thinks_and_one_that_is_missing_are_accepted(tmp_path: Path) -> None:
    check_thinking(recipe_of(make_folder(tmp_path)))
    check_thinking(recipe_of(tmp_path / "missing"))
