"""Prints the path of a Python that is new enough. Exits with 1 if this machine doesn't have one.

    python tools/find_python.py 3.12

The candidates are the Python that runs this program, the names `python3.12`, `python3.13`, ... on the PATH,
and the versions that pyenv has installed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_NEWEST_MINOR = 20
"""Names on the PATH are tried up to `python3.20`."""


def candidates(minor: int) -> Iterator[str]:
    """Yields interpreters that may be new enough, the oldest versions first, because libraries support those
    first."""
    yield sys.executable
    for each in range(minor, _NEWEST_MINOR + 1):
        yield from filter(None, [shutil.which(f"python3.{each}")])
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for each in range(minor, _NEWEST_MINOR + 1):
        yield from map(str, sorted(pyenv.glob(f"versions/3.{each}.*/bin/python")))


def is_new_enough(python: str, minor: int) -> bool:
    """Checks whether an interpreter runs and is new enough. A shim of pyenv may not run."""
    code = f"import sys, venv; sys.exit(sys.version_info < (3, {minor}))"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def main() -> None:
    minor = int(sys.argv[1].removeprefix("3."))
    found = next((each for each in candidates(minor) if is_new_enough(each, minor)), None)
    if found is None:
        sys.exit(f"no Python >= {sys.argv[1]} on the PATH or in pyenv")
    print(found)


if __name__ == "__main__":
    main()
