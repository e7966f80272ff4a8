"""The part of the check of model folders that needs torch and transformers; see `model_folder`.

    python -P -m astraflow.models.folder_judge FOLDER      prints the `Judgment` as JSON

The model is built on `meta`, and transformers loads the files' headers into it. So names that transformers
converts or ignores are judged as they will be loaded, without reading the weights. The values of small models
are read, too; those of large ones are checked when they are loaded.
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch

from astraflow.errors import DataError
from astraflow.models.families import family_of
from astraflow.models.file_layout import (
    LoadedHeaders,
    adopt_layout,
    load_headers,
    rest_of,
    tied_names,
)
from astraflow.models.loading import build_model, format_names, is_finite
from astraflow.models.model_folder import DO_THEY_BELONG, Judgment, has_tokenizer, read_headers
from astraflow.models.weight_files import TensorHeader
from astraflow.user_input.user_files import json_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["judge_tensors"]

_Tensors = Mapping[str, tuple[Path, TensorHeader]]
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The dtypes of weights."""
_MAX_VALUE_BYTES = 2 << 30
"""Size up to which all values of a model are read, which takes about a second."""
_BLOCK_BYTES = 64 << 20
_LAYER = re.compile(r"\.(\d+)\.")
_WRAPPERS = {
    "base_model.model.": "PEFT adds this; merge the adapter with `merge_and_unload()`",
    "_orig_mod.": "torch.compile adds this; take the model's `_orig_mod`",
    "_fsdp_wrapped_module.": "FSDP adds this; gather the full state dict",
    "_checkpoint_wrapped_module.": "activation checkpointing adds this; unwrap the model",
    "module.": "DistributedDataParallel adds this; take the model's `module`",
}
"""What libraries add to names, and how to get the model without it."""
_ADAPTER_PARTS = (".lora_A.", ".lora_B.", ".base_layer.", ".lora_magnitude_vector")
_QUANTIZED_ENDS = (
    ".qweight", ".qzeros", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".absmax", ".SCB",
    "_scales",
)  # fmt: skip
"""Ends of names that only quantized weights have."""


def judge_tensors(folder: Path, tensors: _Tensors) -> Judgment:
    """Judges the tensors of a folder by their headers, and its tokenizer."""
    try:
        return Judgment(names=_names_of_version(folder, tensors))
    except DataError as err:
        return Judgment(str(err))


def _names_of_version(folder: Path, tensors: _Tensors) -> tuple[str, ...]:
    """See `check_model_folder`."""
    model = build_model(folder, dtype="float32", device="meta")
    weights = [(names, tuple(weight.shape)) for names, weight in tied_names(model)]
    headers = {name: header for name, (_, header) in tensors.items()}
    empty = {name: torch.empty(header.shape, device="meta") for name, header in headers.items()}
    loaded = load_headers(model, empty)
    _check_fit(model, weights, headers, loaded)
    tied = loaded.tied
    if foreign := [name for name, header in headers.items() if header.dtype not in _DTYPES]:
        empty = {name: tensor for name, tensor in empty.items() if name not in foreign}
        loaded = load_headers(model, empty)
        if not loaded.fits:  # the model needs them
            dtypes = sorted({headers[name].dtype for name in foreign})
            are_floats = all("F" in dtype for dtype in dtypes)
            advice = f"and the family {family_of(model.config.to_dict())} can't be trained"
            raise DataError(
                f"its tensors {format_names(foreign)} have the dtype {', '.join(dtypes)}, but versions hold "
                "plain float32, float16 or bfloat16 numbers, "
                f"{'so use or save the model in one of these' if are_floats else advice}"
            )
    for pair in tied:
        _check_tied(*pair, tensors)
    files = {path for path, _ in tensors.values()}
    if sum(path.stat().st_size for path in files) <= _MAX_VALUE_BYTES:
        for name, header in headers.items():
            if header.dtype in _DTYPES:
                _check_finite(name, *tensors[name])
    if has_tokenizer(folder):
        _check_tokenizer(folder, num_rows=int(cast("Any", model.get_input_embeddings()).weight.shape[0]))
    is_mapped = adopt_layout(model, empty, loaded)
    names = [names[0] for names, _ in tied_names(model)]
    if absent := [name for name in names if name not in headers]:
        raise DataError(
            f"its files hold {format_names(absent)} under names or in shapes that transformers converts and "
            "doesn't save, so no version could have them; load the model with transformers, and save it with "
            "`save_pretrained`"
        )
    assert is_mapped
    return (*names, *rest_of(model))


def _check_fit(
    model: "PreTrainedModel",
    weights: Sequence[tuple[list[str], tuple[int, ...]]],
    headers: Mapping[str, TensorHeader],
    loaded: LoadedHeaders,
) -> None:
    """Raises: DataError unless transformers loads exactly these tensors into the model."""
    missing = loaded.missing
    unexpected = loaded.unexpected
    misshapen = loaded.misshapen
    if loaded.doubled:
        one, other = loaded.doubled[0]
        raise DataError(
            f"its files hold {one} and {other}, but the model has one weight for both; remove one"
        )
    if loaded.fits:
        return
    shapes = {name: shape for names, shape in weights for name in names}
    if loaded.error or 2 * len(shapes.keys() & headers.keys()) > len(shapes):
        # The files have the usual names, in which the reader knows the tensors better than in the model's.
        missing = [names[0] for names, _ in weights if not any(name in headers for name in names)]
        unexpected = [name for name in headers if name not in shapes] if loaded.error else unexpected
        common = [name for name in headers if name in shapes]
        misshapen = [(name, headers[name].shape, shapes[name]) for name in common]
        misshapen = [entry for entry in misshapen if tuple(entry[1]) != tuple(entry[2])]
    parts = [f"missing: {format_names(missing)}"] if missing else []
    parts += [f"not in the model: {format_names(unexpected)}"] if unexpected else []
    other = [f"{name} is {tuple(own)} instead of {tuple(wanted)}" for name, own, wanted in misshapen]
    parts += [f"of another shape: {format_names(other)}"] if other else []
    raise DataError(
        f"its weights are not those of a {type(model).__name__} as its config.json describes it ("
        f"{'; '.join(parts) or loaded.error}); {_advice(missing, unexpected, shapes)}"
    )


def _advice(missing: Sequence[str], unexpected: Sequence[str], shapes: Collection[str]) -> str:
    """What to do about weights that don't fit."""
    if any(part in name for name in unexpected for part in _ADAPTER_PARTS):
        return (
            "it holds an adapter that was not merged: call PEFT's `merge_and_unload()`, and save that model"
        )
    if any(name.endswith(_QUANTIZED_ENDS) for name in unexpected):
        return "they are quantized, so use the folder that they were quantized from"
    for wrapper, how in _WRAPPERS.items():
        if any(wrapper in name for name in unexpected):
            return f"names contain {wrapper!r}: {how}, and save it with `save_pretrained`"
    prefixes = {name.removesuffix(own) for own in missing[:1] for name in unexpected if name.endswith(own)}
    if prefixes:
        return f"names begin with {min(prefixes)!r}; rename the tensors"
    layers = [_num_layers(names) for names in (shapes, [*(set(shapes) - set(missing)), *unexpected])]
    if layers[0] != layers[1]:
        return f"config.json has {layers[0]} layers, the files {layers[1]}; {DO_THEY_BELONG}"
    if missing == ["lm_head.weight"]:
        return (
            "if the model uses its embedding as the output head, set tie_word_embeddings: true in "
            "config.json, else add the head"
        )
    return DO_THEY_BELONG


def _num_layers(names: Iterable[str]) -> int:
    return max((int(match[1]) + 1 for name in names if (match := _LAYER.search(name))), default=0)


def _check_tied(name: str, source: str, tensors: _Tensors) -> None:
    """Raises: DataError if two tensors that the model ties are different."""
    copy = tensors[name]
    first = tensors[source]
    if copy[1].dtype != first[1].dtype or any(
        not np.array_equal(*blocks) for blocks in zip(_blocks(*copy), _blocks(*first), strict=True)
    ):
        raise DataError(
            f"its config.json ties {source} and {name}, but its files hold different values for them; set "
            "tie_word_embeddings: false in config.json if the model was trained with both, else remove "
            f"{name}"
        )


def _check_finite(name: str, path: Path, header: TensorHeader) -> None:
    """Raises: DataError if a value is NaN or infinite."""
    for block in _blocks(path, header):
        if not is_finite(torch.from_numpy(block).view(_DTYPES[header.dtype])):
            raise DataError(
                f"its tensor {name} has values that are not finite (NaN or infinity); the file is damaged, "
                "or the training that wrote it had diverged: download it again, or use an earlier checkpoint"
            )


def _blocks(path: Path, header: TensorHeader) -> Iterable["np.ndarray[Any, np.dtype[np.uint8]]"]:
    """The bytes of a tensor, in parts."""
    start, end = header.data_offsets
    for first in range(start, end, _BLOCK_BYTES):
        yield np.fromfile(path, np.uint8, min(_BLOCK_BYTES, end - first), offset=first)


def _check_tokenizer(folder: Path, *, num_rows: int) -> None:
    """Raises: DataError if the tokenizer can't be loaded, or has tokens that the model does not have."""
    from transformers import AutoTokenizer

    has_code = "auto_map" in json_object(folder / "tokenizer_config.json")
    advice = "its class may be code in the folder, which is never run; save it as tokenizer.json"
    try:
        tokenizer = cast("Any", AutoTokenizer).from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        ids = cast("dict[str, int]", tokenizer.get_vocab())
    except Exception as err:  # a damaged folder may break its code anywhere
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise DataError(
            f"its tokenizer can't be loaded: {reason}; "
            f"{advice if has_code else 'copy it from the original model'}"
        ) from err
    if unknown := sorted((idx, token) for token, idx in ids.items() if idx >= num_rows):
        listed = format_names([f"{token!r} ({idx})" for idx, token in unknown])
        raise DataError(
            f"its tokenizer has tokens that its embedding of {num_rows} rows doesn't have: {listed}; use the "
            "model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))` and save both"
        )


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    sys.stdout.buffer.write(msgspec.json.encode(judge_tensors(chosen, read_headers(chosen))))
