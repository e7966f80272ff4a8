"""LoRA adapters in a version, under PEFT's names, and the weights that they change.

If a trainer publishes adapters, its versions contain only the factors of each adapted projection,
`base_model.model.MODULE.lora_A.weight` [r, in] and `...lora_B.weight` [out, r], both in float32. The scale is
folded into B, so alpha is r for every reader. The base, which never changes, is a version of its own, which
`BASE_FILE` describes. In the snapshot that an engine loads, the base comes before the factors. The weights
that are exported are `W + B @ A`, in float32. Everything computes them with `merge_weight`, so they agree
bit for bit. This file uses only numpy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.types.host_tensors import HostTensor

__all__ = [
    "BASE_FILE",
    "adapted_names",
    "adapter_config",
    "are_adapters",
    "is_adapter",
    "merge_adapters",
    "merge_weight",
    "peft_names",
]

BASE_FILE = "adapter_base.json"
"""The file of a version that consists of adapters: the manifest of their base, without sources."""
_PREFIX = "base_model.model."
_ENDS = (".lora_A.weight", ".lora_B.weight")


def peft_names(weight: str) -> tuple[str, str]:
    """PEFT's names of the two factors of a projection; `weight` is its tensor's name, `MODULE.weight`."""
    module = weight.removesuffix(".weight")
    return _PREFIX + module + _ENDS[0], _PREFIX + module + _ENDS[1]


def is_adapter(name: str) -> bool:
    """Whether a tensor with this name is a factor of an adapter."""
    return name.startswith(_PREFIX) and name.endswith(_ENDS)


def are_adapters(names: Iterable[str]) -> bool:
    """Whether a version with these tensors consists of adapters, without the weights that they change."""
    own = list(names)
    return bool(own) and all(map(is_adapter, own))


def adapted_names(names: Iterable[str]) -> list[str]:
    """The names of the weights that the adapters among `names` change, sorted."""
    modules = {name.removeprefix(_PREFIX).rsplit(".", 2)[0] for name in names if is_adapter(name)}
    return sorted(f"{module}.weight" for module in modules)


def merge_adapters(tensors: Sequence[HostTensor], *, is_rounded: bool = False) -> tuple[HostTensor, ...]:
    """Merges a version's adapters into their weights, in float32. All other weights are returned unchanged.

    `is_rounded`: rounds the merged weights to the dtype that they have in the version.
    Raises: WeightsError if a factor or its weight is missing, or if a shape does not fit.
    """
    given = {tensor.name: tensor for tensor in tensors}
    adapted = set(adapted_names(given))
    if missing := adapted - given.keys():
        raise WeightsError(
            f"the version has adapters, but lacks weights that they change: {', '.join(sorted(missing)[:5])}"
        )
    plain: list[HostTensor] = []
    for tensor in tensors:
        if tensor.name in adapted:
            merged = merge_weight(tensor, given)
            plain.append(_round(merged, tensor.dtype) if is_rounded else merged)
        elif not is_adapter(tensor.name):
            plain.append(tensor)
    return tuple(plain)


def merge_weight(weight: HostTensor, given: Mapping[str, HostTensor]) -> HostTensor:
    """The adapted weight, `W + B @ A` in float32. For a part of the weight, the same part of the result.

    Raises: WeightsError if a factor is missing or a shape does not fit.
    """
    down, up = (given.get(name) for name in peft_names(weight.name))
    if down is None or up is None:
        raise WeightsError(f"the adapter of {weight.name} has only one of its two factors")
    is_fit = (
        len(weight.shape) == len(down.shape) == len(up.shape) == 2
        and (up.shape[0], down.shape[1]) == weight.shape
        and up.shape[1] == down.shape[0]
    )
    if not is_fit:
        raise WeightsError(
            f"the adapter of {weight.name} has shapes {down.shape} and {up.shape}; expected [r, in] and "
            f"[out, r] for a weight of shape {weight.shape}"
        )
    values = _float32(weight)
    if values.size:
        change = _float32(up).reshape(up.shape) @ _float32(down).reshape(down.shape)
        values = values + change.reshape(-1)[weight.first_idx : weight.first_idx + values.size]
    return replace(weight, dtype="float32", data=values.view(np.uint8))


def adapter_config(
    tensors: Sequence[HostTensor], *, base: str = "", scaling: tuple[float, bool] | None = None
) -> dict[str, object]:
    """The content of PEFT's `adapter_config.json` for adapters.

    `base`: folder or name of the model that they change. `scaling`: alpha, and whether PEFT scales by
    `alpha / sqrt(rank)` (rsLoRA) instead of `alpha / rank`; None means a scale of 1, since the factors of a
    version already include it.
    Raises: WeightsError if the adapters do not all have the same rank.
    """
    ranks = {tensor.shape[0] for tensor in tensors if tensor.name.endswith(_ENDS[0])}
    if len(ranks) != 1:
        raise WeightsError(f"the adapters have the ranks {sorted(ranks)}; expected one rank for all")
    rank = ranks.pop()
    alpha, is_stabilized = scaling or (rank, False)
    modules = [name.removesuffix(".weight") for name in adapted_names(t.name for t in tensors)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": is_stabilized,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "inference_mode": True,
    }


def _round(tensor: HostTensor, dtype: str) -> HostTensor:
    """Rounds a float32 tensor to another dtype, to the nearest value, ties to even."""
    values = tensor.data.view("<f4")
    if dtype == "bfloat16":
        bits = tensor.data.view("<u4")
        nearest = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype("<u2")
        values = np.where(np.isnan(values), np.uint16(0x7FC0), nearest)
    elif dtype == "float16":
        with np.errstate(over="ignore"):  # overflow becomes infinity, which engines refuse to serve
            values = values.astype("<f2")
    return replace(tensor, dtype=dtype, data=values.view(np.uint8))


def _float32(tensor: HostTensor) -> NDArray[np.float32]:
    """The tensor's elements in float32, [number of elements]."""
    if tensor.dtype == "bfloat16":  # numpy has no bfloat16, which is the upper half of a float32
        values = (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = tensor.data.view("<f2" if tensor.dtype == "float16" else "<f4").astype(np.float32)
    return values
