"""The weights of a model by the names of its folder, whole on one rank or split over several (torch's FSDP2).

Split, every weight is cut by its first dimension, and each rank keeps its rows, their gradient and their
optimizer state. A layer is whole only while it is computed, forward or backward. Gradients are summed over
ranks, not averaged: a loss is divided by the denominator of the whole batch already. Where `train.shard` asks
for it, layers are cut before that (`tensor_parallel`), and rows are those of a rank's part of a weight; or
there are several copies of it all.

Weights leave (`gathered`) one tensor at a time, cast before they travel. Each rank takes what it needs of a
whole tensor and drops it before the next, so that none ever has all; and one state gives the same bytes at
any number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from astraflow.errors import WeightsError
from astraflow.models.loading import FileView, file_views, listed
from astraflow.trainer.torch.parallel.grid import RankGrid
from astraflow.trainer.torch.parallel.recompute import layers_of
from astraflow.trainer.torch.parallel.tensor_parallel import Cuts, cut_layers

__all__ = ["ModelWeights", "TrainedPart", "local_part", "rank_device"]

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


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """A trained parameter, and what this rank has of it."""

    parameter: nn.Parameter
    own: nn.Parameter
    """This rank's part, in the same memory; the parameter itself if it is not split by rows."""
    row: int = 0
    """Where the part begins in the whole weight, along its first dimension."""
    column: int = 0
    """And along its second."""
    is_first: bool = True
    """Whether no rank before this one has the same part: of several, one counts and is saved."""
    is_shared: bool = False
    """Whether the ranks that compute a batch together all have the part."""
    is_partial: bool = False
    """Whether each of these then finds a part of its gradient; else each finds all of it."""


class ModelWeights:
    """All weights of a model. Example: `dict(ModelWeights(model, RankGrid(ALONE, ALONE)).gathered())`.

    Make it before anything replaces the parameters, and `split` the model when its computation is built.
    """

    def __init__(self, model: nn.Module, grid: RankGrid) -> None:
        self._model = model
        self.grid = grid
        self._cuts = Cuts({})
        self._views: dict[str, list[FileView]] = {}
        for view in file_views(model):
            self._views.setdefault(view.weight, []).append(view)
        self._weights = self._found()

    def split(self, entry: nn.Module) -> None:
        """Leaves each rank its part. `entry`: the module through which alone the model is called.

        Raises: ConfigError if the model's layers cannot be cut as `train.shard` says.
        """
        if self.grid.tensor > 1:
            self._cuts = cut_layers(self._model, self.grid)
        if self.grid.mesh is not None:
            modules = [*layers_of(self._model), entry]
            for module in modules:
                # The outermost one too: weights left whole by a pass would miss what `install` writes.
                fully_shard(module, mesh=self.grid.mesh, reshard_after_forward=True)
                split = cast("FSDPModule", module)
                split.set_gradient_divide_factor(1.0)
                split.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        self._weights = self._found()

    def trained_parts(self) -> dict[str, TrainedPart]:
        """What this rank has of each trained parameter, by the parameter's own name. Call it when the model
        is split."""
        found: dict[str, TrainedPart] = {}
        for name, parameter in cast("Any", self._model).named_parameters():
            if parameter.requires_grad:
                is_split = isinstance(parameter, DTensor)
                is_cut = name in self._cuts.dims
                row, column = self._place_of(name, parameter)
                found[name] = TrainedPart(
                    parameter=parameter,
                    own=nn.Parameter(local_part(parameter)) if is_split else parameter,
                    row=row,
                    column=column,
                    is_first=not self.grid.copy and (is_cut or not self.grid.place),
                    is_shared=self.grid.tensor * self.grid.context > 1 and not is_cut,
                    is_partial=self.grid.context > 1 or name in self._cuts.partial,
                )
        return found

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
            dim = self._cuts.dims.get(own)
            if dtype is not None and (isinstance(weight, DTensor) or dim is not None):
                weight = weight.to(dtype)
            if isinstance(weight, DTensor):
                weight = self._whole(weight)
            if dim is not None:
                weight = self._joined(weight, dim)
            for view in kept:
                yield view.name, view.of(weight)

    @torch.no_grad()
    def install(self, tensors: Mapping[str, Tensor], keep: Callable[[str], bool] = lambda name: True) -> None:
        """Overwrites the weights whose name in the folder is kept.

        Raises: WeightsError if the tensors are not exactly these; the model is then unchanged.
        """
        known = {view.name: view for views in self._views.values() for view in views if keep(view.name)}
        _check_fits(tensors, known)
        for own, views in self._views.items():
            if not any(view.name in known for view in views):
                continue
            weight = self._weights[own]
            dim = self._cuts.dims.get(own)
            if not isinstance(weight, DTensor) and dim is None:
                for view in views:
                    view.of(weight.detach()).copy_(tensors[view.name])
                continue
            shape = list(weight.shape)
            if dim is not None:
                shape[dim] *= self.grid.tensor
            whole = torch.empty(shape, dtype=weight.dtype)
            for view in views:
                view.of(whole).copy_(tensors[view.name])
            part = local_part(weight)
            row, column = self._place_of(own, weight)
            rows = whole[row : row + len(part)]
            part.copy_(rows[:, column : column + part.shape[1]] if part.ndim > 1 else rows)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each weight in the folder, in the order of `gathered`."""
        return tuple((view.name, view.shape) for views in self._views.values() for view in views)

    @property
    def held_bytes(self) -> int:
        """Bytes of this rank's rows."""
        return sum({id(weight): local_part(weight).nbytes for weight in self._weights.values()}.values())

    def _whole(self, weight: DTensor) -> Tensor:
        """All rows of a weight, or of this rank's part of it, on every rank."""
        if weight.device.type != "cpu" or weight.numel() * weight.element_size() < _LARGE_BYTES:
            return weight.full_tensor()
        # Gloo gathers into memory of its own, and copies: this takes the tensor alone, but more messages.
        whole = torch.empty(weight.shape, dtype=weight.dtype)
        num_rows = -(-len(whole) // self.grid.num_parts)  # as torch.chunk cuts
        for part in range(self.grid.num_parts):
            rows = whole[part * num_rows : (part + 1) * num_rows]
            if part == self.grid.part:
                rows.copy_(weight.to_local())
            if rows.numel():
                data = rows.view(-1).view(torch.uint8)
                dist.broadcast(data, group=self.grid.part_group, group_src=part)
        return whole

    def _joined(self, weight: Tensor, dim: int) -> Tensor:
        """The whole weight from the parts of the ranks that compute a batch together."""
        data = weight.contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.grid.tensor)]
        dist.all_gather(parts, data, group=self.grid.place_group)
        return torch.cat([part.view(weight.dtype).view(weight.shape) for part in parts], dim)

    def _place_of(self, name: str, weight: Tensor) -> tuple[int, int]:
        """The first row and the first column of this rank's part in the whole weight."""
        row = column = 0
        if isinstance(weight, DTensor):
            rows = weight.shape[0]
            row = min(rows, self.grid.part * -(-rows // self.grid.num_parts))  # as torch.chunk cuts
        dim = self._cuts.dims.get(name)
        if dim == 0:
            row += self.grid.place * weight.shape[0]
        elif dim == 1:
            column = self.grid.place * weight.shape[1]
        return row, column

    def _found(self) -> dict[str, Tensor]:
        """The weights as they are now, by the names that the model gives them."""
        parameters = dict(cast("Any", self._model).named_parameters(remove_duplicate=False))
        buffers = dict(cast("Any", self._model).named_buffers(remove_duplicate=False))
        return {name: parameters[name] if name in parameters else buffers[name] for name in self._views}


def _check_fits(tensors: Mapping[str, Tensor], known: Mapping[str, FileView]) -> None:
    """Raises: WeightsError if the tensors are not exactly those that are known, or not finite."""
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
