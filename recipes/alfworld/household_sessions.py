"""The games of a server of `household`: who plays what, and when a silent player's game ends.

Both protocols that `household_server.py` speaks share these sessions and the number of places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
from aiohttp import web
from recipes.alfworld.household_world import Household, HouseholdGame

from astraflow.protocols import Observation
from astraflow.types import Task

__all__ = ["EXPIRES_S", "FullError", "Session", "Sessions", "body_of"]

EXPIRES_S = 240.0
"""A session that is silent for so long is ended, as AgentBench's controller does."""
MOST_BODY_BYTES = 256 * 1024
"""Of a request: a reply is a thought and a command."""

_Request = TypeVar("_Request")


class FullError(Exception):
    """All places are taken."""


@dataclass
class Session:
    """A game that somebody plays."""

    index: int
    game: HouseholdGame
    start_s: float
    last_update_s: float
    history: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """What was said, each with its role, `user` for the world or `agent`."""

    def add(self, role: Literal["user", "agent"], content: str) -> None:
        self.history.append({"role": role, "content": content})


class Sessions:
    """The sessions by number. Its methods do not wait, so nothing changes between two lines of a handler."""

    def __init__(
        self, world: Household, tasks: Sequence[Task], max_sessions: int, clock: Callable[[], float]
    ) -> None:
        """`clock`: seconds since 1970."""
        self.world = world
        self.tasks = tasks
        self.max_sessions = max_sessions
        self.clock = clock
        self.open: dict[int, Session] = {}
        self._num_started = 0

    def start(self, index: int) -> tuple[int, Session]:
        """Begins a game of a task. Raises: FullError."""
        self.drop_expired()
        if len(self.open) >= self.max_sessions:
            raise FullError
        game, seen = self.world.reset(self.tasks[index], seed=0)
        session = Session(index, game, self.clock(), self.clock())
        session.add("user", str(seen.messages))
        number = self._num_started
        self._num_started += 1
        self.open[number] = session
        return number, session

    def find(self, number: int) -> Session | None:
        """An open session; None if it is over, expired, or never was."""
        self.drop_expired()
        return self.open.get(number)

    def step(self, number: int, reply: str) -> Observation:
        """Takes a reply in an open session, which ends if its game does."""
        session = self.open[number]
        seen = self.world.step(session.game, reply)
        session.add("agent", reply)
        session.add("user", str(seen.messages))
        session.last_update_s = self.clock()
        if seen.is_done:
            del self.open[number]
        return seen

    def ending(self, session: Session, reward: float) -> str:
        """Why a game is over, as AgentBench calls it."""
        if reward:
            return "completed"
        is_long = session.game.num_turns >= self.world.max_turns
        return "task limit reached" if is_long else "agent invalid action"  # it repeated itself

    def drop_expired(self) -> None:
        """Ends the sessions that were silent for too long."""
        oldest_s = self.clock() - EXPIRES_S
        for number in [n for n, session in self.open.items() if session.last_update_s < oldest_s]:
            del self.open[number]


async def body_of(
    request: web.Request, kind: type[_Request], *, most_bytes: int = MOST_BODY_BYTES
) -> _Request:
    """The request as what it has to be. Raises: HTTP errors 413 and 422."""
    if (request.content_length or 0) > most_bytes:
        raise web.HTTPRequestEntityTooLarge(max_size=most_bytes, actual_size=request.content_length or 0)
    raw = await request.read()
    if len(raw) > most_bytes:  # a request may come in chunks, without a length
        raise web.HTTPRequestEntityTooLarge(max_size=most_bytes, actual_size=len(raw))
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise web.HTTPUnprocessableEntity(
            text=f"the request is no {kind.__name__.strip('_')}: {err}"
        ) from err
