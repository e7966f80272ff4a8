"""What a caller may do with a connection, and for how long: raw bytes over real sockets."""

import asyncio
import gc
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from astraflow.service.connections import ConnectionLimits, max_connections
from astraflow.service.server import HttpServer

QUICK = ConnectionLimits(head_s=0.2, idle_s=0.2, body_s=0.2, stall_s=0.2, tick_s=0.05)
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass
class Echo:
    """Answers with the body; for /wait, once `goes_on` is set. Tells of each that waits, and what is sent."""

    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    is_sent: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0
    waits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/wait":
            self.num_waiting += 1
            self.waits.release()
            await self.goes_on.wait()
        if scope["path"] == "/much":
            body = bytes(64 * 1024 * 1024)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        # returns once much of the body is taken, or given up
        await send({"type": "http.response.body", "body": b""})
        self.is_sent.set()


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before the body has come, as who finds no token does."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


Call = Callable[..., Awaitable["Caller"]]


@asynccontextmanager
async def serving(app: ASGIApp, limits: ConnectionLimits) -> AsyncGenerator[Call]:
    """Opens connections to a server, from any address of this machine."""
    server = HttpServer(app, host="127.0.0.1", port=0, name="test", limits=limits)
    port = int((await server.start()).rpartition(":")[2])
    callers: list[Caller] = []

    async def call(address: str = "127.0.0.1") -> Caller:
        callers.append(Caller(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))))
        return callers[-1]

    try:
        async with asyncio.timeout(20.0):
            yield call
    finally:
        for caller in callers:
            caller.writer.close()
        await server.stop(grace_s=0.1)


class Caller:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hear(self) -> bytes:
        """An answer's status line and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return head.partition(b"\r\n")[0] + b" " + await self.reader.readexactly(int(length.split(b":")[1]))

    async def rest(self) -> bytes:
        """What still comes until the service closes."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    async def drip(self, data: bytes, pause_s: float = 0.02) -> int:
        """Sends byte by byte for ever; how many went before the service closed."""
        for num_sent in range(100_000):
            if self.reader.at_eof() or self.reader.exception():
                return num_sent
            try:
                await self.send(data[num_sent % len(data) :][:1])
            except ConnectionError:
                return num_sent
            await asyncio.sleep(pause_s)
        raise AssertionError("never cut off")


def post(word: bytes) -> bytes:
    return b"POST /post HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(word) + word


async def test_a_connection_serves_one_request_after_another_and_keeps_none() -> None:
    async with serving(Echo(), QUICK) as call:
        caller = await call()
        for word in (b"one", b"three"):
            await caller.send(post(word))
            assert await caller.hear() == b"HTTP/1.1 200 OK " + word
        await asyncio.sleep(0.05)
        cycles = [each for each in gc.get_objects() if isinstance(each, RequestResponseCycle)]
        assert not [cycle for cycle in cycles if cycle.scope["path"] == "/post"]
        del cycles
        await caller.send(post(b"five") + post(b"six"))  # at once
        assert await caller.hear() == b"HTTP/1.1 200 OK five"
        assert await caller.hear() == b"HTTP/1.1 200 OK six"


async def test_a_caller_that_says_nothing_is_cut_off() -> None:
    async with serving(Echo(), QUICK) as call:
        assert await (await call()).rest() == b""


async def test_a_dripping_head_is_cut_off() -> None:
    async with serving(Echo(), QUICK) as call:
        caller = await call()
        await caller.send(b"GET / HTTP/1.1\r\n")
        assert await caller.drip(b"a: b\r\n") < 200
        half = await call()
        await half.send(b"GET / HTTP/1.1\r\n")
        assert (await half.rest()).startswith(b"HTTP/1.1 408 ")


async def test_a_dripping_body_is_cut_off() -> None:
    async with serving(Echo(), QUICK) as call:
        caller = await call()
        await caller.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n")
        assert await caller.drip(b"x") < 200
        half = await call()
        await half.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nabc")
        answer = await half.rest()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "slow_body"
        assert b"3 bytes of the body" in answer


async def test_a_body_that_drips_after_its_answer_is_cut_off() -> None:
    async with serving(refuse, QUICK) as call:
        caller = await call()
        await caller.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n")
        assert await caller.hear() == b"HTTP/1.1 401 Unauthorized no"
        assert await caller.drip(b"x") < 200


async def test_a_body_that_comes_steadily_may_take_longer() -> None:
    limits = ConnectionLimits(body_s=0.1, slowest_bytes_per_s=100_000, tick_s=0.02)
    async with serving(Echo(), limits) as call:
        caller = await call()
        await caller.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50000\r\n\r\n")
        for _ in range(10):
            await caller.send(bytes(5_000))
            await asyncio.sleep(0.03)
        assert await caller.hear() == b"HTTP/1.1 200 OK " + bytes(50_000)


async def test_an_idle_connection_is_closed_and_one_that_waits_for_its_answer_is_not() -> None:
    app = Echo()
    async with serving(app, QUICK) as call:
        idle, waiting = await call(), await call()
        await waiting.send(b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await idle.send(GET)
        assert await idle.hear() == b"HTTP/1.1 200 OK "
        assert await idle.rest() == b""
        await (await call()).rest()  # once more as long
        app.goes_on.set()
        assert await waiting.hear() == b"HTTP/1.1 200 OK "


async def test_an_answer_that_nobody_takes_is_given_up() -> None:
    app = Echo()
    async with serving(app, QUICK) as call:
        caller = await call()
        await caller.send(b"GET /much HTTP/1.1\r\nhost: localhost\r\n\r\n")
        caller.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await app.is_sent.wait()
        caller.reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await caller.rest()) < 64 * 1024 * 1024


async def test_a_head_without_end_is_refused() -> None:
    async with serving(Echo(), ConnectionLimits()) as call:
        caller = await call()
        await caller.send(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 12_000)
        assert (await caller.rest()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_refused(request_: bytes) -> None:
    async with serving(Echo(), ConnectionLimits()) as call:
        caller = await call()
        await caller.send(request_)
        assert (await caller.rest()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("opening", [b"", b"GET / HTT", GET])
async def test_idle_connections_make_room_for_those_who_come(opening: bytes) -> None:
    limits = ConnectionLimits(num=256)
    async with serving(Echo(), limits) as call:
        crowd = [await call() for _ in range(300)]
        for caller in crowd:
            await caller.send(opening)
        caller = await call()
        await caller.send(GET)
        assert await caller.hear() == b"HTTP/1.1 200 OK "


async def test_those_who_wait_for_an_answer_are_never_sent_away_for_others() -> None:
    app = Echo()
    async with serving(app, ConnectionLimits(num=600)) as call:
        parked = [await call() for _ in range(500)]
        for caller in parked:
            await caller.send(b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for _ in range(300):
            await call()
        late = await call()
        await late.send(GET)
        assert await late.hear() == b"HTTP/1.1 200 OK "
        assert app.num_waiting == 500
        app.goes_on.set()
        for caller in parked:
            assert await caller.hear() == b"HTTP/1.1 200 OK "


async def test_who_comes_when_all_others_are_at_work_is_told_so() -> None:
    app = Echo()
    async with serving(app, ConnectionLimits(num=4)) as call:
        for _ in range(4):
            await (await call()).send(b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for _ in range(4):
            await app.waits.acquire()
        assert (await (await call()).rest()).startswith(b"HTTP/1.1 503 ")
        app.goes_on.set()


async def test_the_address_with_most_connections_makes_room() -> None:
    async with serving(Echo(), ConnectionLimits(num=8)) as call:
        lone = await call("127.0.0.2")
        await lone.send(GET)
        assert await lone.hear() == b"HTTP/1.1 200 OK "
        for _ in range(20):
            await call()
        await lone.send(GET)
        assert await lone.hear() == b"HTTP/1.1 200 OK "


async def test_refused_connections_leave_few_words_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(Echo(), ConnectionLimits()) as call:
            for _ in range(50):
                caller = await call()
                await caller.send(b"nonsense\r\n\r\n")
                await caller.rest()
    assert len(caplog.records) < 10


def test_the_number_of_connections_leaves_files_for_the_service_itself() -> None:
    assert max_connections(256) == 128
    assert max_connections(1024) == 768
    assert max_connections(1_000_000) == 16_384
