"""Candidates for the conformance kit: our own services in this process, whole or deliberately broken."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from astraflow import wire
from astraflow.service import Reply, Transport
from astraflow.types import Item


class Mutation:
    """Changes requests and answers between two services. `request` and `answer` may be overridden."""

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | Reply:
        """What goes on instead; or the answer, without asking."""
        return path, body

    async def answer(self, method: str, path: str, body: bytes, reply: Reply) -> Reply:
        """What comes back instead."""
        return reply


class Mutant:
    """A `Transport` whose other end is changed by a mutation."""

    def __init__(self, inner: Transport, mutation: Mutation) -> None:
        self.inner, self.mutation = inner, mutation

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Reply:
        changed = await self.mutation.request(method, target, body)
        if isinstance(changed, Reply):
            return changed
        target, body = changed
        reply = await self.inner.request(method, target, headers=headers, body=body, timeout_s=timeout_s)
        return await self.mutation.answer(method, target, body, reply)

    async def close(self) -> None:
        await self.inner.close()


class ChangesBody(Mutation):
    """Changes the body of requests whose path ends so."""

    def __init__(self, ending: str, item: type[Item], change: Callable[[Any], Any]) -> None:
        self.ending, self.item, self.change = ending, item, change

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | Reply:
        if method == "POST" and path.endswith(self.ending):
            try:
                body = wire.encode(self.change(wire.decode(body, self.item)))
            except wire.WireError:
                return path, body
        return path, body


def path_fits(part: str, path: str) -> bool:
    """Whether a path holds the part; a part that begins with the version is the whole path."""
    return path.partition("?")[0] == part if part.startswith("/v1") else part in path


class ChangesAnswer(Mutation):
    """Changes the item in good answers of requests whose path holds this."""

    def __init__(
        self, part: str, item: type[Item], change: Callable[[Any], Any], *, method: str = ""
    ) -> None:
        self.part, self.item, self.change, self.method = part, item, change, method

    async def answer(self, method: str, path: str, body: bytes, reply: Reply) -> Reply:
        if path_fits(self.part, path) and reply.status == 200 and method == (self.method or method):
            item = self.change(wire.decode(reply.body, self.item, reply.media_type))
            return Reply(200, reply.media_type, wire.encode(item, reply.media_type))
        return reply


class Forgives(Mutation):
    """Answers refusals of a kind with success."""

    def __init__(self, code: str, ending: str, item: Item | None = None) -> None:
        self.code, self.ending, self.item = code, ending, item

    async def answer(self, method: str, path: str, body: bytes, reply: Reply) -> Reply:
        if reply.status < 400 or self.ending not in path or self.code.encode() not in reply.body:
            return reply
        return Reply(200, wire.MSGPACK, wire.encode(self.item)) if self.item else Reply(204, "", b"")


def replaced(**changes: object) -> Callable[[Any], Any]:
    """A change of fields."""
    return lambda item: msgspec.structs.replace(item, **changes)
