import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from astraflow.errors import Error, FencedError, RefusedError, TooLargeError, UnavailableError, WireError
from astraflow.service.client import HttpReply, HttpTransport, MemoryTransport, ServiceClient
from astraflow.service.messages import error_response, item_response, read_item
from astraflow.service.server import HttpServer
from astraflow.types import ErrorReply, Message, Task
from astraflow.wire import encode


async def echo(request: Request) -> Response:
    try:
        item = await read_item(request, Message, limit=10_000)
        if item.content == "fence":
            raise FencedError("epoch 1 is over; epoch 2 holds the policy")
        if item.content == "refuse":
            raise RefusedError("no such worker", code="unknown_worker", status=404)
        return item_response(item, request)
    except Error as error:
        return error_response(error, request)


async def numbers(request: Request) -> Response:
    start, end = (int(n) for n in request.headers["range"].removeprefix("bytes=").split("-"))
    return Response(bytes(range(256))[start : end + 1], status_code=206)


APP = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/bytes", numbers)])


@pytest.fixture(params=["memory", "http"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[ServiceClient]:
    if request.param == "memory":
        yield ServiceClient("memory", transport=MemoryTransport(APP))
        return
    server = HttpServer(APP, host="127.0.0.1", port=0, name="echo")
    http = ServiceClient(await server.start())
    yield http
    await http.close()
    await server.stop()


async def test_a_call_carries_typed_items_both_ways(client: ServiceClient) -> None:
    message = Message(role="user", content="hi")
    assert await client.call("POST", "/echo", Message, body=message) == message


async def test_an_item_of_megabytes_arrives_whole() -> None:
    async def returned(request: Request) -> Response:
        return item_response(await read_item(request, Message, limit=10_000_000), request)

    server = HttpServer(
        Starlette(routes=[Route("/", returned, methods=["POST"])]), host="127.0.0.1", port=0, name="large"
    )
    client = ServiceClient(await server.start())
    message = Message(role="user", content="x" * 3_000_000)
    assert await client.call("POST", "/", Message, body=message) == message
    await client.close()
    await server.stop()


async def test_refusals_come_back_as_the_error_that_was_raised(client: ServiceClient) -> None:
    with pytest.raises(FencedError, match="epoch 2 holds"):
        await client.call("POST", "/echo", Message, body=Message(role="user", content="fence"))
    with pytest.raises(RefusedError) as caught:
        await client.call("POST", "/echo", Message, body=Message(role="user", content="refuse"))
    assert (caught.value.code, caught.value.status) == ("unknown_worker", 404)


async def test_an_item_of_the_wrong_type_or_size_is_a_wire_error(client: ServiceClient) -> None:
    with pytest.raises(WireError, match="unknown field"):
        await client.call("POST", "/echo", Message, body=Task(id="a", source="b", prompt="c"))
    with pytest.raises(WireError, match="over the limit"):
        await client.call("POST", "/echo", Message, body=Message(role="user", content="x" * 20_000))


async def test_fetch_reads_a_range_and_checks_its_length(client: ServiceClient) -> None:
    assert await client.fetch("/bytes", start=3, end=6) == b"\x03\x04\x05"
    with pytest.raises(WireError, match="expected 20"):
        await client.fetch("/bytes", start=250, end=270)


class Flaky:
    """Fails in a given way before it answers."""

    def __init__(self, failures: list[HttpReply | Exception]) -> None:
        self.failures = failures
        self.num_requests = 0

    async def request(self, method: str, target: str, **_: object) -> HttpReply:
        self.num_requests += 1
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return failure
        return HttpReply(200, "application/msgpack", encode(Message(role="user", content="late")))

    async def close(self) -> None:
        return None


async def test_connection_failures_and_503_are_tried_again() -> None:
    busy = HttpReply(503, "application/msgpack", encode(ErrorReply(code="journal", message="disk full")))
    flaky = Flaky([ConnectionError("refused"), busy, TimeoutError()])
    client = ServiceClient("x", transport=flaky, patience_s=10.0)
    assert (await client.call("GET", "/", Message)).content == "late"
    assert flaky.num_requests == 4


async def test_when_patience_ends_the_error_counts_the_tries_and_keeps_the_last_reason() -> None:
    flaky = Flaky([ConnectionError("refused")] * 99)
    client = ServiceClient("http://there", transport=flaky, patience_s=0.1)
    with pytest.raises(
        UnavailableError, match=r"GET http://there/v1/x: failed after \d+ tries .* last: refused"
    ):
        await client.call("GET", "/v1/x", Message)


async def test_a_refusal_is_not_tried_again() -> None:
    flaky = Flaky([HttpReply(409, "application/msgpack", encode(ErrorReply(code="refused", message="no")))])
    with pytest.raises(RefusedError, match="no"):
        await ServiceClient("x", transport=flaky).call("GET", "/", Message)
    assert flaky.num_requests == 1


async def test_an_answer_of_another_program_names_the_address() -> None:
    flaky = Flaky([HttpReply(404, "text/plain", b"Not Found")])
    client = ServiceClient("http://there:80", transport=flaky)
    with pytest.raises(
        RefusedError, match=r"http://there:80/v1/x answered HTTP 404: 'Not Found'.* another program"
    ):
        await client.call("GET", "/v1/x", Message)


async def endless(request: Request) -> Response:
    async def blocks() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)  # lets the server see that the caller is gone
            yield bytes(65_536)

    return StreamingResponse(blocks())


async def test_an_answer_without_end_is_cut_off_and_not_requested_again() -> None:
    paths: list[str] = []

    def long(request: Request) -> Response:
        return Response(bytes(2000))

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            paths.append(scope["path"])
        await app(scope, receive, send)

    app = Starlette(routes=[Route("/endless", endless), Route("/long", long)])
    server = HttpServer(counted, host="127.0.0.1", port=0, name="endless")
    url = await server.start()
    client = ServiceClient(url, transport=HttpTransport(url, max_reply_bytes=1000))
    for path in ("/endless", "/long"):
        with pytest.raises(TooLargeError, match=f"GET {url}{path}: the response has more than 1000 bytes"):
            await client.call("GET", path, Message)
    assert paths == ["/endless", "/long"]
    await client.close()
    await server.stop(grace_s=0.05)
