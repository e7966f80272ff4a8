"""Whatever a peer sends, the dataflow answers it, never with a 500; what it refuses changes nothing."""

import asyncio
import base64
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow import wire
from astraflow.dataflow.api import ROUTES, Route
from astraflow.errors import WireError
from astraflow.service.client import MemoryTransport
from astraflow.types import EpisodeResults, Publication
from drivers.dataflow_driver import Run

BODIES = [route for route in ROUTES if route.body is not None and route.name != "stop"]
TYPES = sorted({route.body for route in ROUTES if route.body is not None}, key=lambda kind: kind.__name__)
KNOWN = st.sampled_from(["actor", "w0", "train", "0.0.0", "e0.0.0", "", "stop", "full", "sums", "\x00"])
NUMBERS = st.integers(-2, 3) | st.integers(-(2**63), 2**64 - 1)


INFO = msgspec.inspect
PLAIN: dict[type, st.SearchStrategy[Any]] = {
    INFO.IntType: NUMBERS,
    INFO.FloatType: st.floats(allow_nan=False, allow_infinity=False) | st.integers(-2, 2),
    INFO.StrType: KNOWN | st.text(max_size=8),
    INFO.BytesType: st.binary(max_size=24).map(lambda data: base64.b64encode(data).decode()),
    INFO.BoolType: st.booleans(),
    INFO.NoneType: st.none(),
}


def values(kind: Any, name: str = "") -> st.SearchStrategy[Any]:
    """JSON values that mostly fit a type; nobody waits."""
    if type(kind) in PLAIN:
        return st.just(0.0) if name == "wait_s" else PLAIN[type(kind)]
    match kind:
        case INFO.LiteralType():
            return st.sampled_from(kind.values)
        case INFO.VarTupleType() | INFO.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case INFO.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case INFO.DictType():
            return st.dictionaries(KNOWN, values(kind.value_type), max_size=2)
        case INFO.UnionType():
            return st.one_of(*map(values, kind.types))
        case _:
            return structs(kind)


def structs(kind: Any) -> st.SearchStrategy[Any]:
    needed = {f.encode_name: values(f.type, f.name) for f in kind.fields if f.required}
    optional = {f.encode_name: values(f.type, f.name) for f in kind.fields if not f.required}
    if kind.array_like:
        return st.tuples(*(values(f.type, f.name) for f in kind.fields))
    if kind.tag_field:
        needed[kind.tag_field] = st.just(kind.tag)
    return st.fixed_dictionaries(needed, optional=optional)


def bodies(kind: type) -> st.SearchStrategy[tuple[str, bytes]]:
    """(media type, body): nearly right, or bytes."""
    near = values(msgspec.inspect.type_info(kind))
    return st.one_of(
        near.map(lambda value: (wire.JSON, msgspec.json.encode(value))),
        st.binary(max_size=60).map(lambda data: (wire.MSGPACK, data)),
        st.binary(max_size=60).map(lambda data: (wire.JSON, data)),
    )


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_decoding_gives_an_item_or_a_wire_error(kind: type, data: st.DataObject) -> None:
    media_type, body = data.draw(bodies(kind))
    try:
        item = wire.decode(body, kind, media_type)
    except WireError:
        return
    assert isinstance(item, kind)
    assert wire.decode(wire.encode(item), kind) == item


@pytest.mark.parametrize("kind", [EpisodeResults, Publication])
@settings(max_examples=100, deadline=None)
@given(noise=st.binary(max_size=400), depth=st.integers(0, 3000))
def test_deep_or_random_bytes_are_a_wire_error(kind: type, noise: bytes, depth: int) -> None:
    for body, media_type in (
        (noise, wire.MSGPACK),
        (b"[" * depth, wire.JSON),
        (b"\x91" * depth, wire.MSGPACK),
    ):
        with pytest.raises(WireError):
            wire.decode(body, kind, media_type)


async def sent(run: Run, route: Route, path: str, media_type: str, body: bytes) -> tuple[int, int]:
    """Status of the answer, and how many records it led to."""
    transport = MemoryTransport(run.service.app)
    before = run.journal.seq
    headers = {"content-type": media_type, "accept": wire.JSON}
    async with asyncio.timeout(10.0):
        reply = await transport.request(route.method, path, headers=headers, body=body, timeout_s=10.0)
    return reply.status, run.journal.seq - before


@pytest.mark.parametrize("route", BODIES, ids=lambda route: route.name)
@pytest.mark.timeout(120)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_breaks_a_route(
    service: tuple[asyncio.Runner, Run], route: Route, data: st.DataObject
) -> None:
    runner, run = service
    assert route.body is not None
    media_type, body = data.draw(bodies(route.body))
    path = route.path.replace("{policy}", "actor").replace("{worker_id}", "w0")
    status, num_new = runner.run(sent(run, route, path, media_type, body))
    assert status < 500, (route.name, body)
    assert status < 400 or num_new == 0


@pytest.mark.timeout(120)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    route=st.sampled_from([route for route in ROUTES if route.method == "GET"]),
    name=st.text("abc/%\x00\u00e9-", max_size=6) | st.just("actor"),
    query=st.dictionaries(
        st.sampled_from(["after", "epoch", "rank", "world", "pinned"]), NUMBERS.map(str) | st.text(max_size=5)
    ),
)
def test_no_query_breaks_a_route(
    service: tuple[asyncio.Runner, Run], route: Route, name: str, query: dict[str, str]
) -> None:
    runner, run = service
    path = route.path.replace("{policy}", quote(name, safe="")).replace("{step:int}", "0")
    status, num_new = runner.run(sent(run, route, f"{path}?{urlencode(query)}", wire.JSON, b""))
    assert status < 500, (route.name, name, query)
    assert num_new == 0
