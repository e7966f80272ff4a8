"""Adapters in an engine: the factors of all of them for one projection lie in one tensor.

    change(x) = ((x @ down.T) * mask) @ up      down [N * R, in], up [N * R, out], mask [rows, N]

N adapters have R rows each, so the changes of a batch take two products more than the base, however its rows
are mixed. The mask leaves each row the columns of its own adapter. If all rows have the same adapter, only
its factors are multiplied. An adapter that lacks a projection or has a lower rank has zeros there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from astraflow.errors import UnfitVersionError
from astraflow.models.adapters import adapted_names, is_adapter, peft_names
from astraflow.models.file_layout import file_names
from astraflow.models.loading import format_names, is_finite, torch_tensor
from astraflow.rollout.engines.forward import Forward
from astraflow.rollout.engines.lean import LeanForward, Projection
from astraflow.types.host_tensors import HostTensor

__all__ = ["AdapterWeights", "Adapters", "Selection"]

AdapterWeights = Mapping[str, tuple[Tensor, Tensor]]
"""Name of each adapted weight -> its factors [r, in] and [out, r], checked, in host memory."""


class Selection:
    """The adapters of the rows that are computed next."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.num_adapters = 0
        self.single: int | None = 0
        """The adapter of all rows; None if they have several."""
        self.mask = torch.zeros((0, 0), dtype=dtype, device=device)
        """[rows, 1, adapters, 1] 1 where a row has the adapter, otherwise 0; undefined if `single` is set."""
        self._rows = np.zeros(0, np.int64)

    def choose(self, adapters: NDArray[np.int64]) -> None:
        """Sets the adapter of each row [B]."""
        if np.array_equal(adapters, self._rows) and self.mask.shape[2:3] == (self.num_adapters,):
            return
        self._rows = adapters.copy()
        first = int(adapters[0]) if adapters.size else 0
        self.single = first if (adapters == first).all() else None
        is_own = adapters[:, None, None, None] == np.arange(self.num_adapters)[:, None]
        self.mask = torch.from_numpy(is_own).to(self.mask)


class _Factors:
    """The factors of all adapters for one projection, or for several that are fused."""

    def __init__(self, names: Sequence[str], heights: Sequence[int], like: Tensor, chosen: Selection) -> None:
        """`names`, `heights`: the weights of the parts in their order, and their numbers of rows. `like`
        [out, in]: the projection's own weight."""
        self.names = names
        self.heights = heights
        self._chosen = chosen
        self._rank = 0
        """The rank of each part; 0 as long as no adapter has one of them."""
        self._down = like.new_zeros((0, 0, like.shape[1]))
        """[adapters, parts * rank, in]"""
        self._up = like.new_zeros((0, 0, like.shape[0]))
        """[adapters, parts * rank, out]"""

    @property
    def width(self) -> int:
        """Size of the input."""
        return self._down.shape[2]

    @property
    def is_used(self) -> bool:
        """Whether an adapter has factors here."""
        return self._rank > 0

    def make_room(self, num_adapters: int, rank: int) -> None:
        """Makes room for adapters and ranks. Those that are there keep their factors."""
        rank = max(rank, self._rank)
        old = (self._down, self._up, self._rank)
        num_parts = len(self.names)
        self._down = old[0].new_zeros((num_adapters, num_parts * rank, old[0].shape[2]))
        self._up = old[1].new_zeros((num_adapters, num_parts * rank, old[1].shape[2]))
        self._rank = rank
        for new, before in ((self._down, old[0]), (self._up, old[1])):
            if before.numel():
                parts = before.view(len(before), num_parts, old[2], -1)
                new.view(num_adapters, num_parts, rank, -1)[: len(before), :, : old[2]] = parts

    def fits(self, num_adapters: int, rank: int) -> bool:
        """Whether there is room for this number of adapters and this rank."""
        return len(self._down) >= num_adapters and self._rank >= rank

    def write(self, adapter: int, weights: AdapterWeights) -> None:
        """Overwrites an adapter's factors. Weights that it lacks get zeros."""
        self._down[adapter] = 0
        self._up[adapter] = 0
        start = 0
        for part, (name, height) in enumerate(zip(self.names, self.heights, strict=True)):
            if name in weights:
                down, up = weights[name]
                rows = slice(part * self._rank, part * self._rank + len(down))
                self._down[adapter, rows] = down.to(self._down)
                self._up[adapter, rows, start : start + height] = up.t().to(self._up)
            start += height

    def add_change(self, output: Tensor, x: Tensor) -> Tensor:
        """Adds the adapters' part to the output [..., out] of the projection for x [..., in], in place."""
        if not self.is_used:
            return output
        chosen = self._chosen
        if chosen.single is not None:
            low = functional.linear(x, self._down[chosen.single])
            up = self._up[chosen.single]
        else:
            num, rank, width = self._down.shape
            low = functional.linear(x, self._down.view(-1, width))
            of_rows = low.view(len(chosen.mask), -1, num, rank)
            low = (of_rows * chosen.mask).view(low.shape)
            up = self._up.view(num * rank, -1)
        if output.dtype != up.dtype:
            return output.add_(low @ up)
        flat = output.view(-1, output.shape[-1])
        flat.addmm_(low.reshape(len(flat), -1), up)
        return output


@dataclass(frozen=True, slots=True)
class _AdaptedProjection(Projection):
    """A projection of the lean forward with adapters."""

    factors: _Factors

    def __call__(self, x: Tensor) -> Tensor:
        return self.factors.add_change(Projection.__call__(self, x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.factors.add_change(Projection.add_to(self, residual, x), x)


class Adapters:
    """All adapters of one model. From construction on, the model and its forward compute with them.

    The stepping thread owns it, except for `read`, which changes nothing.
    Example: `number = adapters.add(adapters.read(snapshot.tensors))`, then `adapters.chosen.choose(...)`
    before each pass.
    """

    def __init__(self, model: PreTrainedModel, forward: Forward) -> None:
        self.num = 0
        """Number of adapters. They are numbered from 0."""
        weight = next(model.parameters())
        self.chosen = Selection(weight.dtype, weight.device)
        self._published = file_names(model)
        self._factors: list[_Factors] = []
        if isinstance(forward, LeanForward):
            heights = {name: len(parameter) for name, parameter in model.named_parameters()}

            def wrap(names: Sequence[str], projection: Projection) -> Projection:
                parts = [heights[f"{name}.weight"] for name in names]
                return _AdaptedProjection(
                    projection.weight, projection.bias, self._place(names, parts, projection.weight)
                )

            forward.wrap(wrap)
        else:
            head = cast("Any", model).get_output_embeddings()
            for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
                if isinstance(module, nn.Linear) and module is not head:
                    factors = self._place([name], [module.out_features], module.weight)
                    module.register_forward_hook(
                        lambda _, inputs, output, factors=factors: factors.add_change(output, inputs[0])
                    )
        shapes = [(f.names, f.heights, f.width) for f in self._factors]
        self._shapes = {
            name: (height, width)
            for names, heights, width in shapes
            for name, height in zip(names, heights, strict=True)
        }

    def _place(self, names: Sequence[str], heights: Sequence[int], weight: Tensor) -> _Factors:
        own = [f"{name}.weight" for name in names]
        factors = _Factors([self._published.get(name, name) for name in own], heights, weight, self.chosen)
        self._factors.append(factors)
        return factors

    def read(self, tensors: Sequence[HostTensor], who: str) -> AdapterWeights:
        """Checks the adapters among the tensors of a version, which is called `who` in messages.

        Raises: UnfitVersionError if they don't fit the model, or have values that are not finite.
        """
        given = {tensor.name: torch_tensor(tensor) for tensor in tensors if is_adapter(tensor.name)}
        names = adapted_names(given)
        if unknown := [name for name in names if name not in self._shapes]:
            raise UnfitVersionError(
                f"{who}: it adapts {format_names(unknown)}, which is no linear layer of the base that the "
                "engine shares; is it an adapter of another model?"
            )
        weights: dict[str, tuple[Tensor, Tensor]] = {}
        for name in names:
            pair = [given[factor] for factor in peft_names(name) if factor in given]
            height, width = self._shapes[name]
            shapes = [tuple(factor.shape) for factor in pair]
            if len(pair) != 2 or shapes != [(len(pair[0]), width), (height, len(pair[0]))]:
                raise UnfitVersionError(
                    f"{who}: the factors of {name} have shapes {shapes}; expected [r, {width}] and "
                    f"[{height}, r]"
                )
            if not all(map(is_finite, pair)):
                raise UnfitVersionError(f"{who}: the factors of {name} have values that are not finite")
            weights[name] = (pair[0], pair[1])
        return weights

    def add(self, weights: AdapterWeights) -> int:
        """Adds an adapter, and returns its number."""
        self.num += 1
        self.chosen.num_adapters = self.num
        for factors in self._factors:
            if factors.is_used:
                factors.make_room(self.num, 0)
        self.write(self.num - 1, weights)
        return self.num - 1

    def write(self, adapter: int, weights: AdapterWeights) -> None:
        """Replaces an adapter's factors."""
        for factors in self._factors:
            ranks = [len(weights[name][0]) for name in factors.names if name in weights]
            if ranks and not factors.fits(self.num, max(ranks)):
                factors.make_room(self.num, max(ranks))
            if factors.is_used:
                factors.write(adapter, weights)
