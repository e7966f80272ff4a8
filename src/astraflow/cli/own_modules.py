"""Finds the modules that a recipe or a spec names."""

import os
import sys
from pathlib import Path

__all__ = ["module_path"]


def module_path(file: Path, *earlier: str) -> tuple[str, ...]:
    """Adds the folders with a file's own modules to this process's search path, and returns them.

    They are the current folder, those in `earlier`, the file's folder and, for a file that comes with
    AstraFlow, the folder that has `recipes` and `examples`.
    """
    from astraflow.recipe.gallery import root_of

    of_gallery = root_of(file)
    own = [os.path.dirname(os.path.realpath(file)), *([str(of_gallery)] if of_gallery is not None else [])]
    folders = tuple(dict.fromkeys([str(Path.cwd()), *earlier, *own]))
    sys.path += [folder for folder in folders if folder not in sys.path]
    return folders
