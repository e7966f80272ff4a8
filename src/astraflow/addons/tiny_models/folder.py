"""The model folder that a spec or a conversion fills.

It appears only when it is complete, and its marker says where it came from.
"""

import json
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from astraflow.errors import DataError
from astraflow.models.weight_files import check_weight_files

__all__ = ["MARKER", "holds_model", "new_folder", "read_marker", "write_origin"]

MARKER = "astraflow_model.json"
"""File that says where a model came from."""


def holds_model(folder: Path, origin: str) -> bool:
    """Returns whether a folder already has the complete model that comes from `origin`.

    Raises: DataError if it holds anything else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
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
def new_folder(out: Path, *, replaces: bool = False) -> Generator[Path]:
    """Yields a scratch folder next to `out`. Its folder `new` becomes `out` at the end of the block.

    If the block raises, nothing is left. An old folder at `out` is deleted then if `replaces`. If another
    process has made `out` meanwhile, that one stays.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name[:100]}-") as scratch:
        (Path(scratch) / "new").mkdir()
        yield Path(scratch)
        if replaces and out.exists():
            out.rename(Path(scratch) / "old")
        try:
            (Path(scratch) / "new").rename(out)
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
