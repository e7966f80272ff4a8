"""A model's weights by their names in its folder, complete on one rank or sharded over several (torch's
FSDP2).

FSDP2 cuts every weight along its first dimension, and each rank keeps its rows with their gradient and
optimizer state. A layer is complete only during its forward or backward computation. Gradients are summed
over ranks, not averaged, since a loss is already divided by the denominator of the whole batch. If
`train.shard` requires it, layers are cut first (`tensor_parallel`), and FSDP2 shards each rank's part of a
weight; there may also be several replicas.

A model on `meta` gets memory only for each rank's part, once it is split.

`gather` yields one complete tensor at a time, cast before it is sent. Each rank takes what it needs of the
tensor and drops it before the next, so no rank ever holds all weights. The bytes do not depend on the number
of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from astraflow.errors import WeightsError
from astraflow.models.file_layout import FileView, file_views, rest_of
from astraflow.models.loading import check_tensors
from astraflow.trainer.torch.layers import layers_of
from astraflow.trainer.torch.parallel.grid import RankGrid
from astraflow.trainer.torch.parallel.tensor_parallel import LayerCuts, cut_layers

__all__ = ["ModelWeights", "TrainedPart", "local_part", "rank_device"]

_LARGE_BYTES = 4 << 20
"""From this size, ranks on CPUs avoid a second copy of a tensor that they gather."""


def rank_device(device: str, *, is_alone: bool) -> str:
    """The device of a rank: the configured one, or the only GPU that its process sees if it isn't alone."""
    kind = device.partition(":")[0]
    return device if is_alone or kind == "cpu" else f"{kind}:0"


def local_part(weight: Tensor) -> Tensor:
    """This rank's rows of a weight, without copying; all rows if it is not sharded."""
    with torch.no_grad():
        return weight.to_local() if isinstance(weight, DTensor) else weight


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """A trained parameter, and this rank's part of it."""

    parameter: nn.Parameter
    own: nn.Parameter
    """This rank's part, in the same memory; the parameter itself if it is not sharded."""
    row: int = 0
    """First row of the part in the whole weight (first dimension)."""
    column: int = 0
    """First column of the part in the whole weight (second dimension)."""
    is_first: bool = True
    """Whether this is the first rank with this part: only one of several counts and is saved."""
    is_shared: bool = False
    """Whether all ranks that compute a batch together have the part."""
    is_partial: bool = False
    """Whether each of these ranks computes a part of the gradient, or all of it."""


class ModelWeights:
    """All weights of a model. Example: `dict(ModelWeights(model, RankGrid(ALONE, ALONE)).gather())`.

    Create it before anything replaces the parameters, and `split` the model once its computation is set up.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: RankGrid,
        *,
        dtype: torch.dtype = torch.float32,
        source: Mapping[str, Tensor] | None = None,
        has_rest: bool = True,
    ) -> None:
        """`dtype`: in which layers compute, and are gathered. `source`: what `split` fills a model on `meta`
        with. `has_rest`: whether the rest of the folder is gathered with the weights; it never changes."""
        self._model = model
        self.grid = grid
        self._dtype = dtype
        self._source = source
        self._rest: Mapping[str, Tensor] = rest_of(model) if has_rest else {}
        self._cuts = LayerCuts({})
        self._views: dict[str, list[FileView]] = {}
        for view in file_views(model):
            self._views.setdefault(view.weight, []).append(view)
        self._weights = self._current_weights()

    def split(self, entry: nn.Module) -> None:
        """Leaves each rank only its part. `entry`: the only module through which the model is called.

        Raises: ConfigError if the model's layers cannot be cut as `train.shard` requires.
        """
        if self.grid.tensor > 1:
            self._cuts = cut_layers(self._model, self.grid)
        if self.grid.mesh is not None:
            low = MixedPrecisionPolicy(self._dtype, torch.float32, cast_forward_inputs=False)
            for module in [*layers_of(self._model), entry]:
                # Embeddings and head stay in float32, as the states between layers do. The outermost module
                # is resharded, too: weights that a pass left gathered would miss `install`'s writes.
                policy = MixedPrecisionPolicy() if module is entry else low
                fully_shard(module, mesh=self.grid.mesh, reshard_after_forward=True, mp_policy=policy)
                split = cast("FSDPModule", module)
                split.set_gradient_divide_factor(1.0)
                split.set_force_sum_reduction_for_comms(True)  # gloo does not support scaled sums
        if self._source is not None:
            self._fill(entry, self._source)
            self._source = None
        self._weights = self._current_weights()

    def _fill(self, entry: nn.Module, source: Mapping[str, Tensor]) -> None:
        """Gives this rank's part of a model on `meta` its memory and values."""

        def with_memory(own: Tensor) -> Tensor:
            return torch.empty_like(own, device=self.grid.device) if own.is_meta else own.to(self.grid.device)

        cast("Any", entry)._apply(with_memory)
        cast("Any", self._model).tie_weights()
        self._weights = self._current_weights()
        self.install(source, keep=source.__contains__)

    def trained_parts(self) -> dict[str, TrainedPart]:
        """This rank's part of each trained parameter, by the parameter's name in the model. Call it after
        `split`."""
        parts: dict[str, TrainedPart] = {}
        for name, parameter in cast("Any", self._model).named_parameters():
            if parameter.requires_grad:
                is_split = isinstance(parameter, DTensor)
                is_cut = name in self._cuts.dims
                row, column = self._offset_of(name, parameter)
                parts[name] = TrainedPart(
                    parameter=parameter,
                    own=nn.Parameter(local_part(parameter)) if is_split else parameter,
                    row=row,
                    column=column,
                    is_first=not self.grid.replica and (is_cut or not self.grid.model_rank),
                    is_shared=self.grid.tensor * self.grid.context > 1 and not is_cut,
                    is_partial=self.grid.context > 1 or name in self._cuts.partial,
                )
        return parts

    @torch.no_grad()
    def gather(
        self, keep: Callable[[str], bool] = lambda name: True, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the weights whose folder name `keep` accepts; views of the model's memory if it
        is not split. Every rank must call this and exhaust the result, and gets all weights."""
        for own, views in self._views.items():
            chosen = [view for view in views if keep(view.name)]
            weight = self._weights[own].detach()
            if not chosen:
                continue
            dim = self._cuts.dims.get(own)
            if dtype is not None and (isinstance(weight, DTensor) or dim is not None):
                weight = weight.to(dtype)
            if isinstance(weight, DTensor):
                weight = self._all_rows(weight)
            if dim is not None:
                weight = self._join(weight, dim)
            for view in chosen:
                yield view.name, view.cut(weight)
        yield from ((name, tensor) for name, tensor in self._rest.items() if keep(name))

    @torch.no_grad()
    def install(self, tensors: Mapping[str, Tensor], keep: Callable[[str], bool] = lambda name: True) -> None:
        """Overwrites the weights whose folder name `keep` accepts.

        Raises: WeightsError if the tensors are not exactly these weights, or differ from the rest of the
        folder; the model is then unchanged.
        """
        known = {name: shape for name, shape in self.shapes if keep(name)}
        check_tensors(tensors, known)
        for name in known.keys() & self._rest.keys():
            if not torch.equal(tensors[name], self._rest[name]):
                raise WeightsError(
                    f"tensor {name} is not trained, but it differs from the one in the model folder; restore "
                    "that folder, or begin a new run"
                )
        for own, views in self._views.items():
            if not any(view.name in known for view in views):
                continue
            weight = self._weights[own]
            dim = self._cuts.dims.get(own)
            if not isinstance(weight, DTensor) and dim is None:
                for view in views:
                    view.cut(weight.detach()).copy_(tensors[view.name])
                continue
            shape = list(weight.shape)
            if dim is not None:
                shape[dim] *= self.grid.tensor
            whole = torch.empty(shape, dtype=weight.dtype)  # takes no memory until it is written
            if (views[0].shape, views[0].stride) == (tuple(shape), whole.stride()):
                whole = tensors[views[0].name]
            else:
                for view in views:
                    view.cut(whole).copy_(tensors[view.name])
            part = local_part(weight)
            row, column = self._offset_of(own, weight)
            rows = whole[row : row + len(part)]
            part.copy_(rows[:, column : column + part.shape[1]] if part.ndim > 1 else rows)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each tensor in the folder, in the order of `gather`."""
        own = [(view.name, view.shape) for views in self._views.values() for view in views]
        return (*own, *((name, tuple(tensor.shape)) for name, tensor in self._rest.items()))

    @property
    def held_bytes(self) -> int:
        """Bytes of this rank's rows."""
        return sum({id(weight): local_part(weight).nbytes for weight in self._weights.values()}.values())

    def _all_rows(self, weight: DTensor) -> Tensor:
        """All rows of a weight, or of a cut part of it, on every rank."""
        if weight.device.type != "cpu" or weight.numel() * weight.element_size() < _LARGE_BYTES:
            return weight.full_tensor()
        # Gloo would gather into its own memory and copy. Broadcasts need only the tensor, but more messages.
        whole = torch.empty(weight.shape, dtype=weight.dtype)
        num_rows = -(-len(whole) // self.grid.num_shards)  # as torch.chunk cuts
        for part in range(self.grid.num_shards):
            rows = whole[part * num_rows : (part + 1) * num_rows]
            if part == self.grid.shard:
                rows.copy_(weight.to_local())
            if rows.numel():
                data = rows.view(-1).view(torch.uint8)
                dist.broadcast(data, group=self.grid.shard_group, group_src=part)
        return whole

    def _join(self, weight: Tensor, dim: int) -> Tensor:
        """The whole weight, joined from the parts of the ranks that compute a batch together."""
        data = weight.contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.grid.tensor)]
        dist.all_gather(parts, data, group=self.grid.model_group)
        return torch.cat([part.view(weight.dtype).view(weight.shape) for part in parts], dim)

    def _offset_of(self, name: str, weight: Tensor) -> tuple[int, int]:
        """The first row and the first column of this rank's part in the whole weight."""
        row = column = 0
        if isinstance(weight, DTensor):
            rows = weight.shape[0]
            row = min(rows, self.grid.shard * -(-rows // self.grid.num_shards))  # as torch.chunk cuts
        dim = self._cuts.dims.get(name)
        if dim == 0:
            row += self.grid.model_rank * weight.shape[0]
        elif dim == 1:
            column = self.grid.model_rank * weight.shape[1]
        return row, column

    def _current_weights(self) -> dict[str, Tensor]:
        """The model's weights by their names in the model."""
        parameters = dict(cast("Any", self._model).named_parameters(remove_duplicate=False))
        buffers = dict(cast("Any", self._model).named_buffers(remove_duplicate=False))
        return {name: parameters[name] if name in parameters else buffers[name] for name in self._views}
