"""What holds for all packages: public names, imports, errors."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import astraflow
import astraflow_conformance
import astraflow_paced
from astraflow import errors

MODULES = sorted(
    module.name
    for package in (astraflow, astraflow_conformance, astraflow_paced)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)

OF_EXTRAS = {
    "astraflow.addons.trackers.tensorboard": ("tensorboard", "tensorboard"),
    "astraflow.addons.fast_deltas.compiled": ("numba", "fast"),
}
"""Modules that import a package of an extra as they load: the package, and the extra."""


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_listed_and_exist(name: str) -> None:
    if name in OF_EXTRAS:
        package, extra = OF_EXTRAS[name]
        pytest.importorskip(package, reason=f"needs {package} (extra `{extra}`)")
    module = importlib.import_module(name)
    if module.__spec__ is not None and module.__spec__.submodule_search_locations is not None:
        return
    assert hasattr(module, "__all__"), f"{name} lacks __all__"
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.__all__ names {public}, which does not exist"
    own = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == name
    }
    assert own <= set(module.__all__), (
        f"{name}: public but not in __all__: {sorted(own - set(module.__all__))}"
    )


LIGHT = [m for m in MODULES if m.startswith("astraflow.dataflow") or m.startswith("astraflow.weights")]


@pytest.mark.timeout(60)
def test_light_parts_load_neither_torch_nor_an_engine() -> None:
    names = [
        *LIGHT,
        "astraflow.config",
        "astraflow.recipe.recipe",
        "astraflow.rollout.service",
        "astraflow.cli.main",
        "astraflow_paced.config",
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'datasets') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_under_the_root(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.Error)
