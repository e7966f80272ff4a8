"""Where the modules that a recipe or a spec names are found."""

import sys
from pathlib import Path

__all__ = ["module_path"]


def module_path(file: Path, *earlier: str) -> tuple[str, ...]:
    """Folders with a file's own modules, which are added to this process's search path.

    They are the current one, those of `earlier`, the file's and, for one that comes with AstraFlow, the
    folder that has `recipes` and `examples`.
    """
    from astraflow.recipe.gallery import root_of

    of_gallery = root_of(file)
    own = [str(file.resolve().parent), *([str(of_gallery)] if of_gallery is not None else [])]
    folders = tuple(dict.fromkeys([str(Path.cwd()), *earlier, *own]))
    sys.path += [folder for folder in folders if folder not in sys.path]
    return folders
