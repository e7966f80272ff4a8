"""Serves `household` as a task of AgentBench v0.2: to its agents, and to all who can speak to its controller.
The same server speaks the adapter protocol of AstraFlow's prototype too (`household_adapter.py`).

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
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from recipes.alfworld.household_adapter import Adapter
from recipes.alfworld.household_sessions import EXPIRES_S, FullError, Session, Sessions, body_of
from recipes.alfworld.household_world import Household

from astraflow.errors import ConfigError

__all__ = ["make_app"]

MOST_SESSIONS = 1_000
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
    sessions = Sessions(world, world.tasks(split), max_sessions, clock)
    controller = _Controller(sessions, name)
    adapter = Adapter(sessions, name)
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
            web.get("/api/task/info", adapter.info),
            web.get("/api/health", adapter.health),
            web.post("/api/episode/start", adapter.start),
            web.post("/api/episode/step", adapter.step),
            web.post("/api/episode/cancel", adapter.cancel),
        ]
    )
    return app


class _Controller:
    """AgentBench's requests."""

    def __init__(self, sessions: Sessions, name: str) -> None:
        self._sessions = sessions
        self._name = name

    # --- what goes on -------------------------------------------------------------------------------

    async def indices(self, request: web.Request) -> web.Response:
        self._check_name(request.query.get("name", ""))
        return web.json_response(list(range(len(self._sessions.tasks))))

    async def workers(self, request: web.Request) -> web.Response:
        self._sessions.drop_expired()
        worker = {
            "id": int(WORKER),
            "address": str(request.url.origin()),
            "capacity": self._sessions.max_sessions,
            "current": len(self._sessions.open),
            "status": 0,  # alive
            "last_visit": self._sessions.clock(),
            "locked": False,
        }
        told = {"indices": list(range(len(self._sessions.tasks))), "workers": {WORKER: worker}}
        return web.json_response({self._name: told})

    async def sessions(self, request: web.Request) -> web.Response:
        self._sessions.drop_expired()
        told = {
            str(number): {
                "name": self._name,
                "index": session.index,
                "start": session.start_s,
                "last_update": session.last_update_s,
                "worker_id": int(WORKER),
                "locked": False,
            }
            for number, session in self._sessions.open.items()
        }
        return web.json_response(told)

    # --- games --------------------------------------------------------------------------------------

    async def start(self, request: web.Request) -> web.Response:
        asked = await body_of(request, _Start)
        self._sessions.drop_expired()
        # AgentBench's controller answers 406 here: a worker for this task may still come.
        if asked.name != self._name:
            raise web.HTTPNotAcceptable(text=f"the only task here is {self._name!r}")
        if not isinstance(asked.index, int) or not 0 <= asked.index < len(self._sessions.tasks):
            raise web.HTTPBadRequest(
                text=f"index {asked.index!r} is none from 0 to {len(self._sessions.tasks) - 1}; ask "
                "/api/get_indices"
            )
        try:
            number, session = self._sessions.start(asked.index)
        except FullError:
            most = self._sessions.max_sessions
            raise web.HTTPNotAcceptable(text=f"all {most} sessions are taken; try again later") from None
        return _answer(number, session, "running", None)

    async def interact(self, request: web.Request) -> web.Response:
        asked = await body_of(request, _Interact)
        self._sessions.drop_expired()
        session = self._session(asked.session_id)
        reply = asked.agent_response
        if reply.status != "normal":
            del self._sessions.open[asked.session_id]
            status = "agent context limit" if reply.status == "agent context limit" else "unknown"
            return _answer(asked.session_id, session, status, {"result": 0})
        seen = self._sessions.step(asked.session_id, reply.content or "")
        if not seen.is_done:
            return _answer(asked.session_id, session, "running", None)
        ending = self._sessions.ending(session, seen.reward)
        return _answer(asked.session_id, session, ending, {"result": int(seen.reward)})

    async def cancel(self, request: web.Request) -> web.Response:
        asked = await body_of(request, _Cancel)
        self._session(asked.session_id)
        del self._sessions.open[asked.session_id]
        return web.json_response({"session_id": asked.session_id})

    async def cancel_all(self, request: web.Request) -> web.Response:
        self._sessions.open.clear()
        return web.json_response(None)

    async def overall(self, request: web.Request) -> web.Response:
        asked = await body_of(request, _Overall, most_bytes=MOST_RESULTS_BYTES)
        self._check_name(asked.name)
        num_good = sum(_is_good(result) for result in asked.results)
        total = len(asked.results)
        overall = {"total": total, "pass": num_good, "wrong": total - num_good}
        return web.json_response({"overall": {**overall, "success_rate": num_good / total if total else 0}})

    # --- sessions -----------------------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise web.HTTPBadRequest(text=f"there is no task {name[:80]!r}; the only one is {self._name!r}")

    def _session(self, number: int) -> Session:
        session = self._sessions.find(number)
        if session is None:
            raise web.HTTPBadRequest(
                text=f"there is no session {number}: it is over, or was silent for {EXPIRES_S:.0f} s"
            )
        return session


def _answer(number: int, session: Session, status: str, result: object) -> web.Response:
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
