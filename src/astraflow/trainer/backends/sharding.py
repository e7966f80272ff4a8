"""The weights of a model by the names of its folder, whole on one rank or split over several (torch's FSDP2).

Split, every weight is cut by its first dimension, and each rank keeps its rows, their gradient and their
optimizer state. A layer is whole only while it is computed, forward or backward. Gradients are summed over
ranks, not averaged: a loss is divided by the denominator of the whole batch already.

Weights leave (`gathered`) one tensor at a time, cast before they travel. Each rank takes what it needs of a
whole tensor and drops it before the next, so that none ever has all; and one state gives the same bytes at
any number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from astraflow.errors import WeightsError
from astraflow.models.loading import FileView, file_views, listed
from astraflow.trainer.backends.recompute import layers_of
from astraflow.trainer.ranks import Ranks

__all__ = ["ModelWeights", "first_row", "local_part", "rank_device", "trained_parts"]

_LARGE_BYTES = 4 << 20
"""Where ranks on CPUs gather a tensor of this size, a second copy of it matters."""


def rank_device(device: str, rank: int) -> str:
    """The device of a rank: the named one on a CPU; on GPUs, as many further as the rank's number."""
    if not rank:
        return device
    named = torch.device(device)
    return device if named.type == "cpu" else f"{named.type}:{(named.index or 0) + rank}"


def local_part(weight: Tensor) -> Tensor:
    """The rows of a weight that this rank has, in place; all of one that is not split."""
    with torch.no_grad():
        return weight.to_local() if isinstance(weight, DTensor) else weight


def first_row(weight: Tensor, ranks: Ranks) -> int:
    """Where the rows of this rank begin."""
    if not isinstance(weight, DTensor):
        return 0
    rows = weight.shape[0]
    return min(rows, ranks.rank * -(-rows // ranks.world))  # as torch.chunk cuts


def trained_parts(model: nn.Module) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Own name of each trained parameter -> the parameter, and this rank's rows of it in the same memory."""
    found: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, parameter in cast("Any", model).named_parameters():
        if parameter.requires_grad:
            is_split = isinstance(parameter, DTensor)
            own = nn.Parameter(local_part(parameter)) if is_split else parameter
            found[name] = (parameter, own)
    return found


class ModelWeights:
    """All weights of a model. Example: `dict(ModelWeights(model, ALONE).gathered())`.

    Make it before anything replaces the parameters, and `split` the model when its computation is built.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._views: dict[str, list[FileView]] = {}
        for view in file_views(model):
            self._views.setdefault(view.weight, []).append(view)
        self._weights = self._found()

    def split(self, entry: nn.Module, device: str) -> None:
        """Leaves each rank its rows. `entry`: the module through which alone the model is called."""
        if self._ranks.world == 1:
            return
        mesh = init_device_mesh(torch.device(device).type, (self._ranks.world,))
        modules = [*layers_of(self._model), entry]
        for module in modules:
            # The outermost one too: weights that stay whole after a pass would miss what `install` writes.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            split = cast("FSDPModule", module)
            split.set_gradient_divide_factor(1.0)
            split.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        self._weights = self._found()

    @torch.no_grad()
    def gathered(
        self, keep: Callable[[str], bool] = lambda name: True, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the weights whose name in the folder is kept; views of the model's memory where
        it is not split. Every rank must call it and exhaust it, and gets all of them."""
        for own, views in self._views.items():
            kept = [view for view in views if keep(view.name)]
            weight = self._weights[own].detach()
            if not kept:
                continue
            if isinstance(weight, DTensor):
                weight = self._whole(cast("DTensor", weight if dtype is None else weight.to(dtype)))
            for view in kept:
                yield view.name, view.of(weight)

    @torch.no_grad()
    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the weights. Raises: WeightsError if the tensors are not exactly those of the model; it
        is then unchanged."""
        known = {view.name: view for views in self._views.values() for view in views}
        missing = [name for name in known if name not in tensors]
        extra = [name for name in tensors if name not in known]
        if missing or extra:
            parts = [f"missing {listed(missing)}"] if missing else []
            parts += [f"unknown {listed(extra)}"] if extra else []
            raise WeightsError(
                f"the tensors do not fit the model: {'; '.join(parts)}; is it another architecture?"
            )
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != known[name].shape:
                raise WeightsError(
                    f"tensor {name} has shape {tuple(tensor.shape)}; the model has {known[name].shape}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise WeightsError(f"tensor {name} holds values that are not finite")
        for own, views in self._views.items():
            weight = self._weights[own]
            if not isinstance(weight, DTensor):
                for view in views:
                    view.of(weight.detach()).copy_(tensors[view.name])
                continue
            whole = torch.empty(weight.shape, dtype=weight.dtype)
            for view in views:
                view.of(whole).copy_(tensors[view.name])
            rows = local_part(weight)
            first = first_row(weight, self._ranks)
            rows.copy_(whole[first : first + len(rows)])

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each weight in the folder, in the order of `gathered`."""
        return tuple((view.name, view.shape) for views in self._views.values() for view in views)

    @property
    def held_bytes(self) -> int:
        """Bytes of this rank's rows."""
        return sum({id(weight): local_part(weight).nbytes for weight in self._weights.values()}.values())

    def _whole(self, weight: DTensor) -> Tensor:
        """All rows of a weight, on every rank."""
        if weight.device.type != "cpu" or weight.numel() * weight.element_size() < _LARGE_BYTES:
            return weight.full_tensor()
        # Gloo gathers into memory of its own, and copies: this takes the tensor alone, but more messages.
        whole = torch.empty(weight.shape, dtype=weight.dtype)
        num_rows = -(-len(whole) // self._ranks.world)  # as torch.chunk cuts
        for rank in range(self._ranks.world):
            rows = whole[rank * num_rows : (rank + 1) * num_rows]
            if rank == self._ranks.rank:
                rows.copy_(weight.to_local())
            if rows.numel():
                dist.broadcast(rows.view(-1).view(torch.uint8), rank)
        return whole

    def _found(self) -> dict[str, Tensor]:
        """The weights as they are now, by the names that the model gives them."""
        parameters = dict(cast("Any", self._model).named_parameters(remove_duplicate=False))
        buffers = dict(cast("Any", self._model).named_buffers(remove_duplicate=False))
        return {name: parameters[name] if name in parameters else buffers[name] for name in self._views}
