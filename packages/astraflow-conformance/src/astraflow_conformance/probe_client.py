"""Client for a dataflow under test: one request, one answer, no retries, and a check of every refusal.

AstraFlow's own client cannot be used here, because it retries and hides the answers that the rules are about.
"""

from collections.abc import Mapping
from typing import TypeVar, overload
from urllib.parse import urlencode

from astraflow import wire
from astraflow.errors import Error, WireError
from astraflow.service.client import HttpReply, Transport
from astraflow.types import ErrorReply, Item
from astraflow_conformance.report import AbandonedError, Checks

__all__ = ["ProbeClient", "RefusalError"]

_ItemT = TypeVar("_ItemT", bound=Item)
_ANSWER_S = 60.0
"""Longest wait for an answer. A long poll takes at most 25 s."""


class RefusalError(Error):
    """The dataflow refused a request."""

    def __init__(self, where: str, status: int, code: str, message: str) -> None:
        super().__init__(f"{where}: {status} {code}: {message}")
        self.status = status
        self.code = code


class ProbeClient:
    """One caller with one token. Example: `info = await client.ask("GET", "/v1/run", RunInfo)`."""

    def __init__(self, transport: Transport, checks: Checks, *, token: str = "") -> None:
        self._transport = transport
        self._checks = checks
        self.token = token

    @overload
    async def ask(
        self,
        method: str,
        path: str,
        reply_type: type[_ItemT],
        body: Item | None = None,
        params: Mapping[str, str] | None = None,
    ) -> _ItemT: ...

    @overload
    async def ask(
        self,
        method: str,
        path: str,
        reply_type: None,
        body: Item | None = None,
        params: Mapping[str, str] | None = None,
    ) -> None: ...

    async def ask(
        self,
        method: str,
        path: str,
        reply_type: type[_ItemT] | None,
        body: Item | None = None,
        params: Mapping[str, str] | None = None,
    ) -> _ItemT | None:
        """Sends an item, and returns the answer.

        Raises: RefusalError; AbandonedError if there is no readable answer.
        """
        target = f"{path}?{urlencode(params)}" if params else path
        payload = wire.encode(body) if body is not None else b""
        reply = await self.send(method, target, payload)
        if reply.status >= 400:
            raise self.refusal(f"{method} {path}", reply)
        if reply_type is None:
            return None
        try:
            return wire.decode(reply.body, reply_type, reply.media_type)
        except WireError as err:
            raise AbandonedError(f"{method} {path}: the answer cannot be read: {err}") from err

    async def refused(
        self, method: str, path: str, body: Item | None = None, params: Mapping[str, str] | None = None
    ) -> RefusalError | None:
        """Sends an item that should be refused. Returns the refusal, or None if the request succeeded."""
        try:
            await self.ask(method, path, None, body, params)
        except RefusalError as refusal:
            return refusal
        return None

    async def send(
        self, method: str, target: str, body: bytes, *, sends: str = wire.MSGPACK, accepts: str = wire.MSGPACK
    ) -> HttpReply:
        """Sends bytes, and returns the undecoded answer. Raises: AbandonedError if there is none."""
        headers = {"Content-Type": sends}
        if accepts:
            headers["Accept"] = accepts
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            return await self._transport.request(
                method, target, headers=headers, body=body, timeout_s=_ANSWER_S
            )
        except (OSError, TimeoutError) as err:
            raise AbandonedError(f"{method} {target}: no answer: {err!r}") from err

    def refusal(self, where: str, reply: HttpReply) -> RefusalError:
        """Decodes a refusal, and checks whether it has the form that rule D3 requires."""
        try:
            error = wire.decode(reply.body, ErrorReply, reply.media_type)
        except WireError as err:
            self._checks.broke("D3", f"{where} answered {reply.status} with {reply.body[:80]!r}: {err}")
            return RefusalError(where, reply.status, "", "")
        self._checks.that("D3", error.code and error.message, f"{where}: code or message is empty")
        return RefusalError(where, reply.status, error.code, error.message)
