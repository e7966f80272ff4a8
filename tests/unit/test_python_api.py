"""What `from astraflow import ...` gives, and that nothing is loaded before it is used."""

import inspect
import subprocess
import sys

import pytest

import astraflow
import astraflow.launch.run
from astraflow import launch, load_recipe, try_episode
from astraflow.launch.config import load_recipe as defined_load_recipe
from astraflow.launch.trial import try_episode as defined_try_episode


def test_the_names_are_those_of_the_modules() -> None:
    assert load_recipe is defined_load_recipe
    assert try_episode is defined_try_episode
    assert set(astraflow.__all__) <= set(dir(astraflow))


def test_the_package_launch_has_the_parameters_of_its_function() -> None:
    """It is a package that can be called, since a package and a function cannot share a name."""
    shown = inspect.signature(launch).parameters
    own = inspect.signature(astraflow.launch.run.launch).parameters
    assert [(p.name, p.kind, p.default) for p in shown.values()] == [
        (p.name, p.kind, p.default) for p in own.values()
    ]


def test_a_name_that_is_not_there_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'lunch' from 'astraflow'"):
        exec("from astraflow import lunch")


@pytest.mark.parametrize("line", ["import astraflow", "from astraflow import launch"])
def test_an_import_loads_nothing_but_the_package(line: str) -> None:
    code = f"import sys; before = set(sys.modules); {line}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert [
        name for name in loaded if name.partition(".")[0] in {"pydantic", "numpy", "torch", "aiohttp"}
    ] == []
    assert {name for name in loaded if name.startswith("astraflow")} <= {"astraflow", "astraflow.launch"}
