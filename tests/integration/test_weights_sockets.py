"""Ranges read straight into a buffer, from servers that answer well or oddly."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from astraflow.errors import UnavailableError
from astraflow.weights.range_sockets import RangeSockets

BODY = bytes(range(200))


@contextlib.asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives one answer after the other on a connection; the requests that it saw."""
    seen: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in answers:
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base", seen
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def answer(status: str, *fields: str, body: bytes = BODY) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode() + body


PART = answer("206 Partial Content", "Content-Range: bytes 0-199/900", "content-length: 200")


async def test_a_range_is_read_into_the_buffer_and_the_connection_kept() -> None:
    whole = answer("200 OK", "Content-Length: 200")
    async with answering(PART, whole) as (url, seen):
        sockets = RangeSockets(url, token="secret")
        for _ in range(2):
            buffer = bytearray(200)
            assert await sockets.fill("/v1/chunks/abc", memoryview(buffer), start=0)
            assert bytes(buffer) == BODY
        assert len(seen) == 2
        assert seen[0].startswith(b"GET /base/v1/chunks/abc HTTP/1.1\r\n")
        assert b"\r\nRange: bytes=0-199\r\n" in seen[0]
        assert b"\r\nAuthorization: Bearer secret\r\n" in seen[0]
        sockets.close()


@pytest.mark.parametrize(
    "odd",
    [
        answer("404 Not Found", "Content-Length: 200"),
        answer("302 Found", "Location: elsewhere", "Content-Length: 200"),
        answer("206 Partial Content", "Content-Range: bytes 1-200/900", "Content-Length: 200"),
        answer("206 Partial Content", "Content-Range: bytes 0-199/900", "Content-Length: 199"),
        answer("206 Partial Content", "Content-Range: bytes 0-199/900", "Transfer-Encoding: chunked"),
        answer("200 OK", "Content-Length: 200", "Content-Encoding: gzip"),
        answer("200 OK", "Content-Length: 900"),
        answer("200 OK", "Content-Length: 200", body=BODY[:-1]),
        answer("200 OK", "Content-Length: 200", "Connection: close"),
        answer("200 OK", "Content-Length: 200", body=BODY + b"more"),
        b"nonsense",
        b"\xff" * 100_000,
        b"",
    ],
)
async def test_any_other_answer_is_left_to_the_general_client(odd: bytes) -> None:
    async with answering(odd) as (url, _):
        sockets = RangeSockets(url)
        assert not await sockets.fill("/c", memoryview(bytearray(200)), start=0, timeout_s=5)
        sockets.close()


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "http://127.0.0.1:1", "ftp://x", "http://"])
async def test_what_is_no_plain_server_is_left_to_the_general_client(url: str) -> None:
    assert not await RangeSockets(url).fill("/c", memoryview(bytearray(2)), start=0, timeout_s=5)


@pytest.mark.parametrize(("timeout_s", "quiet_s"), [(0.05, 5.0), (5.0, 0.05)])
async def test_a_server_that_stalls_is_given_up_and_not_asked_another_way(
    timeout_s: float, quiet_s: float
) -> None:
    async with answering(PART[:-1], b"") as (url, seen):
        sockets = RangeSockets(url, quiet_s=quiet_s)
        with pytest.raises(UnavailableError, match="sent no byte for"):
            await sockets.fill("/c", memoryview(bytearray(200)), start=0, timeout_s=timeout_s)
        assert len(seen) == 1
        sockets.close()
