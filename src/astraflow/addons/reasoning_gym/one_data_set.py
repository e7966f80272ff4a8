"""Imports one data set of `reasoning-gym` without the others.

`import reasoning_gym` imports the modules of all data sets, which takes a second of CPU time and 110 MB. This
file searches the library's source for the module that registers a data set, and imports only that module.
During the import, the packages that contain it are empty, because their own code would import all modules.

What was imported leaves `sys.modules` again. If other code in this process imports the library later, it
gets the whole library, as usual.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import Lock
from typing import Any

__all__ = ["import_data_set"]

_LIBRARY = "reasoning_gym"
_LOCK = Lock()
"""Allows one import at a time, because an import changes `sys.modules` for the whole process."""


@cache
def import_data_set(name: str) -> tuple[Any, Any] | None:
    """Returns the class of a data set and its config class.

    Returns None if the whole library has to be imported for them, because no module is known to register
    this name, or the module can't be imported alone. Also returns None if the library is imported already.
    """
    with _LOCK:
        root = _library_folder()
        module = _registering_module(name, root) if root is not None else None
        if root is None or module is None:
            return None
        try:
            # The packages around the module are empty ones, which run no code of their own.
            for depth in range(len(module)):
                package = ".".join([_LIBRARY, *module[:depth]])
                spec = ModuleSpec(package, None, is_package=True)
                spec.submodule_search_locations = [str(root.joinpath(*module[:depth]))]
                sys.modules[package] = module_from_spec(spec)
            importlib.import_module(".".join([_LIBRARY, *module]))
            return sys.modules[f"{_LIBRARY}.factory"].DATASETS[name]
        except (AttributeError, ImportError, LookupError):
            return None
        finally:
            for imported in [key for key in sys.modules if f"{key}.".startswith(f"{_LIBRARY}.")]:
                del sys.modules[imported]


def _library_folder() -> Path | None:
    """Returns the folder of the library; None if it is imported already, or isn't installed."""
    spec = None if _LIBRARY in sys.modules else find_spec(_LIBRARY)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _registering_module(name: str, root: Path) -> tuple[str, ...] | None:
    """Returns the parts of the name of the module that registers a data set; None if none is found.

    A module that calls `create_dataset` opens other data sets by their names, so it needs all of them.
    """
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        # Parsing takes long, so most files are ruled out by their text.
        is_likely = f'"{name}"' in source and "register_dataset(" in source
        if is_likely and "create_dataset" not in source and name in _registered_names(source):
            return path.relative_to(root).with_suffix("").parts
    return None


def _registered_names(source: str) -> Iterator[str]:
    """Yields the data sets that a module registers: `register_dataset(NAME, ...)` with a text or constant."""
    constants: dict[str, str] = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=constant)], value=ast.Constant(value=str(text))):
                constants[constant] = text
            case ast.Expr(
                value=ast.Call(func=ast.Name(id="register_dataset"), args=[ast.Constant(value=str(text)), *_])
            ):
                yield text
            case ast.Expr(
                value=ast.Call(func=ast.Name(id="register_dataset"), args=[ast.Name(id=constant), *_])
            ):
                yield constants.get(constant, "")
            case _:
                pass
