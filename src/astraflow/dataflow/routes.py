"""Builds the app from the route table: one handler a route, roles checked, errors turned into replies.

Requests are Starlette's, the rest is not: its middleware and router cost more than a small request's work.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from astraflow.dataflow.api import ROUTES, Role, Route
from astraflow.dataflow.config import DataflowConfig
from astraflow.dataflow.dispatcher import Dispatcher
from astraflow.dataflow.routes_trainers import TrainerRoutes
from astraflow.dataflow.routes_views import ViewRoutes
from astraflow.dataflow.routes_workers import WorkerRoutes
from astraflow.dataflow.site import Site
from astraflow.dataflow.task_lookup import TaskLookup
from astraflow.errors import Error, RefusedError
from astraflow.service import error_response
from astraflow.types import RunInfo
from astraflow.weights.addresses import PeerRules

__all__ = ["make_app"]

_Handler = Callable[[Request], Awaitable[Response]]
_Entry = tuple[Route, _Handler]
_MAX_NAME = 256
"""Characters of a parameter in a path; no policy's or service's name is longer."""
_PARAM = re.compile(r"\{(\w+)(?::(\w+))?\}")


def make_app(
    dispatcher: Dispatcher,
    lookup: TaskLookup,
    run_info: RunInfo,
    config: DataflowConfig,
    *,
    peer_rules: PeerRules,
    max_tokens: Mapping[str, int],
) -> ASGIApp:
    """The dataflow's ASGI app. Authentication is the caller's (`service.TokenAuth` around it).

    `max_tokens`: trained policy -> its longest trajectory, 0 if that is not known.
    """
    site = Site(dispatcher, lookup, run_info, config, max_tokens, peer_rules)
    workers, trainers, views = WorkerRoutes(site), TrainerRoutes(site), ViewRoutes(site)
    handlers: dict[str, _Handler] = {
        "run": views.run,
        "health": views.health,
        "register": workers.register,
        "heartbeat": workers.heartbeat,
        "drain": workers.drain,
        "leases": workers.leases,
        "episodes": workers.episodes,
        "push_tasks": workers.push_tasks,
        "attach": trainers.attach,
        "batch": trainers.batch,
        "publish": trainers.publish,
        "versions": views.versions,
        "commit": trainers.commit,
        "release": trainers.release,
        "drop_batch": trainers.drop_batch,
        "steps": views.steps,
        "evals": views.evals,
        "status": views.status,
        "stop": views.stop,
        "metrics": views.metrics,
        "openapi": views.openapi,
    }
    return _App([(route, handlers[route.name]) for route in ROUTES])


class _App:
    """Finds a request's handler, checks the caller's role, turns errors of ours into replies."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._fixed: dict[str, dict[str, _Entry]] = {}
        """Path -> method -> what to call."""
        self._patterns: list[tuple[re.Pattern[str], dict[str, _Entry]]] = []
        patterns: dict[str, dict[str, _Entry]] = {}
        for route, handler in entries:
            table = patterns if "{" in route.path else self._fixed
            table.setdefault(route.path, {})[route.method] = (route, handler)
        self._patterns += [(re.compile(_PARAM.sub(_group, p)), table) for p, table in patterns.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served here, not {scope['type']!r}")
        request = Request(scope, receive, send)
        try:
            response = await self._answer(scope, request)
        except ClientDisconnect:
            return
        except Error as err:
            response = error_response(err, request)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, request: Request) -> Response:
        method, path = cast("str", scope["method"]), cast("str", scope["path"])
        if method == "HEAD":
            method = "GET"
        entries = self._fixed.get(path) or self._matched(scope, path)
        if method not in entries:
            allowed = " or ".join(entries) or "no method"
            raise RefusedError(
                f"{method} {path[:_MAX_NAME]}: there is {allowed} of this path; see GET /openapi.json",
                code="method_not_allowed" if entries else "not_found",
                status=405 if entries else 404,
            )
        route, handler = entries[method]
        role = cast("Role", scope.get("role", "admin"))
        if role not in route.roles:
            raise RefusedError(
                f"{route.method} {route.path} is for {' and '.join(route.roles)}; this token's role is "
                f"{role}",
                code="forbidden",
                status=403,
            )
        return await handler(request)

    def _matched(self, scope: Scope, path: str) -> "dict[str, _Entry]":
        for pattern, entries in self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                scope["path_params"] = match.groupdict()
                return entries
        return {}


def _group(match: re.Match[str]) -> str:
    """The pattern of a path parameter."""
    kind = "[0-9]{1,15}" if match[2] == "int" else f"[^/]{{1,{_MAX_NAME}}}"
    return f"(?P<{match[1]}>{kind})"
