"""The routers of a mixture of experts: which experts each token goes to, and how much each counts.

Families choose experts in many ways. What they do with those chosen is one formula with few variants: scores
of the router's logits, those of the chosen experts divided by their sum or not, times a constant. Which
variant a router computes is found by trying, so that other experts can be put in place of those it chose.

Legend: N tokens, E experts, K chosen per token.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from astraflow.errors import DataError

__all__ = ["Router", "routers_of"]

_CLASS_NAME = re.compile(r"TopKRouter$", re.IGNORECASE)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configs call the number of experts."""
_PROBE_TOKENS = 7
_TOLERANCE = 1e-4
"""As a share of the largest weight; the variants differ by far more."""
_Activation = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Router:
    """One router of a model. Its module returns logits [N, E], weights [N, K] and experts [N, K]."""

    module: nn.Module
    num_experts: int
    num_chosen: int
    activation: _Activation
    is_normalised: bool
    scale: float

    def scores(self, logits: Tensor) -> Tensor:
        """[N, E], float32: what the router thinks of each expert."""
        wide = logits.float()
        return wide.softmax(-1) if self.activation == "softmax" else wide.sigmoid()

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """[N, K], float32: how much each of some experts [N, K] counts."""
        chosen = self.scores(logits).gather(1, experts)
        if self.is_normalised:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen * self.scale


def routers_of(model: nn.Module) -> tuple[Router, ...]:
    """The routers of a model, from the first layer to the last; empty if it is not a mixture of experts.

    Raises: DataError if it is a mixture of experts with unsupported routers.
    """
    modules = [module for module in model.modules() if _CLASS_NAME.search(type(module).__name__)]
    # A foreign config: it has one of these names, or none.
    config = cast("Any", model).config
    has_experts = any(int(getattr(config, name, 0) or 0) > 1 for name in _NUM_EXPERTS)
    if has_experts and not modules:
        raise DataError(f"{type(model).__name__}: no module that chooses experts was found")
    return tuple(_router(module) for module in modules)


@torch.no_grad()
def _router(module: nn.Module) -> Router:
    weight = cast("Tensor", next(module.parameters()))
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_TOKENS, weight.shape[-1], generator=generator).to(weight)
    found: Any = module(probe)
    parts = cast("tuple[Tensor, ...]", found if isinstance(found, tuple) else (found,))
    if [part.ndim for part in parts] != [2, 2, 2]:
        raise DataError(f"{type(module).__name__} does not return logits, weights and experts")
    logits, weights, experts = parts
    sizes = {"num_experts": logits.shape[1], "num_chosen": experts.shape[1]}
    activations: tuple[_Activation, ...] = ("softmax", "sigmoid")
    for activation in activations:
        for is_normalised in (False, True):
            plain = Router(module, **sizes, activation=activation, is_normalised=is_normalised, scale=1.0)
            ours = plain.weights(logits, experts)
            scale = float(weights.float().sum() / ours.sum())
            if (weights.float() - scale * ours).abs().max() <= _TOLERANCE * weights.abs().max():
                return Router(
                    module, **sizes, activation=activation, is_normalised=is_normalised, scale=scale
                )
    raise DataError(f"{type(module).__name__}: its weights follow from its logits by no formula known here")
