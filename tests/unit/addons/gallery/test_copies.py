"""Copies of the recipes and examples that come with the package are whole."""

import os
from pathlib import Path

import pytest

from astraflow.addons.gallery import copies
from astraflow.addons.gallery.listing import full_recipes, place_of
from astraflow.addons.tiny_models.spec import load_spec
from astraflow.config import load_attr
from astraflow.errors import DataError
from astraflow.recipe import gallery
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_plan import uses
from astraflow.user_input.yaml_files import load_mapping
from drivers.system_driver import ROOT

ENTRIES = gallery.entries()
FULL = ("math/1.7b", "efficient-math/14b", "code-multi-agent/8b-select", "search/8b", "deepdive/1.7b")
RECIPES = [entry for entry in ENTRIES if entry.kind == "recipe"]
RECIPES += [entry for entry in full_recipes() if entry.name in FULL and entry not in RECIPES]


@pytest.mark.parametrize("entry", RECIPES, ids=lambda entry: entry.name)
def test_a_copied_recipe_has_all_that_it_needs(
    entry: gallery.GalleryItem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it extends, the modules of its own parts, and the specs of its models are in the new folder."""
    copied = copies.copy_entries([entry], tmp_path)
    assert Path(place_of(entry)) in copied or entry not in ENTRIES
    recipe = load_recipe(tmp_path / place_of(entry))
    for use in uses(recipe):
        module = use.use.partition(":")[0].replace(".", "/") + ".py"
        if module.startswith("astraflow/"):
            continue  # a part of the package
        assert any((folder / module).is_file() for folder in (tmp_path, (tmp_path / place_of(entry)).parent))
    for name, place in copies.specs_of(entry):
        assert load_mapping(tmp_path / place)["name"] == name
    assert {policy.model for policy in recipe.policies.values()} <= {
        "./models/trained",  # exported from a run, like the next one
        "./models/sft",
        "./models/Qwen3-1.7B",
        "./models/Qwen3-8B",
        "./models/Qwen3-VL-2B-Instruct",
        "./models/Qwen3-14B",
        "./models/Qwen3-30B-A3B",
        "./models/Qwen3-32B",
        "./models/Qwen3.5-35B-A3B",
        *(f"./models/{name}" for name, _ in copies.specs_of(entry)),
    }


def test_a_copied_recipe_has_the_files_that_its_modules_read(tmp_path: Path) -> None:
    copied = copies.copy_entries([gallery.find_entry("real/words")], tmp_path)
    assert {Path("recipes/real/words.toml"), Path("recipes/real/trivia.toml")} <= set(copied)


def test_a_copied_model_spec_brings_the_modules_that_its_module_imports(tmp_path: Path) -> None:
    copied = copies.copy_entries([gallery.find_entry("models/household")], tmp_path)
    folder = Path("recipes/alfworld")
    assert {
        folder / "household_players.py",
        folder / "household_teachers.py",
        folder / "household_world.py",
    } <= set(copied)


def test_a_copy_of_everything_is_the_gallery(tmp_path: Path) -> None:
    copied = copies.copy_all(tmp_path)
    assert {Path(place_of(entry)) for entry in ENTRIES} < set(copied)
    assert Path("examples/scripted_worker.py") in copied
    assert Path("examples/project/recipe.yaml") in copied
    for place in copied:
        assert (tmp_path / place).read_bytes() == (ROOT / place).read_bytes()


def test_a_copy_replaces_nothing_that_was_changed(tmp_path: Path) -> None:
    entry = gallery.find_entry("pair")
    copies.copy_entries([entry], tmp_path)
    copies.copy_entries([entry], tmp_path)  # the same files are no obstacle
    changed = tmp_path / "recipes" / "quickstart.yaml"
    changed.write_text("name: mine\n")
    (tmp_path / "recipes" / "pair.yaml").unlink()
    with pytest.raises(DataError, match=r"quickstart\.yaml exists and is different"):
        copies.copy_entries([entry], tmp_path)
    assert not (tmp_path / "recipes" / "pair.yaml").exists()
    copies.copy_entries([entry], tmp_path, force=True)
    assert changed.read_bytes() == (ROOT / "recipes" / "quickstart.yaml").read_bytes()


def test_a_project_goes_into_an_empty_folder_only(tmp_path: Path) -> None:
    places = {place.name for place in copies.copy_project(tmp_path / "new")}
    assert places >= {"recipe.yaml", "reward.py", "workflow.py", "model.yaml", "test_project.py", "README.md"}
    assert os.access(tmp_path / "new" / "recipe.yaml", os.W_OK)
    with pytest.raises(DataError, match="exists and is not an empty folder"):
        copies.copy_project(tmp_path / "new")


def test_the_project_is_valid_with_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies.copy_project(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert all(callable(load_attr(use.use)) for use in uses(recipe))
    spec = load_spec(tmp_path / "model.yaml")
    assert recipe.policies["actor"].model == f"./models/{spec.name}"
