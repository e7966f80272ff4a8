"""Serves an ASGI app over HTTP in the running event loop, and checks callers' tokens."""

import asyncio
import contextlib
import hmac
import socket
import ssl
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from astraflow.errors import ConfigError, RefusedError
from astraflow.service.connections import ConnectionLimits, Connections
from astraflow.service.messages import error_response
from astraflow.service.vital import vital
from astraflow.service.web_guard import WebGuard, WebRules

__all__ = ["HttpServer", "TokenAuth"]

_NEVER_S = 86_400
_BACKLOG = 2048
"""Number of connections that may wait to be accepted."""


@dataclass(frozen=True)
class TokenAuth:
    """ASGI middleware that maps a bearer token to a role.

    Without tokens, everything is open, which is meant only for loopback.

    `tokens` maps tokens to roles; the role is stored in `scope["role"]`. `open_paths` need no token.
    """

    app: ASGIApp
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    open_paths: frozenset[str] = frozenset({"/v1/health"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.tokens or scope["path"] in self.open_paths:
            scope["role"] = "admin"
            await self.app(scope, receive, send)
            return
        headers = cast("list[tuple[bytes, bytes]]", scope["headers"])
        given = next((value for name, value in headers if name == b"authorization"), b"")
        role: str | None = None
        # Compared with all tokens, each in constant time, so that the response time reveals nothing.
        for token, own_role in self.tokens.items():
            if hmac.compare_digest(token.encode(), given.removeprefix(b"Bearer ")):
                role = own_role
        if role is None:
            remedy = "missing or wrong token; pass --token-file, or set ASTRAFLOW_TOKEN"
            error = RefusedError(remedy, code="unauthorized", status=401)
            await error_response(error, Request(scope))(scope, receive, send)
            return
        scope["role"] = role
        await self.app(scope, receive, send)


class HttpServer:
    """Serves an ASGI app inside the running loop. `start` binds before it returns.

    `tls`: files of a certificate and its key; None serves plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        name: str,
        tls: tuple[str, str] | None = None,
        limits: ConnectionLimits | None = None,
        rules: WebRules | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """`rules`: which web pages and which other host names are accepted; None accepts none.

        `listener`: a socket that is already listening, instead of host and port.
        """
        self._given = listener
        self._host = host
        self._port = port
        self._name = name
        self._tls = tls
        self._connections = Connections(limits or ConnectionLimits())
        rules = rules or WebRules()
        rules = replace(rules, host_names=(*rules.host_names, host))
        config = uvicorn.Config(
            cast("Any", WebGuard(app, rules)),
            ssl_certfile=tls[0] if tls else None,
            ssl_keyfile=tls[1] if tls else None,
            http=self._connections.protocol,
            log_level="error",  # a warning per malformed request would let any caller fill the disk
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_NEVER_S,  # `Connections` closes idle ones
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Binds and serves; returns the base URL.

        Raises: ConfigError if the port is taken, or the certificate and key are unusable.
        """
        if self._tls is not None:
            _check_tls(self._name, *self._tls)
        listener = self._given or self._listen()
        port = cast("tuple[str, int]", listener.getsockname())[1]
        self._connections.open()
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name=f"http:{self._name}")
        vital(self._task, f"the HTTP server of {self._name}", may_end=lambda: self._server.should_exit)
        scheme = "https" if self._tls else "http"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{scheme}://{host}:{port}"

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        # A restarted service must get its port although closed connections still occupy it (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit this option. asyncio sets it only on sockets with an explicit protocol
        # number. Without it, responses on a kept connection wait 40 ms for the caller's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind((self._host, self._port))
        except OSError as err:
            listener.close()
            raise ConfigError(
                f"{self._name}: cannot listen on {self._host}:{self._port}: {err.strerror}; choose another "
                "port, or 0 for a free one"
            ) from err
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        return listener

    async def stop(self, *, grace_s: float = 1.0) -> None:
        """Stops accepting connections, gives running responses `grace_s` to finish, then cuts them off."""
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = grace_s  # pyright: ignore[reportAttributeAccessIssue] (seconds)
        self._server.should_exit = True
        # `wait` doesn't raise the task's exception: if the server had failed, `vital` would already have
        # ended the service.
        await asyncio.wait({self._task})
        await self._connections.close()
        self._task = None


def _check_tls(name: str, cert: str, key: str) -> None:
    """Checks a certificate and its key. Raises: ConfigError if they don't match or cannot be read."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except OSError as err:
        raise ConfigError(
            f"{name}: certificate {cert} with key {key} cannot be used: {err}; expected two "
            "matching PEM files, the key without a password"
        ) from err


class _QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers: `run_service` owns the process's signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
