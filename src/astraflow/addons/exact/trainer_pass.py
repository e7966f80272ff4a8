"""Computes a trainer's logprobs so that they are bitwise equal to its engine's.

They replace the logprobs of the usual pass, from which they differ by rounding. The gradient comes from the
usual pass, whose kernels may sum in any order.
"""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astraflow.addons.exact.model import InvariantModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from astraflow.trainer.torch.packed_rows import LayoutTensors

__all__ = ["InvariantLogprobs"]


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, usual: Tensor, value: Tensor) -> Tensor:
        del ctx, usual
        return value.clone()  # autograd takes ownership of the returned tensor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        del ctx
        return grad_outputs[0], None


class InvariantLogprobs:
    """Computes logprobs that are bit-identical to the engine's. The gradient comes from the usual pass.

    Raises: DataError if exactness is not guaranteed for the model or on this machine.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = InvariantModel(model)

    @torch.no_grad()
    def compute(self, packed: "LayoutTensors", temperatures: NDArray[np.float32]) -> Tensor:
        """Returns logprobs [P] of the trained tokens at the temperatures [P].

        The layout must not share prefixes.
        """
        starts = np.flatnonzero(packed.position_ids.numpy() == 0)
        lengths = [int(length) for length in np.diff(starts, append=len(packed.token_ids))]
        hidden = self._model.sequences(packed.token_ids, lengths).index_select(0, packed.predict_idx)
        # Like the engine: the reciprocal in float32, then a multiplication.
        inverse = torch.from_numpy(np.float32(1) / temperatures)
        targets = packed.target_ids if packed.target_ids.ndim == 1 else packed.target_ids[:, 0]
        return self._model.logprobs(hidden, targets, inverse)

    def with_gradient(self, value: Tensor, usual: Tensor) -> Tensor:
        """Returns `value`, which equals `usual` up to rounding, with the gradient of `usual`.

        If `usual` [P, 1 + K] has the logprobs of other tokens too, they stay as they are.
        """
        if usual.ndim > 1:
            value = torch.cat((value[:, None], usual[:, 1:].detach()), 1)
        return cast("Tensor", _WithValue.apply(usual, value))
