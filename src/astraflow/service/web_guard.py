"""Keeps web pages from calling a service.

A browser lets any page send requests to loopback. A page of another site is identified by `Origin` or
`Sec-Fetch-Site`. A page whose host name was made to resolve to this machine (DNS rebinding) is identified by
`Host`. Programs send neither of the first two headers, and call the service by a name that it knows. A page
can also send bodies with a simple Content-Type without asking the service first; `messages.read_item` refuses
these.
"""

import contextlib
import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from astraflow import wire
from astraflow.types import ErrorReply

__all__ = ["WebGuard", "WebRules"]

_MAX_KNOWN = 256
"""Number of accepted `Host` values that are cached, so that each is parsed once."""


@dataclass(frozen=True, slots=True)
class WebRules:
    """What a service accepts in addition to its own name."""

    host_names: tuple[str, ...] = ()
    """Names by which callers reach the service, for example that of a proxy."""
    origins: tuple[str, ...] = ()
    """Origins whose pages may call the service, for example `https://dashboard.example.org`."""
    needs_token: bool = False
    """Whether every caller must show a token. Pages don't have one, so any host name is then accepted."""


@dataclass(frozen=True)
class WebGuard:
    """The outermost ASGI middleware: responds with 403 to requests from web pages."""

    app: ASGIApp
    rules: WebRules
    _known_hosts: set[bytes] = field(default_factory=set[bytes])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            with contextlib.suppress(ClientDisconnect):  # nobody reads a reply
                await self.app(scope, receive, send)
            return
        body = wire.encode(problem, wire.JSON)
        headers = [(b"content-type", wire.JSON.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _problem(self, scope: Scope) -> ErrorReply | None:
        """Returns the problem with a request's headers, or None if there is none."""
        host = b""
        origin: bytes | None = None
        site = b""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
                if value not in self._known_hosts and not self._accepts_host(value):
                    return ErrorReply(
                        code="unknown_host",
                        message=f"{value.decode('latin-1')!r} is not a name of this service; call it by its "
                        "address, or list the name in dataflow.web.host_names",
                    )
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        if origin is None and site not in {b"cross-site", b"same-site"}:
            return None
        given = (origin or b"").decode("latin-1").lower()
        own = f"{scope['scheme']}://{host.decode('latin-1')}".lower()
        if given in {own, *self.rules.origins}:
            return None
        page = repr(given) if origin is not None else "another site"
        return ErrorReply(
            code="foreign_origin",
            message=f"a web page of {page} may not call this service; to allow it, list its origin in "
            "dataflow.web.origins",
        )

    def _accepts_host(self, host: bytes) -> bool:
        """Checks whether a `Host` is accepted. Addresses always are, because only names can be rebound."""
        if self.rules.needs_token:
            return True
        name = _host_name(host)
        is_known = name == "localhost" or name in {own.lower().rstrip(".") for own in self.rules.host_names}
        if not is_known:
            with contextlib.suppress(ValueError):
                ipaddress.ip_address(name)
                is_known = True
        if is_known and len(self._known_hosts) < _MAX_KNOWN:
            self._known_hosts.add(host)
        return is_known


def _host_name(host: bytes) -> str:
    """Returns the host name in lower case, without its port; empty if there is none."""
    try:
        return (urlsplit(f"//{host.decode('ascii')}").hostname or "").rstrip(".")
    except (UnicodeDecodeError, ValueError):
        return ""
