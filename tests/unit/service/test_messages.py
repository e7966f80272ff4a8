"""Bodies that come slowly, never, or half."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message as AsgiMessage

from astraflow import wire
from astraflow.errors import RefusedError
from astraflow.service.messages import read_item
from astraflow.types import Message

BODY = wire.encode(Message(role="user", content="x" * 100))


def request_of(*chunks: bytes, pause_s: float = 0.0, ends: bool = True) -> Request:
    """A request whose chunks come `pause_s` apart; without `ends` nothing comes after them."""
    rest = list(chunks)

    async def receive() -> AsgiMessage:
        if not rest and not ends:
            await asyncio.Event().wait()
        await asyncio.sleep(pause_s)
        chunk = rest.pop(0) if rest else b""
        return {"type": "http.request", "body": chunk, "more_body": bool(rest) or not ends}

    headers = [(b"content-type", wire.MSGPACK.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def test_a_body_in_pieces_is_read() -> None:
    item = await read_item(request_of(BODY[:10], BODY[10:]), Message, patience_s=5.0)
    assert len(item.content) == 100


async def test_a_client_that_sends_nothing_is_refused() -> None:
    with pytest.raises(RefusedError, match="0 bytes of the body came within") as refused:
        await read_item(request_of(ends=False), Message, patience_s=0.05)
    assert (refused.value.status, refused.value.code) == (408, "slow_body")


async def test_a_client_that_sends_byte_by_byte_is_refused() -> None:
    chunks = [bytes([byte]) for byte in BODY]
    with pytest.raises(RefusedError, match="bytes of the body came within"):
        await read_item(request_of(*chunks, pause_s=0.02), Message, patience_s=0.1)


async def test_a_large_body_has_the_time_that_its_bytes_take() -> None:
    body = wire.encode(Message(role="user", content="x" * 40_000))
    chunks = [body[start : start + 10_000] for start in range(0, len(body), 10_000)]
    item = await read_item(request_of(*chunks, pause_s=0.04), Message, patience_s=0.1)
    assert len(item.content) == 40_000
