"""The safetensors files of a model folder: which they are, and what their headers say.

A safetensors file consists of the length of its header (uint64), a JSON header `{name: {dtype, shape,
data_offsets}}`, and the tensors' bytes without gaps, all little-endian. This file reads only sizes and
headers, so it takes milliseconds for any model. It refuses incomplete files, as an interrupted download or a
clone without LFS leaves them.
"""

import struct
from math import prod
from pathlib import Path
from typing import cast

import msgspec

from astraflow.errors import DataError
from astraflow.user_input.user_files import check_regular, json_value, read_file

__all__ = ["TensorHeader", "check_weight_files", "read_header", "weight_paths"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_LENGTH_BYTES = 8
"""A safetensors file starts with the length of its header, a little-endian uint64."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit that the format defines."""
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
"""Number of bits of an element, by the format's names of dtypes."""


class TensorHeader(msgspec.Struct, frozen=True):
    """What a file's header says about a tensor."""

    dtype: str
    """In the format's spelling, for example `BF16`."""
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """The tensor's first byte and the one after its last. `read_header` counts them from the start of the
    file."""


def weight_paths(folder: Path) -> list[Path]:
    """The safetensors files with a model's weights. Raises: DataError if the index is broken.

    The folder may have other safetensors files, such as a checkpoint's optimizer, or the same weights in
    another layout.
    """
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    return sorted(folder / str(name) for name in _indexed_files(folder / _INDEX))


def check_weight_files(folder: Path) -> dict[str, tuple[Path, TensorHeader]]:
    """The tensors of a folder by name, each with its file.

    Raises: DataError if there is no file, if there are parts without an index, if a file that the index names
    is missing, if one is cut short or damaged, or if two have the same tensor.
    """
    paths = weight_paths(folder)
    if not paths and (parts := sorted(path.name for path in folder.glob("*.safetensors"))):
        raise DataError(
            f"it has {', '.join(parts[:3])}, but neither {_WHOLE} nor an {_INDEX} that names its files; is "
            "the download complete?"
        )
    if not paths:
        others = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        hint = (
            f"only {others[0]}, which can run code when it is read; load it where you trust it, and save it "
            "with `model.save_pretrained(FOLDER)`"
            if others
            else "is the folder complete?"
        )
        raise DataError(f"it has no *.safetensors; {hint}")
    if missing := [path.name for path in paths if not path.is_file()]:
        raise DataError(f"it lacks {', '.join(missing[:3])}, which {_INDEX} names; is the download complete?")
    tensors: dict[str, tuple[Path, TensorHeader]] = {}
    for path in paths:
        for name, header in read_header(path).items():
            if name in tensors:
                raise DataError(
                    f"its {path.name} and {tensors[name][0].name} both hold the tensor {name}; keep the "
                    "files of one copy of the model"
                )
            tensors[name] = path, header
    return tensors


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a file by name, in the order of their bytes.

    Raises: DataError if the file is cut short, or its header and its bytes do not belong together.
    """
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
    tensors = _parse(header, path, _LENGTH_BYTES + length) if header else {}
    ends = [_LENGTH_BYTES + length, *(tensor.data_offsets[1] for tensor in tensors.values())]
    expected = ends[-1] if header else None
    if size != expected:
        of_total = f" of {expected:,}" if expected is not None else ""
        raise DataError(
            f"its {path.name} has {size:,}{of_total} bytes and is not a complete safetensors file; was the "
            "download or the copy interrupted?"
        )
    return tensors


def _parse(header: bytes, path: Path, first_byte: int) -> dict[str, TensorHeader]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(entry, type=TensorHeader) for name, entry in raw.items()}
    except (ValueError, RecursionError) as err:
        raise DataError(f"the header of its {path.name} is broken: {err}") from err
    tensors: dict[str, TensorHeader] = {}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        num_bits = _ITEM_BITS.get(entry.dtype, -1) * prod(entry.shape)
        if start != at or num_bits < 0 or min(entry.shape, default=0) < 0 or 8 * (end - start) != num_bits:
            raise DataError(
                f"the header of its {path.name} is broken: the tensor {name} with shape {entry.shape} of "
                f"{entry.dtype} cannot have the bytes {start} to {end} after the {at} of others"
            )
        at = end
        tensors[name] = TensorHeader(entry.dtype, entry.shape, (first_byte + start, first_byte + end))
    return tensors


def _indexed_files(index: Path) -> set[str]:
    """The files that an index names; empty if there is no index."""
    if not index.exists():
        return set()
    loaded = json_value(read_file(index, "its index"), f"its {index.name}")
    try:
        return set(cast("dict[str, str]", loaded["weight_map"]).values())
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise DataError(f"its {index.name} is broken: {err}") from err
