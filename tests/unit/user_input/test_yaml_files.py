"""A YAML file, the files that it extends, and overrides become one mapping."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.errors import ConfigError
from astraflow.user_input.yaml_files import load_mapping

BASE: dict[str, Any] = {"name": "base"}


def write(folder: Path, mapping: dict[str, Any], name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(mapping))
    return path


def test_of_several_extended_files_later_ones_win(tmp_path: Path) -> None:
    write(tmp_path, {"name": "first", "seed": 1, "eval": {"every": 3}}, "a.yaml")
    write(tmp_path, {"name": "second", "eval": {"deadline_s": 9.0}}, "b.yaml")
    path = write(tmp_path, {"extends": ["a.yaml", "b.yaml"], "name": "child"}, "c.yaml")
    assert load_mapping(path) == {"name": "child", "seed": 1, "eval": {"every": 3, "deadline_s": 9.0}}
    for wrong in ({"extends": [3]}, {"extends": {"a": "b"}}):
        with pytest.raises(ConfigError, match="expected the path of a recipe"):
            load_mapping(write(tmp_path, wrong, "wrong.yaml"))


def test_a_missing_recipe_is_named_with_the_nearest_file(tmp_path: Path) -> None:
    write(tmp_path, BASE, "quickstart.yaml")
    with pytest.raises(ConfigError, match=r'does not exist; .* did you mean ".*/quickstart.yaml"'):
        load_mapping(tmp_path / "quickstrat.yaml")


def test_an_empty_section_replaces_what_was_there(tmp_path: Path) -> None:
    sets = {"heldout": {"source": "sums", "num_tasks": 8}}
    recipe = write(tmp_path, {**BASE, "eval": {"sets": sets}}, "base.yaml")
    assert load_mapping(recipe)["eval"]["sets"] == sets
    assert load_mapping(recipe, ["eval.sets={}"])["eval"]["sets"] == {}
    child = write(tmp_path, {"extends": "base.yaml", "eval": {"sets": {}}})
    assert load_mapping(child)["eval"]["sets"] == {}


def test_extending_itself_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"extends": "b.yaml"}, "a.yaml")
    write(tmp_path, {"extends": "a.yaml"}, "b.yaml")
    with pytest.raises(ConfigError, match="extends itself"):
        load_mapping(tmp_path / "a.yaml")


def test_a_later_file_adds_to_what_an_earlier_one_has_emptied(tmp_path: Path) -> None:
    write(tmp_path, {"sets": {"a": 1}}, "a.yaml")
    write(tmp_path, {"sets": {}}, "b.yaml")
    write(tmp_path, {"extends": "b.yaml", "sets": {"c": 3}}, "c.yaml")
    assert load_mapping(write(tmp_path, {"extends": ["a.yaml", "c.yaml"]})) == {"sets": {"c": 3}}
