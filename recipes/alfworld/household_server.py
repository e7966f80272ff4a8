"""Serves `household` as a task of AgentBench v0.2: to its agents, and to all who can speak to its controller.

    python -m recipes.alfworld.household_server [--port 5000] [--split heldout] [--args JSON]

It is a controller and its only worker in one. Requests are those of AgentBench's clients, JSON below `/api`:

    GET  /get_indices?name=household      the numbers of the tasks
    POST /start_sample                    {name, index} -> {session_id, output}
    POST /interact                        {session_id, agent_response: {status, content}} -> the same
    POST /cancel, /cancel_all             ends one session, or all
    POST /calculate_overall               {name, results} -> how many of the results are good
    GET  /list_workers, /list_sessions    what goes on

While the `status` of an output is `running`, its `history` ends with what the agent has to answer. Afterwards
`result.result` is 1 if the goal was reached, else 0. Nobody has to log in, so it listens on this machine only
unless `--host` says otherwise.

Source: src/server/task_controller.py and src/server/tasks/alfworld of https://github.com/THUDM/AgentBench.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web
from recipes.alfworld.household_world import Household

from astraflow.errors import ConfigError

__all__ = ["EXPIRES_S", "make_app"]

EXPIRES_S = 240.0
"""A session that is silent for so long is ended, as AgentBench's controller does."""
MOST_SESSIONS = 1_000
MOST_BODY_BYTES = 256 * 1024
"""Of a request: a reply is a thought and a command."""
MOST_RESULTS_BYTES = 64 * 1024 * 1024
"""Of the request for a summary, which has the histories of all samples."""
WORKER = "0"
"""The number of the only worker."""

_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Start(msgspec.Struct):
    name: _Name
    index: int | _Name


class _Reply(msgspec.Struct):
    status: Literal["normal", "cancelled", "agent context limit"] = "normal"
    content: str | None = None


class _Interact(msgspec.Struct):
    session_id: _Number
    agent_response: _Reply


class _Cancel(msgspec.Struct):
    session_id: _Number


class _Overall(msgspec.Struct):
    name: _Name
    results: list[dict[str, Any]]


@dataclass
class _Session:
    """A game that somebody plays."""

    index: int
    game: Any
    """The state of the world's episode."""
    start_s: float
    last_update_s: float
    history: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def add(self, role: Literal["user", "agent"], content: str) -> None:
        self.history.append({"role": role, "content": content})


_Request = TypeVar("_Request")


def make_app(
    world: Household,
    *,
    split: str = "heldout",
    name: str = "household",
    max_sessions: int = MOST_SESSIONS,
    clock: Callable[[], float] = time.time,
) -> web.Application:
    """The server as an aiohttp application.

    `name`: of the task. `max_sessions`: a start beyond it is answered 406, which tells a client to wait.
    `clock`: seconds since 1970. Raises: ConfigError for an unknown split.
    """
    controller = _Controller(world, split, name, max_sessions, clock)
    app = web.Application(client_max_size=MOST_RESULTS_BYTES)
    app.add_routes(
        [
            web.get("/api/get_indices", controller.indices),
            web.get("/api/list_workers", controller.workers),
            web.get("/api/list_sessions", controller.sessions),
            web.post("/api/start_sample", controller.start),
            web.post("/api/interact", controller.interact),
            web.post("/api/cancel", controller.cancel),
            web.post("/api/cancel_all", controller.cancel_all),
            web.post("/api/calculate_overall", controller.overall),
        ]
    )
    return app


class _Controller:
    """Holds the sessions. A handler changes them without waiting in between, so there are no locks."""

    def __init__(
        self, world: Household, split: str, name: str, max_sessions: int, clock: Callable[[], float]
    ) -> None:
        self._world = world
        self._tasks = world.tasks(split)
        self._name = name
        self._max_sessions = max_sessions
        self._clock = clock
        self._sessions: dict[int, _Session] = {}
        self._num_started = 0

    # --- what goes on -------------------------------------------------------------------------------

    async def indices(self, request: web.Request) -> web.Response:
        self._check_name(request.query.get("name", ""))
        return web.json_response(list(range(len(self._tasks))))

    async def workers(self, request: web.Request) -> web.Response:
        self._drop_expired()
        worker = {
            "id": int(WORKER),
            "address": str(request.url.origin()),
            "capacity": self._max_sessions,
            "current": len(self._sessions),
            "status": 0,  # alive
            "last_visit": self._clock(),
            "locked": False,
        }
        told = {"indices": list(range(len(self._tasks))), "workers": {WORKER: worker}}
        return web.json_response({self._name: told})

    async def sessions(self, request: web.Request) -> web.Response:
        self._drop_expired()
        told = {
            str(number): {
                "name": self._name,
                "index": session.index,
                "start": session.start_s,
                "last_update": session.last_update_s,
                "worker_id": int(WORKER),
                "locked": False,
            }
            for number, session in self._sessions.items()
        }
        return web.json_response(told)

    # --- games --------------------------------------------------------------------------------------

    async def start(self, request: web.Request) -> web.Response:
        asked = await _body(request, _Start)
        self._drop_expired()
        # AgentBench's controller answers 406 here: a worker for this task may still come.
        if asked.name != self._name:
            raise web.HTTPNotAcceptable(text=f"the only task here is {self._name!r}")
        if len(self._sessions) >= self._max_sessions:
            raise web.HTTPNotAcceptable(text=f"all {self._max_sessions} sessions are taken; try again later")
        if not isinstance(asked.index, int) or not 0 <= asked.index < len(self._tasks):
            raise web.HTTPBadRequest(
                text=f"index {asked.index!r} is none from 0 to {len(self._tasks) - 1}; ask /api/get_indices"
            )
        game, seen = self._world.reset(self._tasks[asked.index], seed=0)
        session = _Session(asked.index, game, self._clock(), self._clock())
        session.add("user", str(seen.messages))
        number = self._num_started
        self._num_started += 1
        self._sessions[number] = session
        return _answer(number, session, "running", None)

    async def interact(self, request: web.Request) -> web.Response:
        asked = await _body(request, _Interact)
        self._drop_expired()
        session = self._session(asked.session_id)
        reply = asked.agent_response
        if reply.status != "normal":
            del self._sessions[asked.session_id]
            status = "agent context limit" if reply.status == "agent context limit" else "unknown"
            return _answer(asked.session_id, session, status, {"result": 0})
        said = reply.content or ""
        seen = self._world.step(session.game, said)
        session.add("agent", said)
        session.add("user", str(seen.messages))
        session.last_update_s = self._clock()
        if not seen.is_done:
            return _answer(asked.session_id, session, "running", None)
        del self._sessions[asked.session_id]
        return _answer(
            asked.session_id, session, self._ending(session, seen.reward), {"result": int(seen.reward)}
        )

    def _ending(self, session: _Session, reward: float) -> str:
        """Why a game is over."""
        if reward:
            return "completed"
        is_long = session.game.num_turns >= self._world.max_turns
        return "task limit reached" if is_long else "agent invalid action"  # it repeated itself

    async def cancel(self, request: web.Request) -> web.Response:
        asked = await _body(request, _Cancel)
        self._session(asked.session_id)
        del self._sessions[asked.session_id]
        return web.json_response({"session_id": asked.session_id})

    async def cancel_all(self, request: web.Request) -> web.Response:
        self._sessions.clear()
        return web.json_response(None)

    async def overall(self, request: web.Request) -> web.Response:
        asked = await _body(request, _Overall, most_bytes=MOST_RESULTS_BYTES)
        self._check_name(asked.name)
        num_good = sum(_is_good(result) for result in asked.results)
        total = len(asked.results)
        overall = {"total": total, "pass": num_good, "wrong": total - num_good}
        return web.json_response({"overall": {**overall, "success_rate": num_good / total if total else 0}})

    # --- sessions -----------------------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise web.HTTPBadRequest(text=f"there is no task {name[:80]!r}; the only one is {self._name!r}")

    def _session(self, number: int) -> _Session:
        if number not in self._sessions:
            raise web.HTTPBadRequest(
                text=f"there is no session {number}: it is over, or was silent for {EXPIRES_S:.0f} s"
            )
        return self._sessions[number]

    def _drop_expired(self) -> None:
        oldest_s = self._clock() - EXPIRES_S
        for number in [n for n, session in self._sessions.items() if session.last_update_s < oldest_s]:
            del self._sessions[number]


async def _body(request: web.Request, kind: type[_Request], *, most_bytes: int = MOST_BODY_BYTES) -> _Request:
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


def _answer(number: int, session: _Session, status: str, result: object) -> web.Response:
    output = {"index": session.index, "status": status, "result": result, "history": session.history}
    return web.json_response({"session_id": number, "output": output})


def _is_good(output: dict[str, Any]) -> bool:
    """Whether the result of a sample says that its goal was reached."""
    result = output.get("result")
    return isinstance(result, dict) and result.get("result") == 1


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--split", default="heldout", help="train or heldout")
    parser.add_argument(
        "--args", default="{}", type=json.loads, help='of the world, for example {"num_places": 14}'
    )
    parser.add_argument("--max-sessions", type=int, default=MOST_SESSIONS)
    given = parser.parse_args(arguments)
    try:
        app = make_app(Household(**given.args), split=given.split, max_sessions=given.max_sessions)
    except (ConfigError, TypeError) as err:
        parser.error(str(err))
    web.run_app(app, host=given.host, port=given.port)


if __name__ == "__main__":
    _main()
