"""The weights of a model that Megatron has cut over ranks, by their names in a model folder.

Weights are read and written one tensor at a time. No rank ever holds a whole model, and each reads only its
part of the folder's files. `gather` gives names, order, shapes and values as the torch backend does.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from astraflow.addons.megatron.groups import ModelGroups
from astraflow.addons.megatron.mapping import WeightPiece, pieces_of_stage, stage_of
from astraflow.addons.megatron.shape import ModelShape
from astraflow.errors import ConfigError
from astraflow.models.loading import check_tensors, format_names

__all__ = ["MegatronWeights"]

Shapes = Mapping[str, tuple[int, ...]]


class MegatronWeights:
    """All weights of a model. Example: `dict(weights.gather(dtype=torch.float32))` on all ranks."""

    def __init__(self, model: Any, shape: ModelShape, shapes: Shapes, groups: ModelGroups) -> None:
        """`shapes`: name and shape of each weight in the folder, in the folder's order.

        Raises: ConfigError if the folder has other weights than the mapping expects.
        """
        self._shape = shape
        self._groups = groups
        self.shapes = shapes
        self.parameters: Mapping[str, torch.nn.Parameter] = dict(model.named_parameters())
        """This rank's parameters by name."""
        self.pieces = pieces_of_stage(
            shape, stage=groups.stage, tensor=groups.tensor, pipeline=groups.pipeline
        )
        self._own = {piece.name: piece for piece in self.pieces if not piece.is_copy}
        self._check_mapping()

    def offset(self, piece: WeightPiece) -> tuple[int, int]:
        """The first row and the first column of this rank's part in the whole weight."""
        offsets = [0, 0]
        if piece.dim is not None:
            size = self.shapes[piece.name][piece.dim] // self._groups.tensor
            offsets[piece.dim] = self._groups.tensor_rank * size
        return offsets[0], offsets[1]

    def part_shape(self, piece: WeightPiece) -> tuple[int, ...]:
        """The shape of this rank's part of a weight."""
        shape = list(self.shapes[piece.name])
        if piece.dim is not None:
            shape[piece.dim] //= self._groups.tensor
        return tuple(shape)

    @torch.no_grad()
    def gather(
        self, *, dtype: torch.dtype, values: Callable[[str], Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Names and values of all weights. Every rank must call this and exhaust the result.

        `values`: returns what to gather instead of the parameter with this name, in the parameter's shape.
        """
        for name, shape in self.shapes.items():
            owner = stage_of(name, self._shape, self._groups.pipeline)
            if owner == self._groups.stage:
                piece = self._own[name]
                source = self.parameters[piece.parameter] if values is None else values(piece.parameter)
                whole = self._join(piece.read(source.detach()).to(dtype).contiguous(), piece.dim)
            else:
                whole = torch.empty(shape, dtype=dtype, device=self._groups.device)
            if self._groups.pipeline > 1:
                data = whole.view(-1).view(torch.uint8)
                dist.broadcast(data, group=self._groups.pipeline_group, group_src=owner)
            yield name, whole

    @torch.no_grad()
    def install(self, tensors: Mapping[str, Tensor], write: Callable[[str, Tensor], None]) -> None:
        """Reads this rank's part of complete weights, and calls `write` with the name and the values, in
        float32, of each parameter.

        Raises: WeightsError if the tensors are not exactly the model's weights.
        """
        check_tensors(tensors, self.shapes)
        self.fill(lambda piece, into: into.copy_(self._part(piece, tensors[piece.name])), write)

    @torch.no_grad()
    def fill(
        self, read: Callable[[WeightPiece, Tensor], object], write: Callable[[str, Tensor], None]
    ) -> None:
        """Puts parameters together from their pieces. `read` fills a tensor of the shape of a piece's part;
        `write` gets the name and the values of each parameter."""
        by_parameter: dict[str, list[WeightPiece]] = {}
        for piece in self.pieces:
            by_parameter.setdefault(piece.parameter, []).append(piece)
        for name, pieces in by_parameter.items():
            whole = torch.empty(self.parameters[name].shape)
            for piece in pieces:
                part = torch.empty(self.part_shape(piece))
                read(piece, part)
                piece.write(whole, part)
            write(name, whole)

    def _part(self, piece: WeightPiece, whole: Tensor) -> Tensor:
        if piece.dim is None:
            return whole
        size = whole.shape[piece.dim] // self._groups.tensor
        return whole.narrow(piece.dim, self._groups.tensor_rank * size, size)

    def _join(self, part: Tensor, dim: int | None) -> Tensor:
        """The whole weight, joined from the parts of the ranks of this stage."""
        if dim is None or self._groups.tensor == 1:
            return part
        data = part.view(-1).view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self._groups.tensor)]
        dist.all_gather(parts, data, group=self._groups.tensor_group)
        return torch.cat([own.view(part.dtype).view(part.shape) for own in parts], dim)

    def _check_mapping(self) -> None:
        """Raises: ConfigError if a weight of the folder, or a parameter, is not mapped."""
        stage = self._groups.stage
        expected = {
            name for name in self.shapes if stage_of(name, self._shape, self._groups.pipeline) == stage
        }
        unknown = sorted(expected ^ self._own.keys())
        unknown += sorted(self.parameters.keys() ^ {piece.parameter for piece in self.pieces})
        if unknown:
            raise ConfigError(
                f"train.backend.name: megatron: {format_names(unknown)} of the model is not mapped to "
                "megatron-core; use train.backend.name: torch"
            )
