"""Builds the dataflow's ASGI app from the route table: finds the handler, checks roles, answers errors."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as AppRoute
from starlette.types import ASGIApp, ExceptionHandler

from astraflow.dataflow.api import ROUTES, Route
from astraflow.dataflow.routes_shared import ServedRun
from astraflow.dataflow.routes_trainers import TrainerRoutes
from astraflow.dataflow.routes_views import ViewRoutes
from astraflow.dataflow.routes_workers import WorkerRoutes
from astraflow.errors import Error, RefusedError
from astraflow.service.messages import error_response

__all__ = ["make_app"]

_Handler = Callable[[Request], Awaitable[Response]]
_MAX_SHOWN = 256
"""Characters of a path that a message repeats."""


def make_app(run: ServedRun) -> ASGIApp:
    """The dataflow's ASGI app. Authentication is the caller's (`TokenAuth` around it)."""
    workers = WorkerRoutes(run)
    trainers = TrainerRoutes(run)
    views = ViewRoutes(run)
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
    exception_handlers: dict[type[Exception], ExceptionHandler] = {
        Error: _answer_error,
        HTTPException: _answer_unknown_route,
        ClientDisconnect: _answer_nobody,
    }
    app = Starlette(
        routes=[_app_route(route, handlers[route.name]) for route in ROUTES],
        exception_handlers=exception_handlers,
    )
    # A path with a slash too many is unknown, not moved elsewhere.
    app.router.redirect_slashes = False
    return app


def _app_route(route: Route, handler: _Handler) -> AppRoute:
    async def for_its_roles(request: Request) -> Response:
        role = request.scope.get("role", "admin")
        if role not in route.roles:
            raise RefusedError(
                f"{route.method} {route.path} is for {' and '.join(route.roles)}; this token's role is "
                f"{role}",
                code="forbidden",
                status=403,
            )
        return await handler(request)

    # Starlette's own `int` converter fails on a number of thousands of digits; the handler reads the text.
    path = route.path.replace(":int}", "}")
    return AppRoute(path, for_its_roles, methods=[route.method], name=route.name)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, Error)
    return error_response(error, request)


async def _answer_unknown_route(request: Request, error: Exception) -> Response:
    """Starlette raises 404 for a path that no route has, 405 for a method that its routes do not have."""
    assert isinstance(error, HTTPException)
    is_path_known = error.status_code == 405
    problem = "the path has other methods" if is_path_known else "there is no such path"
    refusal = RefusedError(
        f"{request.method} {request.url.path[:_MAX_SHOWN]}: {problem}; see GET /openapi.json",
        code="method_not_allowed" if is_path_known else "not_found",
        status=error.status_code,
    )
    return error_response(refusal, request)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The caller hung up while its body was read, so nobody reads this answer."""
    return Response(status_code=400)
