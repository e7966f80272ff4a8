"""AdamW with moving averages that take less device memory: in bfloat16, in host memory, or both.

Torch's AdamW keeps them in the dtype and on the device of the weights, 8 bytes per parameter in float32.
Here, each tensor's averages are converted to float32 on the device, updated, and converted back, one
tensor after the other. The arithmetic of a step is always in float32.

In bfloat16, the average of squares is rounded to 3 digits. That is harmless as long as a step changes it by
more, which holds for decay rates up to 0.99. At 0.999 it would never change; use float32 then.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["LeanAdamW"]

_AVERAGES = ("exp_avg", "exp_avg_sq")


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with averages in `dtype`.

    Each group has `lr`, `betas`, `eps` and `weight_decay`, as in torch's AdamW, and the state has its names.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, dtype: torch.dtype, offload: bool) -> None:
        """`offload`: keeps the averages in host memory."""
        self._dtype = dtype
        self._offload = offload
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no closure
        """Updates all weights that have a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in cast("list[nn.Parameter]", group["params"]):
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = cast("dict[str, Any]", self.state[parameter])
        if not state:
            state["step"] = torch.zeros(())
            for name in _AVERAGES:
                state[name] = self.make_average(parameter)
        state["step"] += 1
        num_steps = float(state["step"])
        decay, decay_of_squares = cast("tuple[float, float]", group["betas"])
        mean, square = (state[name].to(parameter.device, torch.float32) for name in _AVERAGES)
        mean = mean.lerp(grad, 1 - decay)
        square = square.mul(decay_of_squares).addcmul_(grad, grad, value=1 - decay_of_squares)
        for name, value in zip(_AVERAGES, (mean, square), strict=True):
            state[name].copy_(value)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        spread = (square.sqrt_() / (1 - decay_of_squares**num_steps) ** 0.5).add_(group["eps"])
        parameter.addcdiv_(mean, spread, value=-group["lr"] / (1 - decay**num_steps))

    def make_average(self, parameter: nn.Parameter) -> Tensor:
        """An average of a weight, filled with zeros, with the dtype and device of the state."""
        is_pinned = self._offload and parameter.is_cuda
        device = torch.device("cpu") if self._offload else parameter.device
        return torch.zeros(parameter.shape, dtype=self._dtype, device=device, pin_memory=is_pinned)
