"""A folder that a user asks for, which appears complete or not at all."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["is_free", "new_folder"]


def is_free(out: Path) -> bool:
    """Returns whether nothing is at a path, or only an empty folder."""
    return not out.exists() or (out.is_dir() and not any(out.iterdir()))


@contextmanager
def new_folder(out: Path, *, replaces: bool = False) -> Generator[Path]:
    """Yields a folder to fill, which becomes `out` at the end of the block.

    If the block raises, nothing is left.
    `out` must be missing or an empty folder. With `replaces`, an old folder there is deleted at the end. The
    parent of the yielded folder is on the same disk and has room for scratch files.

    Raises: OSError if `out` can't be written, or something else is there at the end.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name[:100]}-") as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        yield fresh
        if replaces and out.exists():
            out.rename(Path(scratch) / "old")
        fresh.rename(out)
