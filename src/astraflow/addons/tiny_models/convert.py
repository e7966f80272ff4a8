"""Converts a GGUF file into a Hugging Face folder in bfloat16.

transformers reads the file, because it knows how the tensors of each architecture are named and laid out. Its
`from_pretrained(gguf_file=...)` needs the library accelerate, and its `save_pretrained` refuses such a model
as a quantized one, so the tensors are put into an empty model here. Every weight is the dequantized number,
rounded to bfloat16 once.
"""

import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    load_gguf_checkpoint,  # pyright: ignore[reportUnknownVariableType] (no annotations)
)
from transformers.utils import logging as transformers_logging

from astraflow.addons.tiny_models.capacity import FreeSpace, check_disk, check_memory, measure_capacity
from astraflow.addons.tiny_models.folder import holds_model, shared_folder, write_origin
from astraflow.addons.tiny_models.tools_template import with_tools
from astraflow.errors import DataError
from astraflow.user_input.own_code import describe_error

__all__ = ["ModelCard", "convert_file", "write_model"]

Tell = Callable[[str], None]
_DTYPE = torch.bfloat16
_SMALL_FILES_BYTES = 20e6
"""Disk space for everything in a folder but the weights."""
_QUANTIZED = re.compile(r"(?:I?Q|TQ)(\d)")
"""Names of types with few bits, such as Q4_1 and IQ2_XXS."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the model card says in addition to how the weights were stored."""

    title: str
    origin: str
    license: str = ""
    base_model: str = ""


@dataclass(frozen=True, slots=True)
class _Contents:
    """The tensors of a GGUF file."""

    types: Counter[str]
    """Number of tensors by type, such as `Q4_1`."""
    num_weights: int
    largest: int
    """Weights of the largest tensor."""
    architecture: str
    license: str

    @property
    def bits(self) -> int:
        """Bits per weight of the type that most tensors have among the quantized ones; 0 if none is."""
        quantized = {name: num for name, num in self.types.items() if _QUANTIZED.match(name)}
        name = max(quantized, key=lambda name: quantized[name], default="")
        match = _QUANTIZED.match(name)
        return int(match[1]) if match else 0


def convert_file(file: Path, out: Path, *, tell: Tell, capacity: FreeSpace | None = None) -> Path:
    """Converts a GGUF file into the model folder `out`, unless that has the model already.

    Raises: DataError if the file can't be converted, or if there isn't enough memory or disk space.
    """
    origin = f"{file.name} ({file.stat().st_size:,} bytes)" if file.is_file() else file.name
    if holds_model(out, origin):
        tell(f"{out} is up to date")
        return out
    with shared_folder(out) as fresh:
        card = ModelCard(title=file.stem, origin=origin)
        write_model(file, fresh, card, tell=tell, capacity=capacity or measure_capacity(out))
    return out


def write_model(file: Path, folder: Path, card: ModelCard, *, tell: Tell, capacity: FreeSpace) -> None:
    """Writes weights, config, tokenizer, and model card into an empty folder.

    Raises: DataError, like `convert_file`.
    """
    contents = _read_contents(file)
    check_memory(file.name, capacity, num_weights=contents.num_weights, largest=contents.largest)
    check_disk(
        f"the model of {file.name}",
        capacity,
        folder.parent,
        needed_bytes=2 * contents.num_weights + _SMALL_FILES_BYTES,
    )
    tell(f"converting {file.name}: {contents.num_weights / 1e6:,.0f} million weights to bfloat16")
    with _quiet():
        tokenizer = cast("Any", AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
        try:
            model = _load_model(file, tokenizer)
        except (KeyError, NotImplementedError, RuntimeError, ValueError) as err:
            if isinstance(err, DataError):
                raise
            raise DataError(
                f"transformers can't make a causal language model of {file.name} ({contents.architecture}): "
                f"{describe_error(err)}; use another file"
            ) from err
        if isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = with_tools(tokenizer.chat_template)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)  # the library makes them private
    (folder / "README.md").write_text(_card_text(card, contents), encoding="utf-8")
    write_origin(folder, card.origin)


def _read_contents(file: Path) -> _Contents:
    """Reads the header of a file, and one block per type of tensor.

    Raises: DataError if it isn't a complete GGUF file of one part, of an architecture that transformers maps,
    with types of tensors that the library gguf can read.
    """
    reader = _open(file)
    architecture = _text(reader, "general.architecture")
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise DataError(
            f"{file.name} has a model of the architecture {architecture!r}, which transformers can't "
            f"convert; use one of these: {', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}"
        )
    if (parts := reader.fields.get("split.count")) is not None and int(parts.contents()) > 1:
        raise DataError(
            f"{file.name} is one of {parts.contents()} parts; merge them first, with "
            "`llama-gguf-split --merge FIRST_PART OUT`"
        )
    if not reader.tensors:
        raise DataError(f"{file.name} has no tensors, only a vocabulary; use the file with the weights")
    for tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.values():
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError as err:
            raise DataError(
                f"{file.name} has tensors of the type {tensor.tensor_type.name}, which the library gguf "
                "can't read; use a file with another quantization, such as Q8_0 or Q4_K_M"
            ) from err
    sizes = [int(tensor.n_elements) for tensor in reader.tensors]
    return _Contents(
        types=Counter(tensor.tensor_type.name for tensor in reader.tensors),
        num_weights=sum(sizes),
        largest=max(sizes),
        architecture=architecture,
        license=_text(reader, "general.license"),
    )


def _open(file: Path) -> GGUFReader:
    """Raises: DataError if it isn't a complete GGUF file."""
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    try:
        return GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as err:
        raise DataError(f"{file} is not a complete GGUF file ({err}); download it again") from err


def _text(reader: GGUFReader, key: str) -> str:
    """Returns a text from the header; empty if it isn't there."""
    field = reader.fields.get(key)
    return "" if field is None else str(field.contents())


def _load_model(file: Path, tokenizer: Any) -> Any:
    """Returns the model with the file's weights.

    Raises: DataError if the file lacks weights that the architecture has.
    """
    config = _load_config(file)
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config.update(ends)
    with torch.device("meta"):
        model = cast("Any", AutoModelForCausalLM.from_config(config, dtype=_DTYPE))
    read = cast("Any", load_gguf_checkpoint)(
        str(file), return_tensors=True, model_to_load=model, torch_dtype=_DTYPE
    )
    missing, _ = model.load_state_dict(read["tensors"], strict=False, assign=True)
    model.tie_weights()
    lacking = [name for name in missing if model.get_parameter(name).is_meta]
    if lacking:
        raise DataError(
            f"{file.name} lacks {len(lacking)} tensors of a {config.model_type} model, such as {lacking[0]}; "
            "use a complete file"
        )
    model.generation_config = GenerationConfig(**ends)
    return model


def _load_config(file: Path) -> Any:
    """Returns the model's config, as its authors wrote it."""
    config = cast("Any", AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    config.dtype = _DTYPE
    values = cast("dict[str, object]", vars(config))
    values.pop("_model_name_or_path", None)  # a title, which readers would take for a folder
    for key, value in values.items():
        if isinstance(value, float):  # stored as float32: 1e-05 was read as 9.999999747378752e-06
            setattr(config, key, float(str(np.float32(value))))
    return config


def _card_text(card: ModelCard, contents: _Contents) -> str:
    license = card.license or contents.license
    head = {"license": license.lower(), "base_model": card.base_model}
    lines = [
        "---",
        *[f"{key}: {value}" for key, value in head.items() if value],
        "---",
        f"# {card.title}",
        "",
    ]
    lines += [f"Converted by AstraFlow from {card.origin}."]
    if license:
        lines[-1] += f" License: {license}."
    types = ", ".join(f"{num} as {name}" for name, num in contents.types.most_common())
    lines += [
        "",
        f"The file stored its {contents.types.total()} tensors so: {types}. They were converted to bfloat16.",
    ]
    if contents.bits:
        lines += [
            "",
            f"The weights were rounded to {contents.bits} bits first, so this model is a little worse than "
            "the original, and its results differ from published ones.",
        ]
    return "\n".join(lines) + "\n"


@contextmanager
def _quiet() -> Generator[None]:
    """Shows progress bars only in a terminal, and keeps back the library's advice about other formats."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        if sys.stderr.isatty():
            yield
        else:
            with redirect_stderr(io.StringIO()):
                yield
    finally:
        transformers_logging.set_verbosity(verbosity)
