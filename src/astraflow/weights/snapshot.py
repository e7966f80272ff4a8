"""Writes snapshots as model folders, and writes and reads safetensors files without torch.

A safetensors file consists of the length of its header (uint64), a JSON header `{name: {dtype, shape,
data_offsets}}`, and the tensors' bytes without gaps, all little-endian.
"""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import DataError
from astraflow.models.adapters import adapter_config, is_adapter, merge_adapters
from astraflow.models.weight_files import weight_paths
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.manifest import ITEM_BYTES, is_model_file

__all__ = [
    "ADAPTER_FILE",
    "ADAPTER_FOLDER",
    "model_files",
    "read_model",
    "read_safetensors",
    "snapshot_to_folder",
    "write_adapter",
    "write_safetensors",
]

ADAPTER_FOLDER = "adapter"
"""Folder of the LoRA adapter, in PEFT's format, in a model folder."""
ADAPTER_FILE = "adapter_model.safetensors"


_TO_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FROM_SAFETENSORS = {code: dtype for dtype, code in _TO_SAFETENSORS.items()}
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: Literal["BF16", "F16", "F32"]
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def snapshot_to_folder(snapshot: WeightSnapshot, folder: Path, *, base: str = "") -> None:
    """Writes a complete Hugging Face folder: the tensors of a version with its config and tokenizer files.

    Adapters are merged into the weights, so that the folder opens like any other. They are also in
    `adapter/`, in PEFT's format, for users who have the base model, which is called `base` there. The folder
    is written under another name and renamed.

    Raises: DataError if `folder` exists.
    """
    if folder.exists():
        raise DataError(f"{folder} exists; choose a new folder, or delete it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for path in snapshot.model_dir.iterdir():
            shutil.copy(path, aside / path.name)
        write_safetensors(aside / "model.safetensors", merge_adapters(snapshot.tensors))
        if adapters := [tensor for tensor in snapshot.tensors if is_adapter(tensor.name)]:
            write_adapter(aside / ADAPTER_FOLDER, adapters, base=base)
        aside.chmod(0o755)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_adapter(
    folder: Path, adapters: Sequence[HostTensor], *, base: str, alpha: float | None = None
) -> None:
    """Writes a new folder that `PeftModel.from_pretrained` opens. `base` and `alpha`: see
    `adapter_config`."""
    folder.mkdir()
    write_safetensors(folder / ADAPTER_FILE, adapters)
    config = json.dumps(adapter_config(adapters, base=base, alpha=alpha), indent=2)
    (folder / "adapter_config.json").write_text(config, encoding="utf-8")


def write_safetensors(path: Path, tensors: Sequence[HostTensor]) -> None:
    """Writes a safetensors file that `transformers` can open. Wide dtypes come first, so all tensors are
    aligned."""
    ordered = sorted(tensors, key=lambda t: -ITEM_BYTES[t.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start = end
        end = start + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": _TO_SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in ordered:
            file.write(tensor.data.data)


def read_safetensors(path: Path) -> tuple[HostTensor, ...]:
    """The tensors of a file as views of its memory map, in file order. Writing into one changes no file.

    Raises: DataError if it is not a safetensors file, is truncated, or contains another dtype.
    """
    try:
        size = path.stat().st_size
        data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="c") if size else np.zeros(0, np.uint8)
    except OSError as err:
        raise DataError(f"{path} cannot be read: {err}") from err
    # A file too short to hold the length is refused below, like one whose header is too long.
    length = struct.unpack("<Q", data[:8].tobytes())[0] if size >= 8 else _MAX_HEADER_BYTES
    if length + 8 > min(size, _MAX_HEADER_BYTES):
        raise DataError(
            f"{path} is not a safetensors file: it has {size} bytes and claims a header of {length}"
        )
    try:
        header = msgspec.json.decode(data[8 : 8 + length].tobytes(), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except msgspec.DecodeError as err:
        raise DataError(f"{path}: header: {err}; supported dtypes are {', '.join(ITEM_BYTES)}") from err
    body = data[8 + length :]
    tensors: list[HostTensor] = []
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        if not 0 <= start <= end <= body.nbytes:
            raise DataError(f"{path}: tensor {name!r} lies at {start}-{end} of {body.nbytes} bytes")
        tensors.append(HostTensor(name, entry.shape, _FROM_SAFETENSORS[entry.dtype], body[start:end]))
    return tuple(tensors)


def read_model(folder: Path) -> tuple[HostTensor, ...]:
    """All tensors of a Hugging Face folder with one or more safetensors files, ordered by name.

    Raises: DataError if there is none.
    """
    paths = weight_paths(folder)
    if not paths:
        raise DataError(f"{folder} has no *.safetensors file; is it a Hugging Face model folder?")
    return tuple(sorted((t for path in paths for t in read_safetensors(path)), key=lambda t: t.name))


def model_files(folder: Path) -> dict[str, Path]:
    """The small files of a Hugging Face folder that are published with version 0: config, tokenizer,
    template."""
    return {p.name: p for p in sorted(folder.iterdir()) if p.is_file() and is_model_file(p.name)}
