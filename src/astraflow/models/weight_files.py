"""Checks that the weights of a model folder are complete, unlike after an interrupted download or a clone
without LFS.

It reads only the files' sizes and headers, so it takes milliseconds for any model.
"""

import json
import struct
from pathlib import Path
from typing import Any, cast

from astraflow.errors import DataError
from astraflow.user_input.user_files import check_regular, json_value, read_file

__all__ = ["check_weight_files", "weight_paths"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_LENGTH_BYTES = 8
"""A safetensors file starts with the length of its header, a little-endian uint64."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit that the format defines."""


def weight_paths(folder: Path) -> list[Path]:
    """The safetensors files with a model's weights. Raises: DataError if the index is broken.

    The folder may have other safetensors files, such as a checkpoint's optimizer, or the same weights in
    another layout.
    """
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    return sorted(folder / str(name) for name in _indexed_files(folder / _INDEX)) or sorted(
        folder.glob("*.safetensors")
    )


def check_weight_files(folder: Path) -> None:
    """Checks the safetensors files of a folder.

    Raises: DataError if there is none, if one that the index names is missing, or if one is cut short.
    """
    paths = weight_paths(folder)
    if not paths:
        raise DataError("it has no *.safetensors; is the folder complete?")
    if missing := [path.name for path in paths if not path.is_file()]:
        raise DataError(f"it lacks {', '.join(missing[:3])}, which {_INDEX} names; is the download complete?")
    for path in paths:
        _check_size(path)


def _indexed_files(index: Path) -> set[str]:
    """The files that an index names; empty if there is no index."""
    if not index.exists():
        return set()
    loaded = json_value(read_file(index, "its index"), f"its {index.name}")
    try:
        return set(cast("dict[str, str]", loaded["weight_map"]).values())
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise DataError(f"its {index.name} is broken: {err}") from err


def _check_size(path: Path) -> None:
    check_regular(path, "its weight file")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(len(_LFS_POINTER))
        if prefix == _LFS_POINTER:
            raise DataError(
                f"its {path.name} is a Git LFS pointer instead of weights; run `git lfs pull` in the cloned "
                "folder"
            )
        # A file that is too short for the length is refused like one whose header is too long.
        length = struct.unpack("<Q", prefix[:_LENGTH_BYTES])[0] if size >= _LENGTH_BYTES else size
        file.seek(_LENGTH_BYTES)
        header = file.read(length) if length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES) else b""
    expected = _LENGTH_BYTES + length + _end_of_tensors(header, path) if header else None
    if size != expected:
        of_total = f" of {expected:,}" if expected is not None else ""
        raise DataError(
            f"its {path.name} has {size:,}{of_total} bytes and is not a complete safetensors file; was the "
            "download or the copy interrupted?"
        )


def _end_of_tensors(header: bytes, path: Path) -> int:
    """Total number of bytes of all tensors."""
    try:
        entries = cast("dict[str, dict[str, Any]]", json.loads(header))
        ends = [int(e["data_offsets"][1]) for name, e in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as err:
        raise DataError(f"the header of its {path.name} is broken: {err}") from err
    return max(ends, default=0)
