"""Records which experts a mixture of experts chose for the tokens of a decoding step."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from astraflow.addons.experts.routers import find_routers
from astraflow.types import Stream
from astraflow.types.token_columns import EXPERTS_STREAM
from astraflow.wire import ColumnType, column

__all__ = ["ExpertRecorder"]

_MOST_IN_A_BYTE = 256


class ExpertRecorder:
    """Records the choices of a model's routers. `width` is 0 for a model without experts.

    Example: after a decoding step of 3 rows, `recorder.last()` has the shape [3, layers x experts per token].
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises: DataError if the model's routers are of an unknown kind."""
        routers = find_routers(model)
        self.width = sum(router.num_chosen for router in routers)
        self.dtype: ColumnType = "uint8"
        if max((router.num_experts for router in routers), default=0) > _MOST_IN_A_BYTE:
            self.dtype = "int32"
        self._chosen: list[Tensor] = [torch.empty(0)] * len(routers)
        for idx, router in enumerate(routers):
            router.module.register_forward_hook(self._make_hook(idx))

    def last(self) -> NDArray[Any]:
        """[N, width] the experts of the tokens of the last forward pass, layer after layer."""
        chosen = torch.cat(self._chosen, dim=-1)
        return chosen.to(torch.uint8 if self.dtype == "uint8" else torch.int32).cpu().numpy()

    def stream(self, entries: NDArray[Any]) -> Stream:
        """Makes the column of a completion from its entries [T, width]."""
        return Stream(
            name=EXPERTS_STREAM,
            dtype=self.dtype,
            data=column(np.ravel(entries), self.dtype),
            width=self.width,
        )

    def _make_hook(self, idx: int) -> Any:
        def note(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            del module, args
            self._chosen[idx] = output[2]

        return note
