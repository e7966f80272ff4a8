"""What `from astraflow import ...` gives, and that nothing is loaded before it is used."""

import subprocess
import sys

import pytest

import astraflow
from astraflow import launch, load_recipe, try_episode
from astraflow.addons.one_process.trial import try_episode as defined_try_episode
from astraflow.recipe.recipe import load_recipe as defined_load_recipe
from astraflow.run.run import launch as defined_launch


def test_the_names_are_those_of_the_modules() -> None:
    assert launch is defined_launch
    assert load_recipe is defined_load_recipe
    assert try_episode is defined_try_episode
    assert set(astraflow.__all__) <= set(dir(astraflow))


def test_a_name_that_is_not_there_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'lunch' from 'astraflow'"):
        exec("from astraflow import lunch")


def test_an_import_loads_nothing_but_the_package() -> None:
    code = "import sys; before = set(sys.modules); import astraflow; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert [
        name for name in loaded if name.partition(".")[0] in {"pydantic", "numpy", "torch", "aiohttp"}
    ] == []
    assert {name for name in loaded if name.startswith("astraflow")} == {"astraflow"}
