"""Decoding request bodies into items."""

import pytest
from starlette.requests import Request
from starlette.types import Message as AsgiMessage

from astraflow import wire
from astraflow.errors import WireError
from astraflow.service.messages import read_item
from astraflow.types import Message

BODY = wire.encode(Message(role="user", content="x" * 100))


def request_of(*chunks: bytes) -> Request:
    """A request whose body comes in these chunks."""
    rest = list(chunks)

    async def receive() -> AsgiMessage:
        chunk = rest.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(rest)}

    headers = [(b"content-type", wire.MSGPACK.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def test_a_body_in_pieces_is_read() -> None:
    item = await read_item(request_of(BODY[:10], BODY[10:]), Message)
    assert len(item.content) == 100


async def test_a_body_over_the_limit_is_refused() -> None:
    with pytest.raises(WireError, match="Message: body over the limit of 50 bytes"):
        await read_item(request_of(BODY[:40], BODY[40:]), Message, limit=50)
