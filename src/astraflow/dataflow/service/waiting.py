"""Wakes waiters: topics for changes that concern everyone, a queue for leases, and the list of waits.

A topic wakes all its waiters, for example those that wait for a new version. A lease can go to only one
service, so requests for leases form a queue: a lease goes to the request that has waited longest, and no
other request is woken. Nothing polls.
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

__all__ = ["LeaseQueue", "Topics", "WaitList", "Waiter", "wait_until"]


async def wait_until(event: asyncio.Event, deadline_s: float) -> bool:
    """Waits for the event until `deadline_s` on the loop's clock, or for ever. Returns whether it was set."""
    try:
        async with asyncio.timeout_at(deadline_s if math.isfinite(deadline_s) else None):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Topics:
    """One event per topic, replaced at each wake-up.

    Call `next` *before* you read the state, then wait for the event. So a wake-up between the two isn't
    missed.
    Example: `event = topics.next("evals")`.
    """

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def next(self, topic: str) -> asyncio.Event:
        """The event that the next wake-up of the topic sets."""
        return self._events.setdefault(topic, asyncio.Event())

    def wake(self, topics: Iterable[str]) -> None:
        """Wakes all waiters of these topics."""
        for topic in topics:
            if (event := self._events.pop(topic, None)) is not None:
                event.set()

    def wake_all(self) -> None:
        """Wakes all waiters."""
        self.wake(list(self._events))


@dataclass(eq=False)
class Waiter:
    """A request in a `LeaseQueue`. `event` is set when it leaves: it was served, or must check again."""

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
        """Whether it got leases or a refusal."""
        return self.found is not None or self.error is not None

    def result(self) -> Any:
        """What it got; None if nothing. Raises: the refusal."""
        if self.error is not None:
            raise self.error
        return self.found


class LeaseQueue:
    """Requests that wait for leases, served first come, first served.

    `look` takes leases for its waiter, and returns None if there are none. Waiters of the same `kind` find
    the same: once one of them finds nothing, the others are skipped. So a wake-up costs one look per waiter
    that gets something, plus one per kind, however many wait.

    Example: `with queue.waiter("w0", served, look) as waiter: await wait_until(waiter.event, deadline_s)`.
    A waiter that leaves is removed before it can take anything: leases only go to waiting requests.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, dict[int, Waiter]] = {}
        """Kind -> number -> waiter, the longest wait first."""
        self._numbers = itertools.count()
        self._is_due = False

    def new_number(self) -> int:
        """A number for a new request, to pass to `waiter`."""
        return next(self._numbers)

    @contextmanager
    def waiter(
        self, owner: str, kind: Hashable, look: Callable[[], Any], *, number: int | None = None
    ) -> Generator[Waiter]:
        """Puts a waiter into the queue while the block runs. A request keeps its turn by passing the `number`
        of its earlier wait."""
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
        """Schedules the queue to be served as soon as the event loop is free, because there may be leases."""
        if self._kinds and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.serve_if_due)

    def serve_if_due(self) -> None:
        """Serves the queue now if that is scheduled, so that a new request cannot jump the queue."""
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
        """Lets the waiters of an owner (None: all) check again, because something about them changed."""
        for waiters in tuple(self._kinds.values()):
            for waiter in tuple(waiters.values()):
                if owner is None or waiter.owner == owner:
                    self.remove(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Removes a waiter from the queue and sets its event."""
        waiter.event.set()
        waiters = self._kinds.get(waiter.kind)
        if waiters is not None and waiters.pop(waiter.number, None) is not None and not waiters:
            del self._kinds[waiter.kind]


class WaitList:
    """The current waits, as `astraflow status` shows them.

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
        """All waits, the longest first."""
        return tuple(sorted((wait() for wait in self._waits.values()), key=lambda wait: wait.since_s))
