"""The logprobs of a trainer that are those of its engine, bit for bit (`models.invariant`).

They take the place of the usual pass's logprobs, from which they differ by rounding. The gradient is that of
the usual pass: its kernels may sum as they like.
"""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astraflow.models.invariant import InvariantModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from astraflow.trainer.torch.forward import LayoutTensors

__all__ = ["InvariantLogprobs", "with_value"]


class InvariantLogprobs:
    """Raises: DataError if it is not promised for the model, or on this machine."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = InvariantModel(model)

    @torch.no_grad()
    def of(self, packed: "LayoutTensors", temperatures: NDArray[np.float32]) -> Tensor:
        """Logprobs [P] of the trained tokens, at the temperatures [P]. The layout must share nothing."""
        starts = np.flatnonzero(packed.position_ids.numpy() == 0)
        lengths = [int(length) for length in np.diff(starts, append=len(packed.token_ids))]
        hidden = self._model.sequences(packed.token_ids, lengths).index_select(0, packed.predict_idx)
        # The engine divides in float32 as well, and then multiplies.
        inverse = torch.from_numpy(np.float32(1) / temperatures)
        return self._model.logprobs(hidden, packed.target_ids, inverse)


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, usual: Tensor, value: Tensor) -> Tensor:
        del ctx, usual
        return value.clone()  # autograd takes what is returned as its own

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        del ctx
        return grad_outputs[0], None


def with_value(usual: Tensor, value: Tensor) -> Tensor:
    """`value`, which is `usual` but for rounding, with the gradient of `usual`."""
    return cast("Tensor", _WithValue.apply(usual, value))
