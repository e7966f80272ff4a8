"""Finds the Python of another environment that a recipe names, and runs short programs in it."""

import shutil
import subprocess
from pathlib import Path

from astraflow.errors import ConfigError

__all__ = ["OWN_MODULES_HIDDEN", "ask_program", "find_interpreter", "last_line"]

OWN_MODULES_HIDDEN = {"PYTHONPATH": "", "PYTHONHOME": ""}
"""Variables for a program in another Python: these modules of ours would hide its own."""

_ASK_TIMEOUT_S = 120.0
"""Time limit of a short program: importing torch takes seconds, or a minute on a busy disk."""


def find_interpreter(named: str, where: str) -> str:
    """The path of a Python: `named` is its path, a virtual environment's folder, or a name on the PATH.

    Links are not followed: a virtual environment's Python is one. Raises: ConfigError if there is none.
    """
    on_path = shutil.which(named) if "/" not in named and not Path(named).is_dir() else ""
    given = Path(on_path or named).expanduser().absolute()
    path = given / "bin" / "python" if given.is_dir() else given
    if not path.is_file():
        raise ConfigError(
            f"{where} = {named!r}: there is no {path}; make the environment first, for example with "
            "`python3 -m venv .venv-other` and its pip, and name its Python here"
        )
    return str(path)


def ask_program(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a short program in the folder `/`, where no file shadows a Python module."""
    try:
        return subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise ConfigError(f"{command[0]} did not answer within {_ASK_TIMEOUT_S:.0f} s") from err


def last_line(text: str) -> str:
    """Returns the last line of a program's output; empty if there is none."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
