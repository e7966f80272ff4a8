"""Finds the Python of another environment that a recipe names."""

import shutil
from pathlib import Path

from astraflow.errors import ConfigError

__all__ = ["OWN_MODULES_HIDDEN", "find_interpreter"]

OWN_MODULES_HIDDEN = {"PYTHONPATH": "", "PYTHONHOME": ""}
"""Variables for a program in another Python: these modules of ours would hide its own."""


def find_interpreter(named: str, where: str) -> str:
    """The path of a Python: `named` is its path, a virtual environment's folder, or a name on the PATH.

    Links are not followed: a virtual environment's Python is one. Raises: ConfigError if there is none.
    """
    found = shutil.which(named) if "/" not in named and not Path(named).is_dir() else ""
    given = Path(found or named).expanduser().absolute()
    path = given / "bin" / "python" if given.is_dir() else given
    if not path.is_file():
        raise ConfigError(
            f"{where} = {named!r}: there is no {path}; make the environment first, for example with "
            "`python3 -m venv .venv-other` and its pip, and name its Python here"
        )
    return str(path)
