"""Offloaded averages on three streams: every two uses of the same memory are ordered.

Posing GPUs compute at once, whatever stream is asked. So here, streams and events only note their order, by
vector clocks, and each operation notes which memory it reads and writes.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from astraflow.trainer.torch.lean_adam import LeanAdamW

GPU = "cuda:2"


@dataclass
class Event:
    clock: Counter["Stream"] = field(default_factory=Counter["Stream"])

    def record(self, stream: "Stream") -> None:
        self.clock = Counter(stream.clock)


class Stream:
    """Knows which operations of each stream came before its next one."""

    deaf: ClassVar[str] = ""
    """Streams with this name don't wait."""
    host: ClassVar[Counter["Stream"]] = Counter()
    """What the host has waited for."""
    names: ClassVar[Iterator[str]] = iter(())

    def __init__(self, device: Any = None) -> None:
        self.name = next(Stream.names)
        self.clock: Counter[Stream] = Counter()

    def wait_event(self, event: Event) -> None:
        if self.name != Stream.deaf:
            self.clock |= event.clock

    def record_event(self) -> Event:
        return Event(Counter(self.clock))

    def synchronize(self) -> None:
        Stream.host |= self.clock

    def begin(self) -> tuple["Stream", int, Counter["Stream"]]:
        """Puts an operation into the stream. Returns its place, and what is before it."""
        before = self.clock | Stream.host
        self.clock = before + Counter([self])
        return self, self.clock[self], before


class Watch(TorchDispatchMode):
    """Notes all uses of memory, and those that are not ordered."""

    def __init__(self, current: Stream) -> None:
        super().__init__()
        self.current = current
        self.uses: list[tuple[int, int, bool, Stream, int]] = []
        self.races: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream, number, before = self.current.begin()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if not isinstance(value, torch.Tensor) or not value.numel():
                continue
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            first = value.data_ptr()
            last = first + value.numel() * value.element_size()
            for other_first, other_last, was_write, other, other_number in self.uses:
                is_same = first < other_last and other_first < last and (is_write or was_write)
                if is_same and other is not stream and before[other] < other_number:
                    self.races.append(f"{func} on {stream.name} beside {other.name}")
            self.uses.append((first, last, is_write, stream, number))
        return func(*args, **(kwargs or {}))


def races(monkeypatch: pytest.MonkeyPatch, deaf: str) -> list[str]:
    """Two steps of three weights, whose streams of this name don't wait."""
    monkeypatch.setattr(Stream, "deaf", deaf)
    monkeypatch.setattr(Stream, "host", Counter())
    monkeypatch.setattr(Stream, "names", iter(["current", *["arriving", "leaving"] * 2]))
    watch = Watch(Stream())

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        before, watch.current = watch.current, stream
        yield
        watch.current = before

    for name, fake in (("Stream", Stream), ("Event", Event), ("stream", within)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: watch.current)
    weights = [nn.Parameter(torch.linspace(-1, 1, num, device=GPU)) for num in (25, 7, 30)]
    optimizer = LeanAdamW(weights, dtype=torch.bfloat16, offload=True, slice_size=10)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with watch:
        for _ in range(2):
            optimizer.step()
    return watch.races


def test_uses_of_the_same_memory_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert races(monkeypatch, "") == []


@pytest.mark.parametrize("deaf", ["current", "arriving", "leaving"])
def test_a_stream_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch, deaf: str) -> None:
    assert races(monkeypatch, deaf)
