"""Gives this process posing GPUs when it imports torch. Python runs this file in each process whose path has
its folder (see `gpus.environment`)."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_LIBRARY = os.environ.get("ASTRAFLOW_POSING_LIBRARY", "")


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the devices before torch, and replaces parts of torch after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        gpus = _load_gpus()
        gpus.load(_LIBRARY)
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            gpus.install()

        loader.exec_module = exec_module
        return spec


def _load_gpus() -> Any:
    """The module `posing.gpus`, in processes whose path has no tests, too."""
    name = "posing.gpus"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "gpus.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


if _LIBRARY:
    sys.meta_path.insert(0, _Finder())
