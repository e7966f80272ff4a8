"""AdamW with moving averages that take less device memory: in bfloat16, in host memory, or both.

Torch's AdamW keeps them in the dtype and on the device of the weights, 8 bytes per parameter in float32.
Here, the averages of a slice of a weight are converted to float32 on the device, updated, and converted back,
one slice after the other. The arithmetic of a step is always in float32.

With averages in host memory, two slices are on their way at any time, on streams of their own:

    arriving    slice 2 -> lane A    slice 3 -> lane B    slice 4 -> lane A
    current     update slice 1, B    update slice 2, A    update slice 3, B
    leaving                          slice 1 <- lane B    slice 2 <- lane A

A lane is device memory for the averages of one slice, which is kept for the next steps.

In bfloat16, the average of squares is rounded to 3 digits, so it stops rising once a step changes it by less.
Updates along a gradient that never changes are then longer than in float32: by 0.3% at a decay rate of 0.95,
10% at 0.99 and 23% at 0.999. With as much noise as signal, they differ by less than 1%. A sudden fall of the
gradients to a tenth shows why 0.999 is refused: 600 steps later, the average is 84% too large (7% at 0.99).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["LeanAdamW"]

_AVERAGES = ("exp_avg", "exp_avg_sq")
_SLICE = 1 << 25
"""Elements of a slice: enough for a copy at full speed, and 128 MB for each temporary tensor."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of a weight, with the same part of its gradient and averages."""

    weight: Tensor
    grad: Tensor
    averages: Sequence[Tensor]
    num_steps: float
    group: dict[str, Any]


class _Lane:
    """Device memory for the averages of a slice, and events that order its uses on three streams."""

    def __init__(self, like: Tensor, size: int, dtype: torch.dtype) -> None:
        self.size = size
        self._room = [torch.empty(size, dtype=dtype, device=like.device) for _ in _AVERAGES]
        self.has_arrived = torch.cuda.Event()
        self.is_updated = torch.cuda.Event()
        self.is_free = torch.cuda.Event()

    def averages(self, piece: _Slice) -> list[Tensor]:
        """The room for the averages of a slice."""
        return [room[: piece.weight.numel()].view(piece.weight.shape) for room in self._room]

    def fetch(self, piece: _Slice, stream: torch.cuda.Stream) -> None:
        """Copies the averages of a slice to the device, once those of the one before have left."""
        stream.wait_event(self.is_free)
        with torch.cuda.stream(stream):
            for room, average in zip(self.averages(piece), piece.averages, strict=True):
                room.copy_(average, non_blocking=True)
            self.has_arrived.record(stream)

    def bring_back(self, piece: _Slice, stream: torch.cuda.Stream) -> None:
        """Copies the averages of a slice to the host, once they are updated."""
        stream.wait_event(self.is_updated)
        with torch.cuda.stream(stream):
            for room, average in zip(self.averages(piece), piece.averages, strict=True):
                average.copy_(room, non_blocking=True)
            self.is_free.record(stream)


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with averages in `dtype`.

    Each group has `lr`, `betas`, `eps` and `weight_decay`, as in torch's AdamW, and the state has its names.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        dtype: torch.dtype,
        offload: bool,
        slice_size: int = _SLICE,
    ) -> None:
        """`offload`: keeps the averages in host memory."""
        self._dtype = dtype
        self._offload = offload
        self._slice_size = slice_size
        self._lanes: list[_Lane] = []
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no closure
        """Updates all weights that have a gradient. Returns when offloaded averages are in host memory."""
        del closure
        pieces = [*self._slices()]
        if self._offload and pieces and pieces[0].weight.is_cuda:
            self._update_offloaded(pieces)
            return
        for piece in pieces:
            _update(piece, piece.averages)

    def _slices(self) -> Iterator[_Slice]:
        for group in self.param_groups:
            for parameter in cast("list[nn.Parameter]", group["params"]):
                if parameter.grad is not None:
                    yield from self._slices_of(parameter, parameter.grad, group)

    def _slices_of(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> Iterator[_Slice]:
        state = cast("dict[str, Any]", self.state[parameter])
        if not state:
            state["step"] = torch.zeros(())
            for name in _AVERAGES:
                state[name] = self.make_average(parameter)
        state["step"] += 1
        for weight, part, *averages in self._cut([parameter, grad, *(state[name] for name in _AVERAGES)]):
            yield _Slice(weight, part, averages, float(state["step"]), group)

    def _cut(self, tensors: list[Tensor]) -> Iterable[Sequence[Tensor]]:
        """The same parts of tensors of one shape. Tensors that are not contiguous stay whole."""
        if tensors[0].numel() <= self._slice_size or not all(tensor.is_contiguous() for tensor in tensors):
            return [tensors]
        flat = [cast("tuple[Tensor, ...]", tensor.view(-1).split(self._slice_size)) for tensor in tensors]  # pyright: ignore[reportUnknownMemberType] (torch doesn't say)
        return zip(*flat, strict=True)

    def _update_offloaded(self, pieces: Sequence[_Slice]) -> None:
        """Updates slices whose averages are in host memory, while others are on their way."""
        first = pieces[0].weight
        current = torch.cuda.current_stream(first.device)
        arriving = torch.cuda.Stream(first.device)
        leaving = torch.cuda.Stream(first.device)
        size = max(piece.weight.numel() for piece in pieces)
        if not self._lanes or self._lanes[0].size < size:
            self._lanes = [_Lane(first, size, self._dtype) for _ in range(2)]
        arriving.wait_event(current.record_event())  # what had the lanes' memory before may still be running
        self._lanes[0].fetch(pieces[0], arriving)
        for idx, piece in enumerate(pieces):
            lane = self._lanes[idx % 2]
            if idx + 1 < len(pieces):
                self._lanes[(idx + 1) % 2].fetch(pieces[idx + 1], arriving)
            current.wait_event(lane.has_arrived)
            _update(piece, lane.averages(piece))
            lane.is_updated.record(current)
            lane.bring_back(piece, leaving)
        leaving.synchronize()

    def make_average(self, parameter: nn.Parameter) -> Tensor:
        """An average of a weight, filled with zeros, with the dtype and device of the state."""
        is_pinned = self._offload and parameter.is_cuda
        device = torch.device("cpu") if self._offload else parameter.device
        return torch.zeros(parameter.shape, dtype=self._dtype, device=device, pin_memory=is_pinned)


def _update(piece: _Slice, averages: Sequence[Tensor]) -> None:
    """Updates a slice of a weight, and its averages in place."""
    group = piece.group
    decay, decay_of_squares = cast("tuple[float, float]", group["betas"])
    mean, square = (average.to(piece.weight.device, torch.float32) for average in averages)
    mean = mean.lerp(piece.grad, 1 - decay)
    square = square.mul(decay_of_squares).addcmul_(piece.grad, piece.grad, value=1 - decay_of_squares)
    for average, value in zip(averages, (mean, square), strict=True):
        average.copy_(value)
    piece.weight.mul_(1 - group["lr"] * group["weight_decay"])
    spread = (square.sqrt_() / (1 - decay_of_squares**piece.num_steps) ** 0.5).add_(group["eps"])
    piece.weight.addcdiv_(mean, spread, value=-group["lr"] / (1 - decay**piece.num_steps))
