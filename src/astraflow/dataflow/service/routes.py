"""Builds the dataflow's ASGI app from the route table: finds handlers, checks roles, and answers errors."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as AppRoute
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from astraflow.dataflow.api import ROUTES, Route
from astraflow.dataflow.service.result_recorder import ResultRecorder
from astraflow.dataflow.service.routes_progress import ProgressRoutes
from astraflow.dataflow.service.routes_shared import ServedRun
from astraflow.dataflow.service.routes_trainers import Handler, TrainerRoutes
from astraflow.dataflow.service.routes_views import ViewRoutes
from astraflow.dataflow.service.routes_workers import WorkerRoutes
from astraflow.errors import Error, RefusedError
from astraflow.service.messages import error_response

__all__ = ["make_app"]

_MAX_SHOWN = 256
"""Most characters of a path that a message repeats."""


def make_app(run: ServedRun) -> ASGIApp:
    """Builds the dataflow's ASGI app. The caller adds authentication by wrapping it in `TokenAuth`."""
    recorder = ResultRecorder(run)
    workers = WorkerRoutes(run, recorder)
    progress = ProgressRoutes(run, recorder)
    trainers = TrainerRoutes(run)
    views = ViewRoutes(run)
    handlers: dict[str, Handler] = {
        "run": views.run,
        "health": views.health,
        "register": workers.register,
        "heartbeat": workers.heartbeat,
        "drain": workers.drain,
        "ask_to_leave": workers.ask_to_leave,
        "leases": workers.leases,
        "episodes": workers.episodes,
        "tell_progress": progress.tell,
        "earlier_progress": progress.earlier,
        "push_tasks": workers.push_tasks,
        "attach": trainers.track_contact("attach", trainers.attach),
        "batch": trainers.track_contact("batch", trainers.batch),
        "publish": trainers.track_contact("publish", trainers.publish),
        "versions": views.versions,
        "commit": trainers.track_contact("commit", trainers.commit),
        "release": trainers.track_contact("release", trainers.release),
        "step_failed": trainers.track_contact("step_failed", trainers.step_failed),
        "drop_batch": trainers.drop_batch,
        "steps": views.steps,
        "evals": views.evals,
        "status": views.status,
        "progress": progress.totals,
        "stop": views.stop,
        "metrics": views.metrics,
        "openapi": views.openapi,
    }
    endpoints = [_Endpoint(route, handlers[route.name]) for route in ROUTES]
    exception_handlers: dict[type[Exception], ExceptionHandler] = {HTTPException: _answer_unknown_route}
    app = Starlette(routes=[*map(_app_route, endpoints)], exception_handlers=exception_handlers)
    # A path with an extra slash is unknown; it is not redirected.
    app.router.redirect_slashes = False
    fixed = [endpoint for endpoint in endpoints if "{" not in endpoint.route.path]
    return _FixedPaths({(each.route.method, each.route.path): each for each in fixed}, app)


def _app_route(endpoint: "_Endpoint") -> AppRoute:
    route = endpoint.route
    # Starlette's own `int` converter fails on a number of thousands of digits; the handler reads the text.
    path = route.path.replace(":int}", "}")
    return AppRoute(path, endpoint, methods=[route.method], name=route.name)


@dataclass(frozen=True, slots=True)
class _FixedPaths:
    """The ASGI app. It finds routes without parameters, which get nearly all requests, in a dict.

    Starlette's layers cost 15 us of CPU time per request. They handle paths with parameters, and unknown
    paths and methods.
    """

    endpoints: Mapping[tuple[str, str], "_Endpoint"]
    """(method, path) -> endpoint."""
    others: ASGIApp

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self.endpoints.get((scope.get("method", ""), scope.get("path", "")), self.others)
        return app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """The ASGI app of one route: checks the caller's role, calls the handler, and answers errors.

    It is an app and not a function, because Starlette wraps each function twice to handle its exceptions.
    """

    route: Route
    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            self._check_role(scope.get("role", "admin"))
            response = await self.handler(request)
        except Error as err:
            response = error_response(err, request)
        await response(scope, receive, send)

    def _check_role(self, role: str) -> None:
        """Raises: RefusedError if the route is not for this role."""
        if role not in self.route.roles:
            raise RefusedError(
                f"{self.route.method} {self.route.path} needs a token of role "
                f"{' or '.join(self.route.roles)}; this token's role is {role}",
                code="forbidden",
                status=403,
            )


async def _answer_unknown_route(request: Request, error: Exception) -> Response:
    """Answers an unknown path (Starlette raises 404) or an unknown method of a known path (405)."""
    assert isinstance(error, HTTPException)
    is_path_known = error.status_code == 405
    problem = "the path does not support this method" if is_path_known else "this path does not exist"
    refusal = RefusedError(
        f"{request.method} {request.url.path[:_MAX_SHOWN]}: {problem}; see GET /openapi.json",
        code="method_not_allowed" if is_path_known else "not_found",
        status=error.status_code,
    )
    return error_response(refusal, request)
