"""The model folder that a spec or a conversion fills.

It appears only when it is complete, and its marker says where it came from.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from astraflow.errors import DataError
from astraflow.models.weight_files import check_weight_files
from astraflow.user_input.new_folder import is_free, new_folder

__all__ = ["MARKER", "holds_model", "read_marker", "shared_folder", "write_origin"]

MARKER = "astraflow_model.json"
"""File that says where a model came from."""


def holds_model(folder: Path, origin: str) -> bool:
    """Returns whether a folder already has the complete model that comes from `origin`.

    Raises: DataError if it holds anything else.
    """
    if is_free(folder):
        return False
    if read_marker(folder, "origin") != origin:
        raise DataError(
            f"{folder} exists and was not made from {origin}; choose another folder with --out, or remove it"
        )
    try:
        check_weight_files(folder)
    except DataError as err:
        raise DataError(f"{folder}: {err} Remove the folder, and run the command again") from err
    return True


@contextmanager
def shared_folder(out: Path) -> Generator[Path]:
    """Like `new_folder`, but if another process has made the model in `out` meanwhile, that one stays."""
    try:
        with new_folder(out) as fresh:
            yield fresh
    except OSError:
        if not (out / MARKER).is_file():
            raise


def write_origin(folder: Path, origin: str) -> None:
    """Writes into a model folder where the model came from."""
    (folder / MARKER).write_text(json.dumps({"origin": origin}, indent=2) + "\n", encoding="utf-8")


def read_marker(folder: Path, key: str) -> str:
    """Returns what a folder's marker says under a key; empty if the folder is missing, or has none."""
    try:
        return str(json.loads((folder / MARKER).read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
