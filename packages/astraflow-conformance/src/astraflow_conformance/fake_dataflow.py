"""Base of the two fake dataflows: counts requests, injects faults, and lets scenarios wait for events.

Faults are injected between a route's handler and the caller. Either the answer is lost after the request was
processed, or the request is refused with 503 before it is processed.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from astraflow.errors import Error, RefusedError, WireError
from astraflow.service.messages import error_response
from astraflow_conformance.report import BrokenError, Checks

__all__ = ["FakeDataflow", "bad_gateway"]

_START_FACTOR = 4.0
"""Factor on the patience while a service starts, because it imports libraries and loads its first weights."""

Handler = Callable[[Request], Awaitable[Response]]


def bad_gateway() -> Response:
    """Makes the answer of a proxy whose upstream is gone. It isn't an item of the protocol."""
    return Response("<html><h1>502 Bad Gateway</h1></html>", status_code=502, media_type="text/html")


class FakeDataflow:
    """An ASGI app that acts as the dataflow for a candidate.

    Subclasses fill `handlers` (route name -> handler) and implement `route_of`.
    """

    def __init__(
        self, checks: Checks, *, token: str, patience_s: float, item_rule: str, token_rule: str
    ) -> None:
        self.checks = checks
        self.token = token
        self.patience_s = patience_s
        self.num: Counter[str] = Counter()
        """Number of requests per route."""
        self.lost: Counter[str] = Counter()
        """Route -> number of future answers that are lost after their request was processed."""
        self.put_off: Counter[str] = Counter()
        """Route -> number of future requests that are answered with 503 and not processed."""
        self.changed = asyncio.Condition()
        """Notified before and after each request, and by scenarios."""
        self.handlers: dict[str, Handler] = {}
        self._item_rule = item_rule
        self._token_rule = token_rule

    def route_of(self, method: str, path: str) -> str:
        """Returns the name of a route; empty if there is no such route."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request, as an ASGI app."""
        request = Request(scope, receive, send)
        route = self.route_of(request.method, request.url.path)
        try:
            response = await self._answer(route, request)
        except Error as err:
            response = error_response(err, request)
        await self.notify()
        await response(scope, receive, send)

    async def _answer(self, route: str, request: Request) -> Response:
        self.num[route] += 1
        await self.notify()
        self.check_token(request)
        if not route:
            raise RefusedError(f"{request.url.path} is not a route", code="not_found", status=404)
        if self.put_off[route] > 0:
            self.put_off[route] -= 1
            raise RefusedError("nothing is accepted for the moment", code="unavailable", status=503)
        try:
            response = await self.handlers[route](request)
        except WireError as err:
            self.checks.broke(self._item_rule, f"{request.method} {request.url.path}: {err}")
            raise
        self.checks.kept(self._item_rule)
        if self.lost[route] > 0:
            self.lost[route] -= 1
            return bad_gateway()
        return response

    def check_token(self, request: Request) -> None:
        """Checks the token.

        A request with a wrong token is still answered, so that the other rules can also be checked.
        """
        given = request.headers.get("authorization", "")
        if not self.token:
            self.checks.skip(self._token_rule, "the kit was told to use no token")
            return
        path = request.url.path
        holds = given == f"Bearer {self.token}"
        self.checks.that(self._token_rule, holds, f"{path}: authorization {given[:20]!r}")

    async def notify(self) -> None:
        """Wakes the scenarios that are waiting for a condition."""
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], object], *, wait_s: float) -> bool:
        """Waits for a condition. Returns whether it became true in time."""
        try:
            async with asyncio.timeout(wait_s), self.changed:
                await self.changed.wait_for(condition)
        except TimeoutError:
            return bool(condition())
        return True

    async def expect(
        self, rule: str, condition: Callable[[], object], what: str, *, is_start: bool = False
    ) -> None:
        """Waits for what a rule asks for. While a service starts, it waits several times as long.

        Raises: BrokenError if the condition doesn't become true in time.
        """
        began_s = time.monotonic()
        factor = _START_FACTOR if is_start else 1.0
        if not await self.until(condition, wait_s=factor * self.patience_s):
            waited_s = time.monotonic() - began_s
            detail = f"{what}: not within {waited_s:.0f} s"
            self.checks.broke(rule, detail)
            raise BrokenError(rule, detail)
        self.checks.kept(rule)
