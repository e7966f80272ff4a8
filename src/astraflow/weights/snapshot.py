"""Writes snapshots as model folders, and writes and reads safetensors files without torch."""

import json
import shutil
import struct
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import DataError
from astraflow.models.adapters import BASE_FILE, adapter_config, are_adapters, is_adapter, merge_adapters
from astraflow.models.model_folder import check_model_folder
from astraflow.models.weight_files import read_header, weight_paths
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.user_input.new_folder import is_free, new_folder
from astraflow.user_input.user_files import json_value
from astraflow.weights.manifest import ITEM_BYTES, is_model_file

__all__ = [
    "ADAPTER_FILE",
    "ADAPTER_FOLDER",
    "declare_dtype",
    "model_files",
    "read_model",
    "read_safetensors",
    "snapshot_to_folder",
    "with_base",
    "with_dtype",
    "write_adapter",
    "write_model",
    "write_safetensors",
]

WriteModel = Callable[[Path, Sequence[HostTensor]], None]

ADAPTER_FOLDER = "adapter"
"""Folder of the LoRA adapter, in PEFT's format, in a model folder."""
ADAPTER_FILE = "adapter_model.safetensors"


_TO_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FROM_SAFETENSORS = {code: dtype for dtype, code in _TO_SAFETENSORS.items()}
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""The key for the dtype of weights in configs, and its name before transformers 5."""


def write_model(folder: Path, tensors: Sequence[HostTensor]) -> None:
    """Writes the weights of a model folder to one file."""
    write_safetensors(folder / "model.safetensors", tensors)


def snapshot_to_folder(
    snapshot: WeightSnapshot, folder: Path, *, base: str = "", write: WriteModel = write_model
) -> None:
    """Writes a complete Hugging Face folder: the tensors of a version with its config and tokenizer files.
    The config names their dtype.

    Adapters are merged into the weights, so that the folder opens like any other. They are also in
    `adapter/`, in PEFT's format, for users who have the base model, which is called `base` there. The folder
    is written under another name and renamed. `write` writes the weights.

    Raises: DataError if `folder` exists and isn't empty.
    """
    if not is_free(folder):
        raise DataError(f"{folder} exists; choose a new folder, or delete it first")
    with new_folder(folder) as fresh:
        for path in snapshot.model_dir.iterdir():
            if path.name != BASE_FILE:  # the folder has the base itself
                shutil.copy(path, fresh / path.name)
        write(fresh, merge_adapters(snapshot.tensors))
        declare_dtype(fresh)
        if adapters := [tensor for tensor in snapshot.tensors if is_adapter(tensor.name)]:
            write_adapter(fresh / ADAPTER_FOLDER, adapters, base=base)


def declare_dtype(folder: Path) -> None:
    """Makes the config in a folder name the dtype of its weights, in which `from_pretrained` then loads them.

    A config of the model that was trained may name a narrower one, in which small updates are rounded away.
    """
    config = folder / "config.json"
    dtypes = {header.dtype for path in weight_paths(folder) for header in read_header(path).values()}
    if config.is_file() and dtypes:
        content = config.read_bytes()
        declared = with_dtype(content, {_FROM_SAFETENSORS[dtype] for dtype in dtypes})
        if declared != content:
            config.write_bytes(declared)


def with_dtype(config: bytes, dtypes: Collection[str]) -> bytes:
    """A `config.json` that names the dtype of weights; float32 if they have several."""
    content: object = json_value(config, "config.json")
    if not dtypes or not isinstance(content, dict):
        return config
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else "float32"
    whole = cast("dict[str, Any]", content)
    parts = [cast("dict[str, Any]", part) for part in whole.values() if isinstance(part, dict)]
    entries = [(section, key) for section in (whole, *parts) for key in _DTYPE_KEYS if key in section]
    if len(dtypes) > 1 and "dtype" not in whole:
        entries.append((whole, "dtype"))  # else readers take the dtype of any tensor
    if all(section.get(key) == dtype for section, key in entries):
        return config
    for section, key in entries:
        section[key] = dtype
    return json.dumps(whole, indent=2, ensure_ascii=False).encode()


def write_adapter(
    folder: Path, adapters: Sequence[HostTensor], *, base: str, scaling: tuple[float, bool] | None = None
) -> None:
    """Writes a new folder that `PeftModel.from_pretrained` opens. `base` and `scaling`: see
    `adapter_config`."""
    folder.mkdir()
    write_safetensors(folder / ADAPTER_FILE, adapters)
    config = json.dumps(adapter_config(adapters, base=base, scaling=scaling), indent=2)
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


def read_safetensors(path: Path, names: Collection[str] = ()) -> tuple[HostTensor, ...]:
    """The tensors of a file as views of its memory map, in file order. Writing into one changes no file.

    `names`: the tensors to read; empty means all.
    Raises: DataError if it is not a complete safetensors file, or contains another dtype.
    """
    try:
        headers = read_header(path)
    except DataError as err:
        raise DataError(f"{path.parent}: {err}") from err
    data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="c")
    tensors: list[HostTensor] = []
    wanted = frozenset(names or headers)
    for name, header in headers.items():
        if name not in wanted:
            continue
        if header.dtype not in _FROM_SAFETENSORS:
            raise DataError(
                f"{path}: tensor {name} has the dtype {header.dtype}; supported dtypes are "
                f"{', '.join(ITEM_BYTES)}"
            )
        start, end = header.data_offsets
        tensors.append(HostTensor(name, header.shape, _FROM_SAFETENSORS[header.dtype], data[start:end]))
    return tuple(tensors)


def read_model(folder: Path) -> tuple[HostTensor, ...]:
    """The tensors of a Hugging Face folder as its version 0 has them, ordered by name: views of the files.

    Raises: DataError unless they are exactly the weights of the folder's config.
    """
    try:
        names = check_model_folder(folder) or ()
    except DataError as err:
        raise DataError(f"model folder {folder}: {err}") from err
    tensors = [tensor for path in weight_paths(folder) for tensor in read_safetensors(path, names)]
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


def with_base(tensors: Sequence[HostTensor], folder: Path) -> tuple[HostTensor, ...]:
    """The tensors of a version as engines load them: adapters follow the weights of `folder`, their base.

    Raises: like `read_model`.
    """
    is_apart = are_adapters(tensor.name for tensor in tensors)
    return (*read_model(folder), *tensors) if is_apart else tuple(tensors)


def model_files(folder: Path) -> dict[str, Path]:
    """The small files of a Hugging Face folder that are published with version 0: config, tokenizer,
    template."""
    return {p.name: p for p in sorted(folder.iterdir()) if p.is_file() and is_model_file(p.name)}
