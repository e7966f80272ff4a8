"""Serves the viewer's page, for `astraflow view` and for the process that `astraflow run` starts.

On loopback, neither the page nor the services need a token. Beyond loopback, everything except the empty page
needs a token, which the page asks for.
"""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from astraflow.addons.view.app import make_app
from astraflow.addons.view.remote import RemoteRun
from astraflow.addons.view.runs import ViewedRuns
from astraflow.addons.view.viewer_page import PAGE_PATHS
from astraflow.errors import ConfigError
from astraflow.service.loopback import is_loopback
from astraflow.service.server import HttpServer, TokenAuth
from astraflow.service.web_guard import WebRules

__all__ = ["Viewing", "new_token", "serve"]

_LOOK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Viewing:
    """How browsers reach a viewer.

    Example: `Viewing(host="127.0.0.1", port=7433)`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    """Required beyond loopback."""
    tls: tuple[str, str] | None = None
    """Paths of a certificate and its key."""
    idle_s: float = float("inf")
    """The server exits after this time without a request."""


class _LastAsked:
    """ASGI middleware that records the time of the newest request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.at_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.at_s = time.monotonic()
        await self._app(scope, receive, send)


async def serve(
    stop: asyncio.Event,
    roots: Sequence[Path],
    viewing: Viewing,
    *,
    remotes: Sequence[RemoteRun] = (),
    listener: socket.socket | None = None,
    started: "asyncio.Future[str] | None" = None,
) -> None:
    """Serves until `stop` is set. `started` receives the base URL.

    Raises: ConfigError if the server can't listen on the address, or if a required token is missing.
    """
    if not is_loopback(viewing.host) and not viewing.token:
        raise ConfigError(f"the viewer on {viewing.host} needs a token, for others reach it there")
    runs = ViewedRuns(roots, remotes)
    tokens = {viewing.token: "viewer"} if viewing.token else {}
    app = _LastAsked(TokenAuth(make_app(runs), tokens, open_paths=PAGE_PATHS))
    server = HttpServer(
        app,
        host=viewing.host,
        port=viewing.port,
        name="viewer",
        tls=viewing.tls,
        rules=WebRules(needs_token=bool(tokens)),
        listener=listener,
    )
    url = await server.start()
    if started is not None:
        started.set_result(url)
    try:
        while not stop.is_set() and time.monotonic() - app.at_s < viewing.idle_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await stop.wait()
    finally:
        await server.stop()
        await asyncio.to_thread(runs.close)


def new_token() -> str:
    """Makes a random token that can't be guessed."""
    return secrets.token_urlsafe(24)
