"""A trainer's own Python is asked before a run what it lacks; here, environments with almost nothing."""

import shutil
import sys
import venv
from pathlib import Path

import pytest

import astraflow
from astraflow.addons.megatron.checks import check_megatron
from astraflow.errors import ConfigError
from astraflow.processes.program import Addresses, program
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.run_folder import RunFolder
from drivers.system_driver import ROOT

SOURCE = Path(astraflow.__file__).parents[1]
FAKES = {
    "older": '__version__ = "0.0.9"\n',
    "changed": f'__version__ = "{astraflow.__version__}"\n',
}


def recipe_of(folder: Path, python: Path, **overrides: object) -> Recipe:
    backend = {"name": "megatron", "python": str(python)}
    changes = {"model": str(folder / "model"), "train.backend": backend, **overrides}
    return load_recipe(ROOT / "recipes" / "quickstart.yaml", changes)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment without any package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder


def packages_of(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no astraflow (No module named 'astraflow'); install the same version there"),
        ("older", f"has astraflow 0.0.9, but this is {astraflow.__version__}"),
        ("changed", "with other source files than this one"),
        ("same", "has no megatron-core; run"),
        ("whole", ""),
    ],
)
def test_what_another_python_lacks_is_named(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))  # these packages are not the other Python's
    packages = packages_of(bare)
    fakes = packages / "fakes"
    for name in {"older": ("astraflow",), "changed": ("astraflow",), "whole": ("megatron",)}.get(content, ()):
        (fakes / name).mkdir(parents=True)
        (fakes / name / "__init__.py").write_text(FAKES.get(content, ""))
    (packages / "found.pth").write_text(f"{fakes}\n{SOURCE if content in ('same', 'whole') else ''}\n")
    recipe = recipe_of(tmp_path, bare)
    try:
        if not said:
            check_megatron(recipe)
            return
        with pytest.raises(ConfigError) as caught:
            check_megatron(recipe)
        assert said in str(caught.value)
        assert "policies.actor.train.backend.python" in str(caught.value)
    finally:
        shutil.rmtree(fakes, ignore_errors=True)


@pytest.mark.parametrize(
    ("python", "nodes", "said"),
    [
        ("nowhere", 1, r"train\.backend\.python = '.*nowhere': there is no .*nowhere"),
        ("not_python", 1, "is not a usable Python"),
        ("data", 1, "cannot be run: "),
        ("not_python", 2, r"python with train\.nodes = 2"),
    ],
)
def test_a_python_that_is_none_is_named(tmp_path: Path, python: str, nodes: int, said: str) -> None:
    (tmp_path / "not_python").symlink_to("/bin/false")
    (tmp_path / "data").write_text("no program")
    recipe = recipe_of(tmp_path, tmp_path / python, **{"train.nodes": nodes, "train.ranks": nodes})
    with pytest.raises(ConfigError, match=said):
        check_megatron(recipe)


def test_only_the_trainer_starts_in_its_own_python(bare: Path, tmp_path: Path) -> None:
    addresses = Addresses(("127.0.0.1", 1), {"actor": ("127.0.0.1", 2)})
    specs = program(recipe_of(tmp_path, bare), RunFolder(tmp_path), addresses)
    pythons = {spec.name.partition("-")[0]: spec.argv[0] for spec in specs}
    own = str(bare / "bin" / "python")
    assert pythons == dict.fromkeys(pythons, sys.executable) | {"trainer": own}
    (trainer,) = (spec for spec in specs if spec.argv[0] == own)
    assert trainer.env["PYTHONPATH"] == ""
