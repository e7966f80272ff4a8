"""Finds the files of modules that the user wrote, without running any of their code.

What a component does depends on its module, and on the user's other modules that this module imports.
Imports of installed packages and of the standard library are not followed, because these have versions.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from astraflow.user_input.own_code import is_own

__all__ = ["module_file", "own_files"]


def own_files(module: str) -> list[Path]:
    """Returns the file of any module, and those of the user's own modules that it imports, directly or
    indirectly. The order is always the same.

    The list is empty if the module is not installed or has no file.

    Example: `own_files("recipes.alfworld.household_teachers")` also contains `household_room.py`.
    """
    first = module_file(module)
    if first is None:
        return []
    modules = {first: module}
    waiting = [first]
    while waiting:
        file = waiting.pop(0)
        if not is_own(file.resolve()):
            continue
        for name in _find_imports(file, modules[file]):
            other = module_file(name)
            if other is not None and other not in modules and is_own(other.resolve()):
                modules[other] = name
                waiting.append(other)
    return list(modules)


def module_file(module: str) -> Path | None:
    """Finds the file of a module without running any code of the module or its parent packages.

    Returns None if the module is not installed or has no file. `importlib.util.find_spec` is not safe here,
    because it imports the parent packages, and the name of the module may come from the network.
    """
    folders: Sequence[str] = sys.path
    parent = ""
    spec = None
    for part in module.split("."):
        name = f"{parent}.{part}" if parent else part
        spec = _find_spec(name, folders if parent else None)
        if spec is not None and spec.origin is not None:
            folders = [*(spec.submodule_search_locations or ())]
        else:
            # This may be a namespace package, which consists of all folders with its name.
            folders = [str(folder) for above in folders if (folder := Path(above) / part).is_dir()]
        parent = name
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _find_spec(name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    try:
        for finder in sys.meta_path:
            if (spec := finder.find_spec(name, folders)) is not None:
                return spec
    except KeyError:
        # The finder of a namespace package inside another one needs its parent to be imported.
        pass
    return None


def _find_imports(file: Path, module: str) -> Iterator[str]:
    """Yields the names that a file imports: modules, the packages that they are in, and names that may be
    modules (`from package import name`)."""
    for name in _find_imported_names(file, module):
        parts = name.split(".")
        yield from (".".join(parts[:num]) for num in range(1, len(parts) + 1))


def _find_imported_names(file: Path, module: str) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # not valid Python; importing it will report the error
    is_package = file.name == "__init__.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, is_package=is_package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _base(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Returns the module of `from MODULE import name`, with the dots of a relative import resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    num_kept = len(parts) - node.level + is_package
    return ".".join([*parts[:num_kept], *([node.module] if node.module else [])])
