"""The published OpenAPI document against the real app: what it allows, and much more, is answered.

schemathesis invents the requests, the same ones every time. Each is sent with the tokens of all roles and
with none: never a 500, never no answer, and what is refused changes nothing.
"""

import asyncio
import json
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from astraflow import wire
from astraflow.dataflow.api import ROUTES, Route
from astraflow.dataflow.service.openapi import openapi_document
from astraflow.service.client import MemoryTransport
from astraflow.service.server import TokenAuth
from astraflow.types import ScalingAdvice, StatusReply
from drivers.dataflow_driver import Run

if TYPE_CHECKING:
    from schemathesis import Case
    from schemathesis.schemas import BaseSchema

TOKENS = {f"{role}-token": role for role in ("worker", "trainer", "viewer", "admin")}


@cache
def schema() -> "BaseSchema":
    """The document. schemathesis takes longer to import than most files take to test: only this one does."""
    from schemathesis import openapi

    return openapi.from_dict(openapi_document())


def requests_of(route: Route) -> "st.SearchStrategy[Case]":
    """Requests that fit the document, and, where there is anything to get wrong, some that do not."""
    from schemathesis import GenerationMode

    operation = schema()[route.path.replace(":int", "")][route.method]
    right = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if route.body is None and not route.params and "{" not in route.path:
        return right
    return st.one_of(right, operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))


def sendable(case: "Case") -> tuple[str, dict[str, str], bytes]:
    """Target, headers and body; nobody waits."""
    query = {str(name): value for name, value in dict(case.query or {}).items()}
    if "wait_s" in query:
        query["wait_s"] = "0"
    body: Any = case.body
    if isinstance(body, dict) and "wait_s" in body:
        body["wait_s"] = 0.0
    target = case.formatted_path + (f"?{urlencode(query, doseq=True, errors='replace')}" if query else "")
    media_type, payload = wire.JSON, b""
    if case.media_type is not None:
        try:
            payload = json.dumps(body).encode()
            if case.media_type == wire.MSGPACK:
                media_type, payload = wire.MSGPACK, msgspec.msgpack.encode(body)
        except (
            TypeError,
            ValueError,
            OverflowError,
            msgspec.MsgspecError,
        ):  # no JSON, or too large
            payload = payload or repr(body).encode(errors="replace")
    return target, {"content-type": media_type, "accept": wire.JSON}, payload


async def state_of(run: Run) -> tuple[int, StatusReply]:
    """The newest record, and what a viewer sees, without the clock and what follows from it alone: who waits,
    and the advice on services of which nothing is heard for seconds."""
    status = await run.client.status()
    workers = tuple(msgspec.structs.replace(worker, last_seen_s=0.0) for worker in status.workers)
    timeless = msgspec.structs.replace(status, now_s=0.0, waits=(), workers=workers, scaling=ScalingAdvice())
    return run.journal.seq, timeless


async def check(run: Run, route: Route, case: "Case") -> None:
    """Sends a request as everybody."""
    target, headers, body = sendable(case)
    transport = MemoryTransport(TokenAuth(run.service.app, TOKENS))
    for token, role in (("", ""), *TOKENS.items()):
        if route.name == "stop" and role == "admin":
            continue
        before = await state_of(run)
        shown = {**headers, "authorization": f"Bearer {token}"} if token else headers
        async with asyncio.timeout(10.0):
            reply = await transport.request(case.method, target, headers=shown, body=body, timeout_s=10.0)
        about = (route.name, role, target, body)
        assert reply.status < 500, about
        if not role:
            assert reply.status == (200 if route.name == "health" else 401), about
        elif role not in route.roles:
            assert reply.status in {403, 404}, about  # 404: the path itself is none of the document's
        if reply.status >= 400:
            assert await state_of(run) == before, about


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
@pytest.mark.timeout(120)
@settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_what_the_document_describes_is_answered(
    service: tuple[asyncio.Runner, Run], route: Route, data: st.DataObject
) -> None:
    runner, run = service
    runner.run(check(run, route, data.draw(requests_of(route))))
