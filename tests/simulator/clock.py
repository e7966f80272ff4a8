"""Virtual time: a queue of events, processes written as generators, and a network with faults.

Nothing here knows what is simulated. All chance comes from one `random.Random`, so a seed gives the same run,
message by message.
"""

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Ask", "Link", "Network", "Process", "Signal", "World"]

Script = Generator["float | Signal | Ask", Any, None]
"""Yields seconds to sleep, a signal to wait for, or an `Ask`, and is sent its answer (None: none came)."""
Handler = Callable[[str, tuple[Any, ...], Callable[[object], None]], None]


class Signal:
    """Wakes all who wait for it, each time that it fires."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def fire(self) -> None:
        """Wakes those who wait now."""
        waiting, self.waiting = self.waiting, []
        for resume in waiting:
            resume()


@dataclass(slots=True)
class Link:
    """A peer's way to the service. While it is cut, messages are lost, or held until the cut ends."""

    name: str
    latency_s: float
    cut_until_s: float = 0.0
    cut: Literal["lose", "hold"] = "lose"


@dataclass(slots=True)
class Ask:
    """A request; the script goes on with the answer, or with None after `timeout_s`."""

    link: Link
    method: str
    args: tuple[Any, ...]
    timeout_s: float = 4.0


@dataclass(frozen=True, slots=True)
class Network:
    """Shares of messages that suffer, while there are faults."""

    loss: float
    repeat: float
    slow: float
    """Delayed by up to `max_delay_s`, and so overtaken by later ones."""
    max_delay_s: float = 12.0


class Process:
    """A script that runs; `kill` ends it between two of its moments."""

    def __init__(self, world: "World", script: Script) -> None:
        self._world, self._script = world, script
        self._moment = 0
        self.is_alive = True

    def kill(self) -> None:
        """Ends it; what it waits for is forgotten."""
        self.is_alive = False
        self._moment += 1

    def resume(self, moment: int, value: object = None) -> None:
        """Goes on if this is still what it waits for."""
        if moment != self._moment:
            return
        self._moment += 1
        try:
            item = self._script.send(value)
        except StopIteration:
            self.is_alive = False
            return
        if not self.is_alive:
            return
        moment = self._moment
        if isinstance(item, float):
            self._world.after(item, self.resume, moment)
        elif isinstance(item, Signal):
            item.waiting.append(lambda: self._world.after(0.0, self.resume, moment))
        else:
            self._world.send(item, lambda value: self.resume(moment, value))
            self._world.after(item.timeout_s, self.resume, moment)


class World:
    """The clock, the queue of what happens next, and the network to the one service.

    Example::

        world = World(random.Random(7), Network(loss=0.1, repeat=0.1, slow=0.1), tell=None)
        world.serve(service.handle)
        world.spawn(script)
        world.run(until_s=600.0)
    """

    def __init__(self, rng: random.Random, network: Network, tell: Callable[[str], None] | None) -> None:
        self.rng, self.network, self._tell = rng, network, tell
        self.now_s = 0.0
        self.has_faults = True
        self.is_over = False
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num = 0
        self._handler: Handler = _nobody

    def serve(self, handler: Handler) -> None:
        """Gives the service that all messages go to."""
        self._handler = handler

    def after(self, delay_s: float, function: Callable[..., None], *args: Any) -> None:
        """Calls the function in `delay_s`; what was asked for first comes first at the same time."""
        self._num += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._num, function, args))

    def spawn(self, script: Script) -> Process:
        """Starts a process."""
        process = Process(self, script)
        self.after(0.0, process.resume, 0)
        return process

    def run(self, until_s: float) -> None:
        """Lets time pass until `is_over`, or until there is nothing more to happen before `until_s`."""
        queue = self._queue
        while queue and not self.is_over and queue[0][0] <= until_s:
            self.now_s, _, function, args = heapq.heappop(queue)
            function(*args)

    def tell(self, text: str, *args: object) -> None:
        """A line of the trace; formatted only if somebody reads it."""
        if self._tell is not None:
            self._tell(f"{self.now_s:9.3f}  {text % args if args else text}")

    # --- the network ---

    def send(self, ask: Ask, answer: Callable[[object], None]) -> None:
        """Carries a request to the service, and its answers back."""
        for _ in range(1 + self._chance(self.network.repeat)):
            self._carry(
                ask, "->", self._handler, ask.method, ask.args, lambda value: self._back(ask, answer, value)
            )

    def _back(self, ask: Ask, answer: Callable[[object], None], value: object) -> None:
        self._carry(ask, "<-", answer, value)

    def _carry(self, ask: Ask, way: str, function: Callable[..., None], *args: Any) -> None:
        link = ask.link
        delay_s = link.latency_s * (0.5 + self.rng.random())
        if link.cut_until_s > self.now_s:
            if link.cut == "lose":
                self.tell("%s %s %s is lost: the link is cut", link.name, way, ask.method)
                return
            delay_s += link.cut_until_s - self.now_s
        if self._chance(self.network.loss):
            self.tell("%s %s %s is lost", link.name, way, ask.method)
            return
        if self._chance(self.network.slow):
            delay_s += self.rng.random() * self.network.max_delay_s
            self.tell("%s %s %s takes %.1f s", link.name, way, ask.method, delay_s)
        self.after(delay_s, function, *args)

    def _chance(self, share: float) -> bool:
        return self.has_faults and share > 0 and self.rng.random() < share


def _nobody(method: str, args: tuple[Any, ...], answer: Callable[[object], None]) -> None:
    raise AssertionError("nobody serves")
