"""Writes snapshots as model folders, and writes and reads safetensors files without torch."""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import DataError
from astraflow.models.adapters import adapter_config, is_adapter, merge_adapters
from astraflow.models.weight_files import read_header, weight_paths
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

    Raises: DataError if it is not a complete safetensors file, or contains another dtype.
    """
    try:
        headers = read_header(path)
    except DataError as err:
        raise DataError(f"{path.parent}: {err}") from err
    data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="c")
    tensors: list[HostTensor] = []
    for name, header in headers.items():
        if header.dtype not in _FROM_SAFETENSORS:
            raise DataError(
                f"{path}: tensor {name} has the dtype {header.dtype}; supported dtypes are "
                f"{', '.join(ITEM_BYTES)}"
            )
        start, end = header.data_offsets
        tensors.append(HostTensor(name, header.shape, _FROM_SAFETENSORS[header.dtype], data[start:end]))
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
