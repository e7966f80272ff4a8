"""The recipes and examples that come with the package: all are found, and a copy is whole."""

import os
from pathlib import Path

import pytest

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.config import load_attr
from astraflow.errors import ConfigError, DataError
from astraflow.recipe import gallery
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_plan import uses
from drivers.system_driver import ROOT

ENTRIES = gallery.entries()
RECIPES = [entry for entry in ENTRIES if entry.kind == "recipe"]


def test_every_recipe_and_spec_of_the_repository_is_listed_once() -> None:
    files = [path for folder in ("recipes", "examples") for path in (ROOT / folder).rglob("*.yaml")]
    listed = [entry.path for entry in ENTRIES]
    assert sorted(listed) == sorted(path for path in files if not path.is_relative_to(ROOT / gallery.PROJECT))
    assert [(gallery.gallery_root() / entry.place) for entry in ENTRIES] == listed


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_says_what_it_is(entry: gallery.GalleryItem) -> None:
    assert len(entry.about) > 20


@pytest.mark.parametrize("entry", RECIPES, ids=lambda entry: entry.name)
def test_a_copied_recipe_has_all_that_it_needs(
    entry: gallery.GalleryItem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it extends, the modules of its own parts, and the specs of its models are in the new folder."""
    copied = gallery.copy_entries([entry], tmp_path)
    assert Path(entry.place) in copied
    recipe = load_recipe(tmp_path / entry.place)
    for use in uses(recipe):
        module = use.use.partition(":")[0].replace(".", "/") + ".py"
        if module.startswith("astraflow/"):
            continue  # a part of the package
        assert any((folder / module).is_file() for folder in (tmp_path, (tmp_path / entry.place).parent))
    for name, place in gallery.specs_of(entry):
        assert load_spec(tmp_path / place).name == name
    assert {policy.model for policy in recipe.policies.values()} <= {
        "./models/trained",  # exported from a run
        "./models/Qwen3-1.7B",
        "./models/Qwen3-8B",
        "./models/Qwen3-VL-2B-Instruct",
        *(f"./models/{name}" for name, _ in gallery.specs_of(entry)),
    }


def test_a_copied_model_spec_brings_the_modules_that_its_module_imports(tmp_path: Path) -> None:
    copied = gallery.copy_entries([gallery.find_entry("models/household")], tmp_path)
    folder = Path("recipes/alfworld")
    assert {
        folder / "household_players.py",
        folder / "household_teachers.py",
        folder / "household_world.py",
    } <= set(copied)


def test_a_copy_of_everything_is_the_gallery(tmp_path: Path) -> None:
    copied = gallery.copy_all(tmp_path)
    assert {Path(entry.place) for entry in ENTRIES} < set(copied)
    assert Path("examples/scripted_worker.py") in copied
    assert Path("examples/project/recipe.yaml") in copied
    for place in copied:
        assert (tmp_path / place).read_bytes() == (ROOT / place).read_bytes()


def test_a_copy_replaces_nothing_that_was_changed(tmp_path: Path) -> None:
    entry = gallery.find_entry("pair")
    gallery.copy_entries([entry], tmp_path)
    gallery.copy_entries([entry], tmp_path)  # the same files are no obstacle
    changed = tmp_path / "recipes" / "quickstart.yaml"
    changed.write_text("name: mine\n")
    (tmp_path / "recipes" / "pair.yaml").unlink()
    with pytest.raises(DataError, match=r"quickstart\.yaml exists and is different"):
        gallery.copy_entries([entry], tmp_path)
    assert not (tmp_path / "recipes" / "pair.yaml").exists()
    gallery.copy_entries([entry], tmp_path, force=True)
    assert changed.read_bytes() == (ROOT / "recipes" / "quickstart.yaml").read_bytes()


@pytest.mark.parametrize(
    "name",
    ["quickstart", "recipes/quickstart.yaml", "./recipes/quickstart.yaml", "quickstart.yaml"],
)
def test_a_recipe_is_found_by_its_name_and_by_its_place(name: str) -> None:
    assert gallery.find_entry(name).place == "recipes/quickstart.yaml"


def test_the_last_part_of_a_name_is_enough_if_no_other_has_it() -> None:
    assert gallery.find_entry("sum_agent").name == "examples/sum_agent"
    assert gallery.find_entry("models/quickstart").kind == "model"


def test_a_command_takes_a_path_or_a_name() -> None:
    assert gallery.recipe_file("math/tiny") == (ROOT / "recipes" / "math" / "tiny.yaml", True)
    assert gallery.recipe_file("some/where.yaml") == (Path("some/where.yaml"), False)
    with pytest.raises(ConfigError, match="models/tiny is a model, no recipe"):
        gallery.recipe_file("models/tiny")
    with pytest.raises(ConfigError, match="sizes/8b is a part, no recipe"):
        gallery.recipe_file("sizes/8b")


def test_models_that_are_there_or_have_no_spec_are_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "quickstart").mkdir(parents=True)
    told: list[str] = []
    gallery.build_models(["./models/quickstart", "./models/unknown", "/elsewhere/tiny", "tiny"], told.append)
    assert told == []
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["quickstart"]


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'quickstrt'; did you mean \"quickstart\"\? .*recipes list"):
        gallery.find_entry("quickstrt")


def test_a_project_goes_into_an_empty_folder_only(tmp_path: Path) -> None:
    places = {place.name for place in gallery.copy_project(tmp_path / "new")}
    assert places >= {"recipe.yaml", "reward.py", "workflow.py", "model.yaml", "test_project.py", "README.md"}
    assert os.access(tmp_path / "new" / "recipe.yaml", os.W_OK)
    with pytest.raises(DataError, match="exists and is not an empty folder"):
        gallery.copy_project(tmp_path / "new")


def test_the_project_is_valid_with_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery.copy_project(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert all(callable(load_attr(use.use)) for use in uses(recipe))
    spec = load_spec(tmp_path / "model.yaml")
    assert recipe.policies["actor"].model == f"./models/{spec.name}"
