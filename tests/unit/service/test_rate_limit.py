import asyncio
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from astraflow.errors import RefusedError
from astraflow.service.client import HttpReply, MemoryTransport, ServiceClient
from astraflow.service.rate_limit import RateLimit, TokenBucket
from astraflow.service.server import TokenAuth
from astraflow.types import StatusReply
from drivers.dataflow_driver import running


def test_a_bucket_gives_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(10.0, float("inf"), 0.0)
    assert [bucket.wait_s(0.0) for _ in range(20)] == [0.0] * 20
    assert bucket.wait_s(0.0) == pytest.approx(0.1)
    assert bucket.wait_s(0.05) == pytest.approx(0.05)
    assert bucket.wait_s(0.1) == 0.0
    assert bucket.wait_s(0.1) > 0.0
    assert [bucket.wait_s(1000.0) for _ in range(21)] == [*[0.0] * 20, pytest.approx(0.1)]


def test_a_slow_bucket_gives_at_least_one_and_a_clock_that_goes_back_takes_nothing() -> None:
    bucket = TokenBucket(0.1, float("inf"), 50.0)
    assert bucket.wait_s(50.0) == 0.0
    assert bucket.wait_s(40.0) == pytest.approx(10.0)
    assert bucket.wait_s(50.0) == 0.0


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def scope_of(role: str, address: str, path: str = "/v1/leases") -> Scope:
    return {
        "type": "http",
        "role": role,
        "client": (address, 5),
        "path": path,
        "headers": [],
        "method": "POST",
    }


async def status_of(app: RateLimit, scope: Scope) -> tuple[int, dict[bytes, bytes]]:
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        raise AssertionError("the body of a request over the limit is not read")

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await app(scope, receive, send)  # type: ignore[arg-type]
    return sent[0]["status"], dict(sent[0]["headers"])  # type: ignore[return-value, call-overload]


async def test_each_token_at_each_address_has_its_own_rate_and_health_has_none() -> None:
    app = RateLimit(answer, 0.01)
    assert (await status_of(app, scope_of("worker", "10.0.0.1")))[0] == 204
    status, headers = await status_of(app, scope_of("worker", "10.0.0.1"))
    assert status == 429
    assert 90 <= int(headers[b"retry-after"]) <= 100  # 1 request in 100 s
    for scope in (
        scope_of("worker", "10.0.0.2"),
        scope_of("trainer", "10.0.0.1"),
        scope_of("worker", "10.0.0.1", "/v1/health"),
    ):
        assert (await status_of(app, scope))[0] == 204


async def test_a_wait_below_a_second_is_told_as_a_whole_second() -> None:
    app = RateLimit(answer, 2.0)
    for _ in range(4):
        assert (await status_of(app, scope_of("worker", "10.0.0.1")))[0] == 204
    status, headers = await status_of(app, scope_of("worker", "10.0.0.1"))
    assert (status, headers[b"retry-after"]) == (429, b"1")  # 0 would mean at once


async def test_who_made_no_request_for_long_is_forgotten_first() -> None:
    app = RateLimit(answer, 0.01)
    for number in range(5000):
        assert (await status_of(app, scope_of("worker", f"10.0.{number // 250}.{number % 250}")))[0] == 204
    assert (await status_of(app, scope_of("worker", "10.0.19.249")))[0] == 429
    assert (await status_of(app, scope_of("worker", "10.0.0.0")))[0] == 204


async def test_a_refused_request_changes_nothing_and_its_caller_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        app = TokenAuth(RateLimit(run.service.app, 0.01), {"secret": "admin"})
        calls = ServiceClient("http://x", token="secret", patience_s=5.0, transport=MemoryTransport(app))
        assert isinstance(await calls.call("GET", "/v1/status", StatusReply), StatusReply)
        with pytest.raises(RefusedError, match=r"raise dataflow\.max_requests_per_s") as caught:
            await calls.call("POST", "/v1/stop", None)
        assert (caught.value.code, caught.value.status) == ("too_many_requests", 429)
        assert (await run.client.status()).state == "running"


class Busy:
    """A transport whose first answers are 429."""

    def __init__(self, *, num_busy: int, retry_after_s: float) -> None:
        self.num_left, self.retry_after_s = num_busy, retry_after_s
        self.at_s: list[float] = []

    async def request(self, *_: object, **__: object) -> HttpReply:
        self.at_s.append(asyncio.get_running_loop().time())
        self.num_left -= 1
        if self.num_left >= 0:
            body = b'{"code": "too_many_requests", "message": "later"}'
            return HttpReply(429, "application/json", body, self.retry_after_s)
        return HttpReply(204, "", b"")

    async def close(self) -> None:
        return None


async def test_our_client_waits_as_long_as_it_is_told_and_tries_again() -> None:
    busy = Busy(num_busy=2, retry_after_s=0.2)
    await ServiceClient("http://x", transport=busy).call("POST", "/v1/drain", None)  # type: ignore[arg-type]
    first, second, third = busy.at_s
    assert second - first >= 0.2
    assert third - second >= 0.2


async def test_our_client_does_not_wait_beyond_its_patience() -> None:
    busy = Busy(num_busy=9, retry_after_s=60.0)
    with pytest.raises(RefusedError, match="later"):
        await ServiceClient("http://x", patience_s=1.0, transport=busy).call("POST", "/x", None)  # type: ignore[arg-type]
    assert len(busy.at_s) == 1
