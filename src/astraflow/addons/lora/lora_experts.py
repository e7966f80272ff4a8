"""LoRA on the experts of a mixture, which are fused into single parameters of their layer.

In a model folder and in a version, the experts are separate weights [out, in]. Each gets its own factors;
those of a parameter's P weights are stored together, A [P, r, in] and B [P, out, r]. During the computation
of the experts, `W + scale * B A` replaces the parameter, so their weights then exist twice.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from astraflow.models.file_layout import FileView, file_views

__all__ = ["FusedWeight", "adapt_experts", "fused_weights"]


@dataclass(frozen=True, slots=True)
class FusedWeight:
    """A parameter that contains several weights of a model folder, consecutively in memory."""

    module: nn.Module
    own: str
    """The parameter's name in the module."""
    parts: tuple[str, ...]
    """Names of the weights in the folder."""
    shape: tuple[int, int]
    """Shape of each weight, [out, in]."""

    @property
    def projections(self) -> set[str]:
        """The last names of the projections, e.g. {"gate_proj", "up_proj"}."""
        return {part.removesuffix(".weight").rpartition(".")[2] for part in self.parts}


def fused_weights(model: nn.Module) -> dict[str, FusedWeight]:
    """The name of each fused parameter in the model -> its weights. Parameters whose weights are transposed
    or interleaved in memory are excluded."""
    views: dict[str, list[FileView]] = {}
    for view in file_views(model):
        views.setdefault(view.weight, []).append(view)
    weights: dict[str, FusedWeight] = {}
    for name, several in views.items():
        parts = sorted(several, key=lambda view: view.offset)
        shape = parts[0].shape
        if len(parts) == 1 or len(shape) != 2:
            continue
        places = [(shape, (shape[1], 1), idx * shape[0] * shape[1]) for idx in range(len(parts))]
        if [(view.shape, view.stride, view.offset) for view in parts] == places:
            path, _, own = name.rpartition(".")
            names = tuple(view.name for view in parts)
            weights[name] = FusedWeight(model.get_submodule(path), own, names, (shape[0], shape[1]))
    return weights


def adapt_experts(
    module: nn.Module, weights: Sequence[FusedWeight], rank: int, scale: float, random: torch.Generator
) -> Mapping[str, FusedWeight]:
    """Adds factors to a module's fused weights. Returns the name of the factors in the module -> the
    weight."""
    adapted: dict[str, FusedWeight] = {}
    for idx, weight in enumerate(weights):
        num = len(weight.parts)
        height, width = weight.shape
        own = module.get_parameter(weight.own)
        device = "cpu" if own.is_meta else own.device
        factors = nn.Module()
        down = (2 * torch.rand(num, rank, width, generator=random) - 1) * width**-0.5
        factors.register_parameter("lora_A", nn.Parameter(down.to(device)))
        factors.register_parameter("lora_B", nn.Parameter(torch.zeros(num, height, rank, device=device)))
        module.add_module(f"factors_{idx}", factors)
        adapted[f"factors_{idx}"] = weight
    foreign = cast("Any", module)
    foreign.forward = partial(_forward_adapted, module, foreign.forward, adapted, scale)
    return adapted


def _forward_adapted(
    module: nn.Module,
    forward: Any,
    adapted: Mapping[str, FusedWeight],
    scale: float,
    *args: Any,
    **kwargs: Any,
) -> Any:
    changed: dict[str, Tensor] = {}
    for name, weight in adapted.items():
        factors = module.get_submodule(name)
        plain = module.get_parameter(weight.own)
        change = factors.get_parameter("lora_B") @ factors.get_parameter("lora_A")
        changed[weight.own] = plain + scale * change.view(plain.shape)
    with _replaced_parameters(module, changed):
        return forward(*args, **kwargs)


@contextmanager
def _replaced_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Generator[None]:
    """Replaces parameters of a module within this context. (`torch.func.functional_call` would call the
    module, whose forward uses this, and recurse.)"""
    parameters = cast("dict[str, Any]", module._parameters)  # pyright: ignore[reportPrivateUsage]
    originals = {name: parameters[name] for name in tensors}
    parameters.update(tensors)
    try:
        yield
    finally:
        parameters.update(originals)
