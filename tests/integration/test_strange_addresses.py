"""A URL with the wrong scheme, of a service that is not trusted, or of nobody: what is said, and when."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from astraflow.errors import ConfigError, UnavailableError
from astraflow.service.client import ServiceClient
from astraflow.service.server import HttpServer

_SOON_S = 30.0
"""Far less than the patience of the clients below."""


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers every request with an empty object."""
    assert scope["type"] == "http"
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
    )
    await send({"type": "http.response.body", "body": json.dumps({}).encode()})


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate of 127.0.0.1 and its key."""
    folder.mkdir()
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    names = ["-addext", f"subjectAltName={name}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*made.split(), *names], check=True, capture_output=True)
    return str(cert), str(key)


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, str]:
    return make_certificate(tmp_path / "own", "IP:127.0.0.1")


@pytest.fixture
async def https(own: tuple[str, str]) -> AsyncIterator[str]:
    server = HttpServer(app, host="127.0.0.1", port=0, name="dataflow", tls=own)
    yield await server.start()
    await server.stop()


@pytest.fixture
async def http() -> AsyncIterator[str]:
    server = HttpServer(app, host="127.0.0.1", port=0, name="dataflow")
    yield await server.start()
    await server.stop()


async def ask(url: str, *, ca_file: str = "", patience_s: float = 600.0) -> None:
    client = ServiceClient(url, ca_file=ca_file, patience_s=patience_s)
    try:
        await client.call("GET", "/v1/status", None)
    finally:
        await client.close()


@pytest.mark.timeout(_SOON_S)
async def test_http_for_https_is_said_at_once(https: str) -> None:
    url = https.replace("https://", "http://")
    with pytest.raises(ConfigError, match=f"{url} speaks HTTPS; use {https}, with --ca-file"):
        await ask(url)


@pytest.mark.timeout(_SOON_S)
async def test_https_for_http_is_said_at_once(http: str) -> None:
    url = http.replace("http://", "https://")
    with pytest.raises(ConfigError, match=f"{url} does not speak HTTPS; use {http}"):
        await ask(url)


@pytest.mark.timeout(_SOON_S)
async def test_a_wrong_ca_is_said_at_once(https: str, own: tuple[str, str], tmp_path: Path) -> None:
    other, _ = make_certificate(tmp_path / "other", "IP:127.0.0.1")
    with pytest.raises(ConfigError, match=r"not trusted here .*certificate verify failed.*--ca-file"):
        await ask(https, ca_file=other)
    await ask(https, ca_file=own[0])


@pytest.mark.timeout(_SOON_S)
async def test_a_certificate_of_another_name_is_said_at_once(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path / "named", "DNS:elsewhere.example")
    server = HttpServer(app, host="127.0.0.1", port=0, name="dataflow", tls=(cert, key))
    url = await server.start()
    try:
        with pytest.raises(ConfigError, match=r"IP address mismatch.*host name that the certificate"):
            await ask(url, ca_file=cert)
    finally:
        await server.stop()


async def test_a_service_that_is_away_is_not_taken_for_a_stranger(unused_tcp_port: int) -> None:
    for scheme in ("http", "https"):
        with pytest.raises(UnavailableError, match="Cannot connect"):
            await ask(f"{scheme}://127.0.0.1:{unused_tcp_port}", patience_s=0.2)


# --- nobody there ---------------------------------------------------------------------------------


@pytest.fixture
def dead() -> Iterator[str]:
    """A URL whose port nobody listens to, and which nobody else can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.timeout(_SOON_S)
async def test_silence_of_an_address_is_told_once_and_then_the_end(
    dead: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = ServiceClient(dead, patience_s=6.0)  # waits of at most 2.6 s, then 2 s: told before it ends
    calls = (client.call("GET", "/v1/run", None), client.call("GET", "/v1/status", None))
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    await client.close()
    assert len(caplog.messages) == 1
    assert re.match(rf"{dead} is not available yet.* [345] s: .*127\.0\.0\.1", caplog.messages[0])
    for error in (first, second):
        assert isinstance(error, UnavailableError)
        ended = (
            rf"GET {dead}/v1/\w+: failed after \d+ tries in [3-6] s; last: .* running, healthy, and reachable"
        )
        assert re.match(ended, str(error))


@pytest.mark.timeout(_SOON_S)
async def test_a_short_question_to_a_dead_address_is_told_by_its_error_alone(
    dead: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnavailableError, match=r"tries in \d s"):
        await ask(dead, patience_s=0.3)
    assert not caplog.messages


def test_a_service_says_that_the_run_it_joins_does_not_answer_and_can_be_stopped(dead: str) -> None:
    argv = [sys.executable, "-m", "astraflow", "join", dead]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        line = service.stderr.readline()
        service.send_signal(signal.SIGINT)
        rest = service.stderr.read()
    assert re.search(rf"{dead} is not available yet.* 5\d s: ", line), line
    assert service.returncode == 0, rest
