"""HTTP to a server that an engine uses: JSON both ways, every call with a deadline."""

import json
from collections.abc import Mapping
from typing import Any, cast

import aiohttp

from astraflow.errors import RefusedError, UnavailableError

__all__ = ["ServerHttp"]

_MAX_TOLD = 400
"""Characters of a server's answer in an error message."""
_KEEPALIVE_S = 2.0
"""Such servers close idle connections after 5 s; one that is older here may be just about to be closed."""
_CONNECT_S = 30.0


class ServerHttp:
    """Calls one server, by its URL or its Unix socket. `close` it.

    Example: `await ServerHttp("http://127.0.0.1:8000").post("/resume")`.
    """

    def __init__(self, url: str, *, socket: str = "", token: str = "", timeout_s: float = 600.0) -> None:
        self.url, self._socket, self._timeout_s = url.rstrip("/"), socket, timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float = 0.0) -> str:
        """The text at a path. Raises: UnavailableError, RefusedError."""
        return await self._call("GET", path, None, timeout_s)

    async def post(
        self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = 0.0
    ) -> Mapping[str, Any]:
        """The decoded answer; empty if it is no JSON object. Raises: UnavailableError, RefusedError."""
        text = await self._call("POST", path, body or {}, timeout_s)
        try:
            answer: object = json.loads(text) if text else None
        except ValueError as err:
            raise UnavailableError(f"{self.url}{path} answered no JSON: {text[:_MAX_TOLD]!r}") from err
        return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float) -> str:
        limit_s = timeout_s or self._timeout_s
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONNECT_S)
        try:
            async with self._http().request(
                method, self.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as reply:
                text = await reply.text()
        except TimeoutError as err:
            raise UnavailableError(f"{self.url}{path} did not answer in {limit_s:g} s") from err
        except (aiohttp.ClientError, OSError, ValueError) as err:
            raise UnavailableError(f"{self.url}{path}: {type(err).__name__}: {err}") from err
        if reply.status >= 300:
            raise RefusedError(
                f"{self.url}{path} answered {reply.status}: {text[:_MAX_TOLD]}", status=reply.status
            )
        return text

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = (
                aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=_KEEPALIVE_S)
                if self._socket
                else aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            )
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self._session
