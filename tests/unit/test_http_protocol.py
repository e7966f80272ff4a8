"""What goes over a connection, byte by byte."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from astraflow import wire
from astraflow.http_protocol import HttpProtocol

LENGTH = (b"content-length", b"2")


class Talk:
    """A connection to an app; `state` is what uvicorn would hold."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, state: ServerState
    ) -> None:
        self.reader, self.writer, self.state = reader, writer, state

    async def ask(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.01)

    async def hear(self, size: int = 0) -> tuple[bytes, bytes]:
        """Head and body of the next answer, the body of its own length unless `size` says which."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length: ")]
        return head, await self.reader.readexactly(size or int(lengths[0].split()[1] if lengths else 0))


@asynccontextmanager
async def talking(app: ASGIApp) -> AsyncGenerator[Talk]:
    config, state = uvicorn.Config(app, lifespan="off", log_config=None), ServerState()
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        async with asyncio.timeout(10.0):
            yield Talk(reader, writer, state)
            writer.close()
            await asyncio.gather(*state.tasks)
    finally:
        writer.close()
        server.close()
        for task in state.tasks:
            task.cancel()


async def body_of(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            return body


def answering(answer: Callable[[Scope, bytes], bytes]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = answer(scope, await body_of(receive))
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def saying(*messages: dict[str, Any]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        for message in messages:
            await send(message)

    return app


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


ECHO = answering(lambda _, data: data)
PATH = answering(lambda scope, _: f"{scope['method']} {scope['path']} {scope['query_string']!r}".encode())


async def test_a_connection_serves_one_request_after_another() -> None:
    async with talking(ECHO) as talk:
        for word in (b"one", b"three"):
            await talk.ask(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(word) + word)
            assert await talk.hear() == (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(word), word)


async def test_requests_sent_at_once_are_answered_in_their_order() -> None:
    async with talking(PATH) as talk:
        await talk.ask(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % i for i in range(50)))
        assert [(await talk.hear())[1] for _ in range(50)] == [f"GET /{i} b''".encode() for i in range(50)]


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        (b"/a%20b?c=%20", b"GET /a b b'c=%20'"),
        (b"http://x:1/a?b", b"GET /a b'b'"),
        (b"http://x", b"GET / b''"),
    ],
)
async def test_a_target_is_path_and_query(target: bytes, seen: bytes) -> None:
    async with talking(PATH) as talk:
        await talk.ask(b"GET %b HTTP/1.1\r\n\r\n" % target)
        assert (await talk.hear())[1] == seen


async def test_a_body_that_is_there_lies_in_the_scope_and_one_that_is_not_does_not() -> None:
    def told(scope: Scope, data: bytes) -> bytes:
        assert scope.get("extensions", {}).get(wire.WHOLE_BODY, data) == data
        return b"whole" if "extensions" in scope else b"later"

    async with talking(answering(told)) as talk:
        await talk.ask(b"POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\nbody")
        assert (await talk.hear())[1] == b"whole"
        await talk.ask(b"POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\nbo", b"dy")
        assert (await talk.hear())[1] == b"later"


async def test_bodies_in_chunks_and_bodies_asked_for_are_read() -> None:
    async with talking(ECHO) as talk:
        head = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        await talk.ask(head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")
        assert (await talk.hear())[1] == b"abcde"
        await talk.ask(b"POST / HTTP/1.1\r\ncontent-length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await talk.hear() == (b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        await talk.ask(b"ok")
        assert (await talk.hear())[1] == b"ok"


async def test_an_answer_of_unknown_length_goes_out_in_chunks() -> None:
    async with talking(saying(start(), body(b"abc", more=True), body(b"", more=True), body(b"de"))) as talk:
        await talk.ask(b"GET / HTTP/1.1\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        assert await talk.hear(20) == (head, b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"[:20])


async def test_to_an_old_client_it_ends_with_the_connection() -> None:
    async with talking(saying(start(), body(b"abc", more=True), body(b"de"))) as talk:
        await talk.ask(b"GET / HTTP/1.0\r\n\r\n")
        assert await talk.reader.read() == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabcde"


async def test_head_and_no_content_have_no_body() -> None:
    async with talking(saying(start(LENGTH), body(b"ok"))) as talk:
        await talk.ask(b"HEAD / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        assert (await talk.reader.readuntil(b"\r\n\r\n")).endswith(b"content-length: 2\r\n\r\n")
        assert (await talk.hear())[1] == b"ok"
    async with talking(saying(start(status=204), body(b""))) as talk:
        await talk.ask(b"GET / HTTP/1.1\r\n\r\n")
        assert await talk.hear() == (b"HTTP/1.1 204 No Content\r\n\r\n", b"")


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", saying(start(LENGTH), body(b"ok"))),
        (b"GET / HTTP/1.1\r\n\r\n", saying(start(LENGTH, (b"connection", b"close")), body(b"ok"))),
        (
            b"GET / HTTP/1.1\r\nConnection: close\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            saying(start(LENGTH), body(b"ok")),
        ),
        (
            b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
            saying(start(LENGTH), body(b"ok")),
        ),
    ],
)
async def test_either_side_may_end_the_connection(request_: bytes, answer: ASGIApp) -> None:
    async with talking(answer) as talk:
        await talk.ask(request_)
        head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n"
        assert await talk.reader.read() == head + b"ok"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", b"400 Bad Request"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", b"400 Bad Request"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 12_000, b"431 Request Header Fields Too Large"),
    ],
)
async def test_what_is_no_request_is_refused(request_: bytes, status: bytes) -> None:
    async with talking(ECHO) as talk:
        await talk.ask(request_)
        assert (
            await talk.reader.read()
            == b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
        )


async def fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise KeyError("x")


@pytest.mark.parametrize(
    "app",
    [
        fails,
        saying(),
        saying(body(b"ok")),
        saying(start((b"x", b"a\r\nset-cookie: b")), body(b"ok")),
        saying(start(LENGTH), body(b"too long")),
        saying(start(LENGTH), body(b"x")),
    ],
)
async def test_an_app_that_gives_no_answer_is_a_500(app: ASGIApp, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        async with talking(app) as talk:
            await talk.ask(b"GET / HTTP/1.1\r\n\r\n")
            head = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            assert await talk.reader.read() == head


async def test_an_answer_that_breaks_off_ends_the_connection() -> None:
    async with talking(saying(start((b"content-length", b"9")), body(b"abc", more=True))) as talk:
        await talk.ask(b"GET / HTTP/1.1\r\n\r\n")
        assert (await talk.reader.read()).endswith(b"\r\n\r\nabc")


async def test_the_app_hears_that_the_caller_is_gone() -> None:
    heard = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        assert (await receive())["type"] == "http.disconnect"
        heard.set()
        await send(start(LENGTH))
        await send(body(b"ok"))

    async with talking(app) as talk:
        await talk.ask(b"GET / HTTP/1.1\r\n\r\n")
        talk.writer.close()
        await heard.wait()


async def test_a_body_that_is_not_read_and_an_answer_that_is_not_taken_wait() -> None:
    size = 32 * 1024 * 1024
    goes_on, has_begun, num_sent = asyncio.Event(), asyncio.Event(), 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_sent
        await goes_on.wait()
        assert len(await body_of(receive)) == size
        await send(start((b"content-length", str(size).encode())))
        has_begun.set()
        while num_sent < size:
            num_sent += 2**20
            await send(body(bytes(2**20), more=num_sent < size))

    async with talking(app) as talk:
        talk.writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))
        await asyncio.sleep(0.1)
        assert talk.writer.transport.get_write_buffer_size() > 0
        goes_on.set()
        await talk.writer.drain()
        await has_begun.wait()
        await asyncio.sleep(0.1)
        assert num_sent < size
        assert (await talk.hear())[1] == bytes(size)


async def test_what_is_refused_early_may_still_send_its_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(LENGTH, status=413))
        await send(body(b"no"))

    async with talking(app) as talk:
        await talk.ask(b"POST / HTTP/1.1\r\ncontent-length: 3000000\r\n\r\n", bytes(3_000_000))
        assert (await talk.hear())[1] == b"no"
        await talk.ask(b"GET / HTTP/1.1\r\n\r\n")
        assert (await talk.hear())[1] == b"no"


async def test_a_server_that_stops_gives_the_answer_that_is_under_way() -> None:
    goes_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await goes_on.wait()
        await send(start(LENGTH))
        await send(body(b"ok"))

    async with talking(app) as talk:
        await talk.ask(b"GET / HTTP/1.1\r\n\r\n")
        (connection,) = talk.state.connections
        connection.shutdown()
        goes_on.set()
        assert (await talk.reader.read()).endswith(b"\r\n\r\nok")
