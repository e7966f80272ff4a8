"""RMS norms with a handwritten backward pass.

As models implement it, the norm takes six operations and its derivative a dozen more, each a pass over
memory. In a small model on a CPU, that is a fifth of a training step. A trial shows which norms compute the
same as ours; all others stay unchanged.

Legend: D dimension of the normalized vector.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["replace_norms", "rms_norm"]

_log = logging.getLogger(__name__)
_PROBE_ROWS = 3
_TOLERANCE = 1e-5


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True).add_(eps))
        unit = hidden * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        (grad,) = grad_outputs
        unit, scale, weight = cast("tuple[Tensor, Tensor, Tensor]", ctx.saved_tensors)
        product = grad * unit
        grad_weight = product.reshape(-1, len(weight)).sum(0)
        along = product.mul_(weight).mean(-1, keepdim=True)
        grad_hidden = torch.addcmul(grad * weight, unit, along, value=-1).mul_(scale)
        return grad_hidden, grad_weight, None


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden / sqrt(mean(hidden^2) + eps) * weight, with the mean over the last dimension.

    Shapes: hidden [..., D], weight [D]; float32. Gradient: through both, once.
    Source: Zhang and Sennrich 2019 (arXiv:1910.07467), eq. 4.
    """
    return cast("Tensor", _RmsNorm.apply(hidden, weight, eps))


def replace_norms(model: nn.Module) -> int:
    """Replaces the forward of every norm that computes `rms_norm`. Returns their number."""
    num_replaced = 0
    for module in model.modules():
        eps = _eps_of(module)
        if eps is not None and _is_rms_norm(module, eps):
            module.forward = partial(_forward, module, module.forward, eps)
            num_replaced += 1
    _log.info("%s: %d norms use the handwritten backward pass", type(model).__name__, num_replaced)
    return num_replaced


def _forward(module: Any, original: Callable[[Tensor], Tensor], eps: float, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != torch.float32:
        return original(hidden_states)
    return rms_norm(hidden_states, module.weight, eps)


def _eps_of(module: nn.Module) -> float | None:
    """The number added under the root, if the module looks like an RMS norm in float32."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if weight is None or len(parameters) != 1 or not type(module).__name__.endswith("RMSNorm"):
        return None
    if weight.ndim != 1 or weight.dtype != torch.float32:
        return None
    # A third-party class: norms that use another attribute name stay unchanged.
    eps = getattr(module, "variance_epsilon", None)
    return eps if isinstance(eps, float) else None


@torch.no_grad()
def _is_rms_norm(module: Any, eps: float) -> bool:
    # Not with its own weight, which may have no values yet.
    weight = torch.linspace(0.5, 1.5, len(module.weight))
    probe = torch.linspace(-1, 2, _PROBE_ROWS * len(weight)).view(_PROBE_ROWS, -1)
    theirs = cast("Tensor", functional_call(module, {"weight": weight}, (probe,)))
    ours = rms_norm(probe, weight, eps)
    return bool(torch.allclose(theirs, ours, rtol=_TOLERANCE, atol=_TOLERANCE))
