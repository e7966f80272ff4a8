import asyncio
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.errors import ConfigError, RefusedError, UnavailableError
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.service.messages import item_response
from astraflow.service.server import HttpServer, TokenAuth
from astraflow.types import Message


async def test_a_taken_port_is_told_by_name() -> None:
    first = HttpServer(Starlette(), host="127.0.0.1", port=0, name="first")
    port = int((await first.start()).rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"second: cannot listen on 127.0.0.1:{port}"):
        await HttpServer(Starlette(), host="127.0.0.1", port=port, name="second").start()
    await first.stop()


async def test_a_token_is_needed_and_its_role_is_known() -> None:
    async def role(request: Request) -> Response:
        return item_response(Message(role="user", content=request.scope["role"]), request)

    app = TokenAuth(Starlette(routes=[Route("/role", role)]), {"s3cret": "worker", "other": "viewer"})
    for token, expected in (("s3cret", "worker"), ("other", "viewer")):
        client = ServiceClient("m", token=token, transport=MemoryTransport(app))
        assert (await client.call("GET", "/role", Message)).content == expected
    for token in ("", "wrong", "s3cre", "s3cret "):
        client = ServiceClient("m", token=token, transport=MemoryTransport(app))
        with pytest.raises(RefusedError) as caught:
            await client.call("GET", "/role", Message)
        assert caught.value.status == 401


async def test_files_that_are_no_certificate_or_authority_are_named(tmp_path: Path) -> None:
    nothing, noise = tmp_path / "nothing.pem", tmp_path / "noise.pem"
    noise.write_text("no certificate")
    for cert in (nothing, noise):
        tls = (str(cert), str(noise))
        server = HttpServer(Starlette(), host="127.0.0.1", port=0, name="dataflow", tls=tls)
        with pytest.raises(ConfigError, match=f"dataflow: certificate .*{cert.name} with key"):
            await server.start()
        client = ServiceClient("https://127.0.0.1:9", patience_s=0.0, ca_file=str(cert))
        with pytest.raises(ConfigError, match=f"the certificates in .*{cert.name} cannot be read"):
            await client.call("GET", "/x", None)


async def test_stop_ends_a_waiting_answer_within_its_grace() -> None:
    async def hang(_: Request) -> Response:
        await asyncio.Event().wait()
        return Response()

    server = HttpServer(Starlette(routes=[Route("/hang", hang)]), host="127.0.0.1", port=0, name="hang")
    client = ServiceClient(await server.start(), patience_s=0.0)
    waiting = asyncio.create_task(client.call("GET", "/hang", None))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5.0):
        await server.stop(grace_s=0.1)
        with pytest.raises(UnavailableError):
            await waiting
    await client.close()


async def test_a_caller_that_hangs_up_within_its_request_leaves_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    is_read = asyncio.Event()

    async def read(request: Request) -> Response:
        try:
            await request.body()
        finally:
            is_read.set()
        return Response()

    app = Starlette(routes=[Route("/read", read, methods=["POST"])])
    server = HttpServer(app, host="127.0.0.1", port=0, name="read")
    port = int((await server.start()).rsplit(":", 1)[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /read HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nhalf")
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    async with asyncio.timeout(5):
        await is_read.wait()
    await server.stop()
    assert "Traceback" not in capfd.readouterr().err
