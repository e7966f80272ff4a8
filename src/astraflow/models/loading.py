"""Hugging Face causal language models: loads them, builds them empty, fills them from and exports them to
host tensors.

This file owns the mapping between a model's parameters and `HostTensor`s. Tensors have Hugging Face names,
and a tied weight occurs once. Values are bit-exact if the dtypes agree, and are rounded to the model's dtype
if not. All tensors are checked before the first byte is written, so tensors that do not fit leave the model
unchanged.
"""

import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from astraflow.errors import DataError, UnfitVersionError, WeightsError
from astraflow.models.adapters import adapted_names, is_adapter, merge_weight, peft_names
from astraflow.models.file_layout import adopt_layout, quiet_loading, rest_of, tied_names, weights_by_name
from astraflow.models.hub import model_path
from astraflow.models.images import reads_images
from astraflow.models.model_folder import check_model_folder
from astraflow.models.weight_files import weight_paths
from astraflow.types.host_tensors import HostTensor
from astraflow.user_input.user_files import json_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "DTYPES",
    "DtypeName",
    "FittedTensors",
    "build_model",
    "check_tensors",
    "empty_causal_lm",
    "export_tensors",
    "file_tensors",
    "fit_tensors",
    "format_names",
    "host_tensor",
    "host_view",
    "install_tensors",
    "is_finite",
    "load_causal_lm",
    "torch_tensor",
]

DtypeName = Literal["float32", "float16", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BUILD_LOCK = threading.Lock()
"""Allows one build at a time: transformers skips initialization by patching torch for the whole process."""
_MAX_LISTED = 5
"""Largest number of names that an error message lists; it counts the others."""


def load_causal_lm(
    path_or_name: str | Path, *, dtype: DtypeName = "float32", device: str = "cpu"
) -> "PreTrainedModel":
    """Loads a causal language model from a folder, or from the cache for a hub name, in eval mode.

    Raises: DataError if the folder is missing, or its files are not exactly the model's weights.
    """
    folder = model_path(str(path_or_name))
    _check_folder(folder)
    try:
        names = check_model_folder(folder)
    except DataError as err:
        raise DataError(f"model folder {folder}: {err}") from err
    try:
        config = _config(folder)
        auto = _auto_class(config)
        with quiet_loading():
            model: Any = auto.from_pretrained(str(folder), dtype=DTYPES[dtype], use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as err:
        raise DataError(
            f"model folder {folder} does not load as a causal language model: {_first_line(err)}"
        ) from err
    model.folder_config = config
    files = file_tensors(weight_paths(folder), names or ())
    adopt_layout(model, files)
    _check_loaded(folder, model, files)
    return cast("PreTrainedModel", model.to(device).eval())


def _check_loaded(folder: Path, model: "PreTrainedModel", files: Mapping[str, Tensor]) -> None:
    """Checks the values, which the check of the folder reads only for small models. Raises: DataError."""
    for name, weight in weights_by_name(model):
        if not is_finite(weight):
            raise DataError(
                f"model folder {folder}: its tensor {name} has values that are not finite; the file is "
                "damaged, or the training that wrote it had diverged"
            )
        if name in files and not torch.equal(files[name].to(weight.dtype), weight):
            raise DataError(
                f"model folder {folder}: transformers loads its tensor {name} to another place than it saves "
                "it from, so versions would differ from the folder; use another version of transformers"
            )


def empty_causal_lm(
    model_dir: Path, *, dtype: DtypeName = "float32", device: str = "cpu"
) -> "PreTrainedModel":
    """Builds a model from `model_dir/config.json`, in eval mode, with uninitialized weights.

    Weights in the folder are ignored. On `meta`, parameters have no memory, and buffers have their values, on
    the CPU.
    Raises: DataError if the folder or its config is missing, or if transformers does not support the config.
    """
    _check_folder(model_dir)
    try:
        model = build_model(model_dir, dtype=dtype, device="cpu")
    except DataError as err:
        raise DataError(f"model folder {model_dir}: {err}") from err
    if device == "meta":
        _drop_parameters(model)  # nothing was written, so the system has given them no memory
        model.tie_weights()
        return model
    return cast("Any", model).to(device)


def build_model(model_dir: Path, *, dtype: DtypeName, device: str) -> "PreTrainedModel":
    """Builds a model like `empty_causal_lm`. On `meta`, not even buffers have memory.

    Raises: DataError if its config or its generation config is not that of a causal language model.
    """
    from transformers import GenerationConfig
    from transformers.initialization import no_init_weights

    try:
        config = _config(model_dir)
        with _BUILD_LOCK, no_init_weights(), torch.device(device):
            model = _auto_class(config).from_config(config, dtype=DTYPES[dtype])
        model.folder_config = config
        model.tie_weights()  # part of the initialization, which was skipped
        if (model_dir / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(model_dir))
    except DataError:
        raise
    except Exception as err:  # a damaged config may break their code anywhere
        raise DataError(
            "its config.json is not a causal language model known to transformers, or its "
            f"generation_config.json is damaged: {_first_line(err)}"
        ) from err
    return model.eval()


def _drop_parameters(model: nn.Module) -> None:
    """Moves all parameters to `meta`, and no buffers."""
    for module in model.modules():
        for name, own in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(own.to("meta")))


def _config(folder: Path) -> Any:
    """Raises: DataError if only code in the folder could read it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    content = json_object(folder / "config.json")
    if "auto_map" in content and content.get("model_type") not in cast("Any", CONFIG_MAPPING):
        raise DataError(
            f"the class of its family {content.get('model_type')!r} is code in the folder (auto_map in "
            "config.json), which is never run; use a model whose family transformers has, or a newer "
            "transformers"
        )
    return cast("Any", AutoConfig).from_pretrained(str(folder), trust_remote_code=False)


def _auto_class(config: Any) -> Any:
    """The class that loads a model: the whole model if its images are supported, or if transformers cannot
    load its text model alone.

    Raises: DataError if transformers has no class of its family that generates text.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    mappings: Any = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    if not any(type(config) in mapping for mapping in mappings):
        raise DataError(
            f"the family {config.model_type} has no class in transformers that generates text, and code in "
            "the folder is never run; use a model of another family, or a newer transformers"
        )
    if reads_images(config.to_dict()) or type(config) not in cast("Any", MODEL_FOR_CAUSAL_LM_MAPPING):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(
            f"model folder {folder} does not exist; pass a Hugging Face folder, or build one with "
            "`astraflow model init`"
        )
    if not (folder / "config.json").is_file():
        names = sorted(p.name for p in folder.iterdir())[:_MAX_LISTED]
        raise DataError(f"model folder {folder} has no config.json (found: {', '.join(names) or 'nothing'})")


def _first_line(err: BaseException) -> str:
    return (str(err).strip() or type(err).__name__).splitlines()[0]


def file_tensors(paths: Iterable[Path], names: Collection[str] = ()) -> dict[str, Tensor]:
    """The tensors of safetensors files by name, or those named: views of the files, which take no memory.

    Raises: DataError if a file is broken.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    wanted = frozenset(names)
    for path in paths:
        try:
            with cast("Any", safe_open)(str(path), "pt") as file:
                own: list[str] = file.keys()
                tensors |= {name: file.get_tensor(name) for name in own if not wanted or name in wanted}
        except (OSError, SafetensorError) as err:
            raise DataError(f"{path}: {err}") from err
    return tensors


def host_tensor(name: str, tensor: Tensor) -> HostTensor:
    """Copies a tensor to host memory. Raises: WeightsError if its dtype is not in `DTYPES`."""
    return host_view(name, tensor.detach().to("cpu", copy=True).contiguous())


def host_view(name: str, tensor: Tensor) -> HostTensor:
    """A view of a contiguous tensor in host memory. Raises: WeightsError if its dtype is not in `DTYPES`."""
    if tensor.dtype not in _DTYPE_NAMES:
        raise WeightsError(f"tensor {name} has dtype {tensor.dtype}; expected one of {', '.join(DTYPES)}")
    flat = tensor.reshape(-1)
    data = cast("NDArray[np.uint8]", flat.view(torch.uint8).numpy())
    return HostTensor(name=name, shape=tuple(tensor.shape), dtype=_DTYPE_NAMES[tensor.dtype], data=data)


def torch_tensor(tensor: HostTensor) -> Tensor:
    """The tensor's values as a torch tensor in host memory. Shares the bytes if torch supports their layout.

    Raises: WeightsError if the bytes do not fit shape and dtype.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise WeightsError(
            f"tensor {tensor.name} has dtype {tensor.dtype!r}; expected one of {', '.join(DTYPES)}"
        )
    expected = math.prod(tensor.shape) * dtype.itemsize
    if tensor.data.nbytes != expected:
        raise WeightsError(
            f"tensor {tensor.name}: {tensor.data.nbytes} bytes for shape {tensor.shape} of {tensor.dtype}, "
            f"which needs {expected}"
        )
    data = tensor.data
    if not data.flags.writeable or not data.flags.c_contiguous or data.ctypes.data % dtype.itemsize:
        data = np.array(data, dtype=np.uint8, order="C")  # torch accepts only writable, aligned memory
    return torch.from_numpy(data.reshape(-1)).view(dtype).reshape(tensor.shape)


def export_tensors(model: nn.Module) -> tuple[HostTensor, ...]:
    """Copies of `weights_by_name` and of the rest of the model's folder, in host memory."""
    rest = [(name, tensor) for name, tensor in rest_of(model).items() if not tensor.is_meta]
    return tuple(host_tensor(name, tensor) for name, tensor in [*weights_by_name(model), *rest])


@dataclass(frozen=True, slots=True)
class FittedTensors:
    """Tensors that were checked against one model. `install` copies them and cannot fail halfway."""

    pairs: tuple[tuple[Tensor, Tensor], ...]
    """Each pair is one of the model's tensors, and all of its new values in host memory."""
    patches: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
    """Each triple is one of the model's tensors (flat), positions in it, and the new values there."""
    is_partial: bool = False
    """True if weights that are in neither `pairs` nor `patches` already have the right values."""

    @torch.no_grad()
    def install(self) -> None:
        """Overwrites the model's weights in place."""
        for own, new in self.pairs:
            own.copy_(new)
        for own, positions, new in self.patches:
            own[positions.to(own.device)] = new.to(own)


def fit_tensors(
    model: nn.Module,
    tensors: Iterable[HostTensor],
    *,
    changed: Mapping[str, NDArray[np.int64]] | None = None,
) -> FittedTensors:
    """Checks that tensors are exactly the model's weights: every name once, right shapes, finite values.

    The model is not changed. Adapters among the tensors are merged into their weights. A tied weight may
    occur under any or all of its names, as in real safetensors files; the values must then agree. The model
    takes over the tensors' names, and ignores the rest of their folder (see `file_layout`). `changed`:
    set this if the model holds a version that was checked before, and differs from `tensors` at most at these
    flat positions of the named tensors. Then nothing else is read or written.
    Raises: UnfitVersionError that names the tensors at fault.
    """
    given = _by_name(tensors)
    adapted = set(adapted_names(given))
    weights = _adopted(model, given)
    known = {name for names, _ in weights for name in names} | rest_of(model).keys()
    extra = [name for name in given if name not in known and not is_adapter(name)]
    extra += adapted - given.keys()
    missing = [names[0] for names, _ in weights if not any(name in given for name in names)]
    if extra or missing:
        parts = [f"missing {format_names(missing)}"] if missing else []
        parts += [f"unknown {format_names(extra)}"] if extra else []
        raise UnfitVersionError(
            f"the tensors do not fit the model: {'; '.join(parts)}; are they of another architecture?"
        )
    pairs: list[tuple[Tensor, Tensor]] = []
    patches: list[tuple[Tensor, Tensor, Tensor]] = []
    for names, own in weights:
        aliases = [given[name] for name in names if name in given]
        if changed is not None and len(aliases) == 1 and own.is_contiguous():
            _check_shape(aliases[0], own)
            touched = {aliases[0].name, *(peft_names(aliases[0].name) if aliases[0].name in adapted else ())}
            if not touched & changed.keys():
                continue
            if aliases[0].name not in adapted:
                patches.append((own.data.view(-1), *_check_values_at(aliases[0], changed[aliases[0].name])))
                continue
        aliases = [merge_weight(t, given) if t.name in adapted else t for t in aliases]
        new = _check_values(aliases[0], own)
        for alias in aliases[1:]:
            if not torch.equal(_check_values(alias, own), new):
                raise UnfitVersionError(
                    f"tied weights {aliases[0].name} and {alias.name} differ in their values"
                )
        # Merged weights take new memory until `install`, so they are converted to the model's dtype.
        pairs.append((own, new.to(own.dtype) if aliases[0].name in adapted else new))
    return FittedTensors(tuple(pairs), tuple(patches), is_partial=changed is not None)


def _adopted(model: nn.Module, given: Mapping[str, HostTensor]) -> list[tuple[list[str], Tensor]]:
    """The model's weights by the names among the given tensors, if it can have these."""
    weights = tied_names(model)
    plain = {name: tensor.shape for name, tensor in given.items() if not is_adapter(name)}
    known = {name for names, _ in weights for name in names} | rest_of(model).keys()
    if plain.keys() <= known and all(plain.keys() & set(names) for names, _ in weights):
        return weights
    empty = {name: torch.empty(shape, device="meta") for name, shape in plain.items()}
    adopt_layout(cast("PreTrainedModel", model), empty)
    return tied_names(model)


def check_tensors(tensors: Mapping[str, Tensor], known: Mapping[str, tuple[int, ...]]) -> None:
    """Raises: WeightsError unless the tensors have exactly the known names and shapes, and are finite."""
    missing = [name for name in known if name not in tensors]
    extra = [name for name in tensors if name not in known]
    if missing or extra:
        parts = [f"missing {format_names(missing)}"] if missing else []
        parts += [f"unknown {format_names(extra)}"] if extra else []
        raise WeightsError(
            f"the tensors do not fit the model: {'; '.join(parts)}; is it another architecture?"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != known[name]:
            raise WeightsError(f"tensor {name} has shape {tuple(tensor.shape)}; the model has {known[name]}")
        if not is_finite(tensor):
            raise WeightsError(f"tensor {name} has values that are not finite")


def install_tensors(model: nn.Module, tensors: Iterable[HostTensor]) -> None:
    """Checks tensors against the model and installs them.

    Raises: WeightsError if they do not fit; the model is then unchanged.
    """
    fit_tensors(model, tensors).install()


def _check_values(tensor: HostTensor, own: Tensor) -> Tensor:
    """Returns the new values of one of the model's tensors, after checking that shape and values are
    valid."""
    _check_shape(tensor, own)
    new = torch_tensor(tensor)
    _check_finite(tensor, new)
    return new


def _check_values_at(tensor: HostTensor, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Returns the positions, and a copy of the new values there after checking that they are finite."""
    idx = torch.from_numpy(positions)
    new = torch_tensor(tensor).view(-1)[idx]
    _check_finite(tensor, new)
    return idx, new


def _check_shape(tensor: HostTensor, own: Tensor) -> None:
    if tensor.shape != tuple(own.shape):
        raise UnfitVersionError(
            f"tensor {tensor.name} has shape {tensor.shape}; the model has {tuple(own.shape)}"
        )


def _check_finite(tensor: HostTensor, new: Tensor) -> None:
    if not is_finite(new):
        bad = int((~torch.isfinite(new)).sum())
        raise UnfitVersionError(f"tensor {tensor.name} holds {bad} values that are not finite")


def is_finite(tensor: Tensor) -> bool:
    # One pass without a copy: the extremes are NaN or infinite if any value is.
    return not tensor.numel() or all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))


def _by_name(tensors: Iterable[HostTensor]) -> dict[str, HostTensor]:
    given: dict[str, HostTensor] = {}
    for tensor in tensors:
        if tensor.name in given:
            raise UnfitVersionError(f"tensor {tensor.name} is given twice")
        given[tensor.name] = tensor
    return given


def format_names(names: Sequence[str]) -> str:
    """Formats names for a message: the first few, and the number of the others."""
    listing = ", ".join(names[:_MAX_LISTED])
    return listing if len(names) <= _MAX_LISTED else f"{listing} and {len(names) - _MAX_LISTED} more"
