"""The routers of a mixture of experts: choose the experts of each token, and their weights.

Families choose experts in many ways, but compute the weights of the chosen experts by one formula with few
variants: softmax or sigmoid of the router's logits, divided by the sum over the chosen experts or not, times
a constant. Which variant a router uses is found by trying each on random inputs. So the weights of other
experts than the chosen ones can be computed, which replaying recorded choices needs.

Legend: N tokens, E experts, K chosen per token.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from astraflow.errors import DataError

__all__ = ["Router", "find_routers"]

_CLASS_NAME = re.compile(r"TopKRouter$", re.IGNORECASE)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configs."""
_PROBE_TOKENS = 7
_TOLERANCE = 1e-4
"""Largest error as a share of the largest weight; the variants differ by far more."""
_Activation = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Router:
    """One router of a model. Its module returns logits [N, E], weights [N, K] and experts [N, K]."""

    module: nn.Module
    num_experts: int
    num_chosen: int
    activation: _Activation
    is_normalized: bool
    scale: float

    def scores(self, logits: Tensor) -> Tensor:
        """The router's score of each expert, float32 [N, E]."""
        wide = logits.float()
        return wide.softmax(-1) if self.activation == "softmax" else wide.sigmoid()

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """The weights of `experts` [N, K], float32 [N, K]."""
        chosen = self.scores(logits).gather(1, experts)
        if self.is_normalized:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen * self.scale


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """Finds a model's routers, from the first layer to the last; empty if it is not a mixture of experts.

    Raises: DataError if it is a mixture of experts with unsupported routers.
    """
    modules = [module for module in model.modules() if _CLASS_NAME.search(type(module).__name__)]
    # The config belongs to transformers, and has one of these attributes or none.
    config = cast("Any", model).config
    has_experts = any(int(getattr(config, name, 0) or 0) > 1 for name in _NUM_EXPERTS)
    if has_experts and not modules:
        raise DataError(f"{type(model).__name__} is a mixture of experts, but no router was found in it")
    return tuple(_router(module) for module in modules)


@torch.no_grad()
def _router(module: nn.Module) -> Router:
    own = cast("dict[str, Tensor]", dict(module.named_parameters()))
    if next(iter(own.values())).is_meta:  # any values will do
        own = {name: torch.linspace(-1, 1, each.numel()).view(each.shape) for name, each in own.items()}
    weight = next(iter(own.values()))
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_TOKENS, weight.shape[-1], generator=generator).to(weight)
    try:
        output: Any = functional_call(module, own, (probe,))
    except TypeError as err:  # MiniMax-M2 passes it the experts' biases
        raise DataError(f"{type(module).__name__} needs more than hidden states: {err}") from err
    parts = cast("tuple[Tensor, ...]", output if isinstance(output, tuple) else (output,))
    if [part.ndim for part in parts] != [2, 2, 2]:
        raise DataError(f"{type(module).__name__} does not return logits, weights and experts")
    logits, weights, experts = parts
    sizes = {"num_experts": logits.shape[1], "num_chosen": experts.shape[1]}
    activations: tuple[_Activation, ...] = ("softmax", "sigmoid")
    for activation in activations:
        for is_normalized in (False, True):
            plain = Router(module, **sizes, activation=activation, is_normalized=is_normalized, scale=1.0)
            ours = plain.weights(logits, experts)
            scale = float(weights.float().sum() / ours.sum())
            if (weights.float() - scale * ours).abs().max() <= _TOLERANCE * weights.abs().max():
                return Router(
                    module, **sizes, activation=activation, is_normalized=is_normalized, scale=scale
                )
    raise DataError(f"{type(module).__name__} computes its weights by an unknown formula")
