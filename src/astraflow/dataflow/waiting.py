"""Who waits for what: wake-up topics of long-polls, the line for leases, the list behind `astraflow status`.

What a topic tells is for all who wait for it (a new version). A waiter takes the topic's current event
*before* it looks at the state, so that no wake-up between the look and the wait is missed. What only one can
have (a lease) has a line instead: it goes to those who wait longest, and nobody else is woken. Nothing polls.
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

__all__ = ["Line", "Place", "Topics", "WaitList", "waited"]


class Topics:
    """One event a topic, replaced at each wake-up. Example: `event = topics.next("leases")`."""

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
        """Wakes everybody, at the end of the service."""
        self.wake(list(self._events))


@dataclass(eq=False)
class Place:
    """A waiter's place in a `Line`. `event` is set once it is out of it: served, or to look again itself."""

    number: int
    """Waiters come to their turn in this order."""
    owner: str
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


class Line:
    """Those who wait for what only one of them can get, served in the order in which they came.

    `look` takes what there is for its waiter, and returns None if that is nothing. Waiters of one `kind`
    find the same: once one of them finds nothing, no other is asked. So a wake-up costs one look for each
    waiter that gets something, and one more a kind, however many wait.

    Example: `with line.place("w0", served, look) as place: await waited(place.event, deadline_s)`.
    A waiter that leaves has its place removed, and takes nothing with it: things go only to those who wait.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, dict[int, Place]] = {}
        """Kind -> those who wait, longest first."""
        self._numbers = itertools.count()
        self._is_due = False

    def new_number(self) -> int:
        """The number of a newcomer, for `place`."""
        return next(self._numbers)

    @contextmanager
    def place(
        self, owner: str, kind: Hashable, look: Callable[[], Any], *, number: int | None = None
    ) -> Generator[Place]:
        """A place in the line while the block runs. `number`: of an earlier place, whose turn it keeps."""
        place = Place(self.new_number() if number is None else number, owner, kind, look)
        places = self._kinds.setdefault(kind, {})
        is_last = not places or next(reversed(places)) < place.number
        places[place.number] = place
        if not is_last:
            self._kinds[kind] = dict(sorted(places.items()))
        try:
            yield place
        finally:
            self.remove(place)

    def wake(self) -> None:
        """There may be something: those in line are served as soon as the loop is free."""
        if self._kinds and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.serve_if_due)

    def serve_if_due(self) -> None:
        """Serves those in line now, if they were to be served soon: whoever comes now comes after them."""
        if not self._is_due:
            return
        self._is_due = False
        idle: set[Hashable] = set()
        while heads := [next(iter(p.values())) for kind, p in self._kinds.items() if kind not in idle]:
            place = min(heads, key=lambda head: head.number)
            try:
                place.found = place.look()
            except Error as err:
                place.error = err
            if place.is_served:
                self.remove(place)
            else:
                idle.add(place.kind)

    def stir(self, owner: str | None = None) -> None:
        """Lets a waiter (None: all) look again itself, since something about it changed."""
        for places in tuple(self._kinds.values()):
            for place in tuple(places.values()):
                if owner is None or place.owner == owner:
                    self.remove(place)

    def remove(self, place: Place) -> None:
        """Takes a waiter out of the line and sets its event."""
        place.event.set()
        places = self._kinds.get(place.kind)
        if places is not None and places.pop(place.number, None) is not None and not places:
            del self._kinds[place.kind]


async def waited(event: asyncio.Event, deadline_s: float) -> bool:
    """Whether the event came before the loop's clock reads `deadline_s` (infinity: never)."""
    try:
        async with asyncio.timeout_at(deadline_s if math.isfinite(deadline_s) else None):
            await event.wait()
    except TimeoutError:
        return False
    return True


class WaitList:
    """The waits in progress. Example: `with waits.entry(lambda: Wait(who=..., ...)): await ...`."""

    def __init__(self) -> None:
        self._waits: dict[int, Callable[[], Wait]] = {}
        self._next = 0

    @contextmanager
    def entry(self, wait: Callable[[], Wait]) -> Generator[None]:
        """Lists a wait while the block runs; what it waits for is asked when the list is read."""
        self._next += 1
        key = self._next
        self._waits[key] = wait
        try:
            yield
        finally:
            del self._waits[key]

    def current(self) -> tuple[Wait, ...]:
        """All waits, longest first."""
        return tuple(sorted((wait() for wait in self._waits.values()), key=lambda wait: wait.since_s))
