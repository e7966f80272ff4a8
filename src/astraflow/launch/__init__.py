"""From a recipe to running processes. The package itself can be called: it is the function `run.launch`.

`from astraflow import launch` has to give that function, and Python gives it this package, which has the same
name. So the package is callable: Python lets a module change its `__class__`.
"""

import sys
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from astraflow.launch.config import Recipe
    from astraflow.launch.run import Run
    from astraflow.launch.screen import View
    from astraflow.protocols import Launcher

__all__: list[str] = []


class _CallablePackage(ModuleType):
    def __call__(
        self,
        recipe: "Recipe",
        run_dir: "str | Path",
        *,
        view: "View | None" = None,
        module_path: tuple[str, ...] = (),
        launcher: "Launcher | None" = None,
    ) -> "AbstractAsyncContextManager[Run]":
        """`astraflow.launch.run.launch`, which is imported at the first call."""
        from astraflow.launch.run import launch

        return launch(recipe, run_dir, view=view, module_path=module_path, launcher=launcher)


sys.modules[__name__].__class__ = _CallablePackage
