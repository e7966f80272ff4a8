"""How waiters are woken: topics for news that concerns everybody, a queue for leases, and the list of waits.

A topic tells all who wait for it (for a new version, for example). A lease can go to one service only, so
requests for leases queue up: a lease goes to the one that has waited longest, and nobody else is woken.
Nothing polls.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from astraflow.errors import Error
from astraflow.types import Wait

__all__ = ["LeaseQueue", "Topics", "WaitList", "Waiter", "waited"]


async def waited(event: asyncio.Event, deadline_s: float) -> bool:
    """Whether the event is set before the loop's clock reads `deadline_s` (infinity: no deadline)."""
    try:
        async with asyncio.timeout_at(deadline_s if math.isfinite(deadline_s) else None):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Topics:
    """One event per topic, replaced at each wake-up.

    Take the event with `next` *before* you look at the state, then wait for it: a wake-up between the look
    and the wait is not missed. Example: `event = topics.next("evals")`.
    """

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def next(self, topic: str) -> asyncio.Event:
        """The event that the next wake-up of the topic sets."""
        return self._events.setdefault(topic, asyncio.Event())

    def wake(self, topics: Iterable[str]) -> None:
        """Wakes all who wait for these topics."""
        for topic in topics:
            if (event := self._events.pop(topic, None)) is not None:
                event.set()

    def wake_all(self) -> None:
        """Wakes everybody."""
        self.wake(list(self._events))


@dataclass(eq=False)
class Waiter:
    """A request in a `LeaseQueue`. `event` is set when it has left the queue: served, or to look again."""

    number: int
    """Requests are served in this order."""
    owner: str
    """The rollout service that asks."""
    kind: Hashable
    look: Callable[[], Any]
    event: asyncio.Event = field(default_factory=asyncio.Event)
    found: Any = None
    error: Error | None = None

    @property
    def is_served(self) -> bool:
        """Whether it got what it waits for, or a refusal."""
        return self.found is not None or self.error is not None

    def taken(self) -> Any:
        """What it got, or None. Raises: the refusal."""
        if self.error is not None:
            raise self.error
        return self.found


class LeaseQueue:
    """Requests that wait for leases, served first come, first served.

    `look` takes leases for its waiter, and returns None if there are none for it. Waiters of one `kind` find
    the same: once one of them finds nothing, no other is asked. So a wake-up costs one look for each waiter
    that gets something, and one more per kind, however many wait.

    Example: `with queue.waiter("w0", served, look) as waiter: await waited(waiter.event, deadline_s)`.
    A waiter that leaves is removed and takes nothing with it: leases go only to those who still wait.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, dict[int, Waiter]] = {}
        """Kind -> number -> waiter, longest wait first."""
        self._numbers = itertools.count()
        self._is_due = False

    def new_number(self) -> int:
        """The number of a new request, for `waiter`."""
        return next(self._numbers)

    @contextmanager
    def waiter(
        self, owner: str, kind: Hashable, look: Callable[[], Any], *, number: int | None = None
    ) -> Generator[Waiter]:
        """A waiter that is in the queue while the block runs. `number`: from an earlier wait of the same
        request, which keeps its turn."""
        waiter = Waiter(self.new_number() if number is None else number, owner, kind, look)
        waiters = self._kinds.setdefault(kind, {})
        is_last = not waiters or next(reversed(waiters)) < waiter.number
        waiters[waiter.number] = waiter
        if not is_last:
            self._kinds[kind] = dict(sorted(waiters.items()))
        try:
            yield waiter
        finally:
            self.remove(waiter)

    def wake(self) -> None:
        """There may be leases: the queue is served as soon as the event loop is free."""
        if self._kinds and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.serve_if_due)

    def serve_if_due(self) -> None:
        """Serves the queue now if it was to be served soon, so that a new request cannot jump it."""
        if not self._is_due:
            return
        self._is_due = False
        idle: set[Hashable] = set()
        while heads := [next(iter(w.values())) for kind, w in self._kinds.items() if kind not in idle]:
            waiter = min(heads, key=lambda head: head.number)
            try:
                waiter.found = waiter.look()
            except Error as err:
                waiter.error = err
            if waiter.is_served:
                self.remove(waiter)
            else:
                idle.add(waiter.kind)

    def recheck(self, owner: str | None = None) -> None:
        """Lets the waiters of an owner (None: all) look again themselves, because something about them
        changed."""
        for waiters in tuple(self._kinds.values()):
            for waiter in tuple(waiters.values()):
                if owner is None or waiter.owner == owner:
                    self.remove(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Takes a waiter out of the queue and sets its event."""
        waiter.event.set()
        waiters = self._kinds.get(waiter.kind)
        if waiters is not None and waiters.pop(waiter.number, None) is not None and not waiters:
            del self._kinds[waiter.kind]


class WaitList:
    """The waits in progress, as `astraflow status` shows them.

    Example: `with waits.entry(lambda: Wait(who=..., ...)): await ...`.
    """

    def __init__(self) -> None:
        self._waits: dict[int, Callable[[], Wait]] = {}
        self._keys = itertools.count()

    @contextmanager
    def entry(self, wait: Callable[[], Wait]) -> Generator[None]:
        """Lists a wait while the block runs; `wait` is called when the list is read."""
        key = next(self._keys)
        self._waits[key] = wait
        try:
            yield
        finally:
            del self._waits[key]

    def current(self) -> tuple[Wait, ...]:
        """All waits, longest first."""
        return tuple(sorted((wait() for wait in self._waits.values()), key=lambda wait: wait.since_s))
