"""Wheels of what is installed, and bundles: what they hold, and what is refused."""

import hashlib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from astraflow.addons.bundle.bundle import bundled, write_bundle
from astraflow.addons.bundle.packed_wheels import needed_distributions, pack_wheel
from astraflow.errors import DataError
from astraflow.recipe.recipe import load_recipe

RECIPE = Path(__file__).parents[4] / "recipes" / "quickstart.yaml"


def test_an_installed_distribution_becomes_a_wheel_of_the_same_files(tmp_path: Path) -> None:
    dist = distribution("typer")
    path = pack_wheel(dist, tmp_path)
    assert path.name == f"typer-{dist.version}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        assert archive.read("typer/main.py") == Path(str(dist.locate_file("typer/main.py"))).read_bytes()
        record = archive.read(f"typer-{dist.version}.dist-info/RECORD").decode()
    assert {line.split(",")[0] for line in record.splitlines()} == names
    # What the next installer makes by itself.
    assert not [name for name in names if name.endswith((".pyc", "INSTALLER")) or "scripts" in name]


def test_the_same_files_make_the_same_wheel(tmp_path: Path) -> None:
    digests: list[str] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        path = pack_wheel(distribution("annotated_types"), tmp_path / name)
        digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_what_a_requirement_needs_here_is_found_with_what_that_needs() -> None:
    names = {dist.name.lower().replace("_", "-") for dist in needed_distributions(["astraflow[torch]"])}
    assert {"astraflow", "torch", "transformers", "tokenizers", "pydantic-core", "numpy"} <= names
    assert "pytest" not in names


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(DataError, match="needs no-such-package, which is not installed"):
        needed_distributions(["no-such-package"])


def test_a_model_or_data_that_is_not_here_is_named_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = load_recipe(RECIPE, {"policies.actor.model": str(tmp_path / "none")})
    with pytest.raises(DataError, match=r"policies\.actor\.model = '.*none' is not"):
        write_bundle(recipe, out)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    gone = dict.fromkeys(("dataset", "size", "args"))
    source = {"name": "datasets", "path": "somebody/on-the-hub", **gone}
    recipe = load_recipe(RECIPE, {"policies.actor.model": str(model), "tasks.sources.sums": source})
    with pytest.raises(DataError, match=r"sources\.sums\.path = 'somebody/on-the-hub' is not"):
        write_bundle(recipe, out)
    assert not out.exists()


def test_a_bundle_holds_models_data_and_own_modules_once_and_its_recipe_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a/model", "b/model"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text("")
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    (tmp_path / "rewards_of_mine").mkdir()
    (tmp_path / "rewards_of_mine" / "lengths.py").write_text("import helper_of_mine\n")
    (tmp_path / "helper_of_mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {
        "policies.actor.model": "./a/model",
        "policies.actor.train.auxiliary.reference": "./b/model",
        "policies.actor.train.auxiliary.teacher": "./a/model",
        "tasks.sources": {"sums": None, "mine": {"name": "jsonl", "path": "tasks.jsonl"}},
        "eval.sets": {"heldout": None, "own": {"source": {"name": "prepared", "dataset": "gsm8k"}}},
        "tasks.reward": {"use": "rewards_of_mine.lengths:reward"},
    }
    moved, copies = bundled(load_recipe(RECIPE, changes))
    assert copies == {
        "models/model": tmp_path / "a" / "model",
        "models/2-model": tmp_path / "b" / "model",
        "data/tasks.jsonl": tmp_path / "tasks.jsonl",
        "data/gsm8k": tmp_path / "data" / "gsm8k",
        "rewards_of_mine/lengths.py": tmp_path / "rewards_of_mine" / "lengths.py",
        "helper_of_mine.py": tmp_path / "helper_of_mine.py",
    }
    actor = moved.policies["actor"]
    assert actor.model == actor.train.auxiliary.teacher == "./models/model"
    assert actor.train.auxiliary.reference == "./models/2-model"
    shown = moved.model_dump_json()
    assert '"./data/tasks.jsonl"' in shown
    assert '"./data/gsm8k"' in shown


def test_a_folder_that_has_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(DataError, match="is not an empty folder"):
        write_bundle(load_recipe(RECIPE), tmp_path)
