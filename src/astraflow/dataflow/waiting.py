"""Who waits for what: wake-up topics of long-polls, and the list behind `astraflow status`.

A waiter takes the topic's current event *before* it looks at the state, so that no wake-up between the look
and the wait is missed. Nothing polls.
"""

import asyncio
import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from astraflow.types import Wait

__all__ = ["Topics", "WaitList", "waited"]


class Topics:
    """One event for each who waits for a topic, replaced at each wake-up.

    Example: `event = topics.next("leases", "rollout-0")`.
    """

    def __init__(self) -> None:
        self._events: dict[str, dict[str, asyncio.Event]] = {}

    def next(self, topic: str, who: str = "") -> asyncio.Event:
        """The event that the next wake-up of the topic sets, or one of `who` alone."""
        return self._events.setdefault(topic, {}).setdefault(who, asyncio.Event())

    def wake(self, topics: Iterable[str]) -> None:
        """Wakes all who wait for these topics."""
        for topic in topics:
            for event in self._events.pop(topic, {}).values():
                event.set()

    def wake_one(self, topic: str, who: str) -> None:
        """Wakes one of those who wait: the news is about nobody else."""
        if (event := self._events.get(topic, {}).pop(who, None)) is not None:
            event.set()

    def wake_all(self) -> None:
        """Wakes everybody, at the end of the service."""
        self.wake(list(self._events))


async def waited(event: asyncio.Event, deadline_s: float) -> bool:
    """Whether the event came before the loop's clock reads `deadline_s` (infinity: never)."""
    try:
        async with asyncio.timeout_at(deadline_s if math.isfinite(deadline_s) else None):
            await event.wait()
    except TimeoutError:
        return False
    return True


class WaitList:
    """The waits in progress. Example: `with waits.entry(Wait(who=..., ...)): await ...`."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._next = 0

    @contextmanager
    def entry(self, wait: Wait) -> Generator[None]:
        """Lists a wait while the block runs."""
        self._next += 1
        key = self._next
        self._waits[key] = wait
        try:
            yield
        finally:
            del self._waits[key]

    def current(self) -> tuple[Wait, ...]:
        """All waits, longest first."""
        return tuple(sorted(self._waits.values(), key=lambda wait: wait.since_s))
