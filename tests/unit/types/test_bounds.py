"""Every field of every item has a bound, and what is beyond it never becomes an item."""

import inspect
import math
from typing import Any

import msgspec
import pytest

from astraflow import types, wire
from astraflow.errors import BoundError, WireError
from astraflow.types import (
    BusySpan,
    Commit,
    Episode,
    EpisodeResult,
    Fingerprints,
    Heartbeat,
    Item,
    LeaseRequest,
    Load,
    MetricItem,
    RegisterWorker,
    SessionRequest,
    WaitReason,
    bounds,
)

ITEMS = [
    item
    for _, item in inspect.getmembers(types, inspect.isclass)
    if issubclass(item, Item) and item is not Item
]
INFO = msgspec.inspect


def unbounded(kind: Any, at: str) -> list[str]:
    """Parts of a field's type that a peer could fill without end."""
    match kind:
        case INFO.IntType() | INFO.FloatType():
            return [] if kind.ge is not None and kind.le is not None else [at]
        case INFO.StrType() | INFO.BytesType():
            return [] if kind.max_length is not None else [at]
        case INFO.VarTupleType() | INFO.ListType():
            inner = unbounded(kind.item_type, f"{at}[]")
            return inner if kind.max_length is not None else [at, *inner]
        case INFO.TupleType():
            return [found for part in kind.item_types for found in unbounded(part, at)]
        case INFO.DictType():
            inner = unbounded(kind.key_type, f"{at} key") + unbounded(kind.value_type, f"{at}{{}}")
            return inner if kind.max_length is not None else [at, *inner]
        case INFO.UnionType():
            return [found for part in kind.types for found in unbounded(part, at)]
        case INFO.StructType() | INFO.LiteralType() | INFO.BoolType() | INFO.NoneType():
            return []
        case _:
            return [f"{at}: {type(kind).__name__}"]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.__name__)
def test_every_field_of_every_item_has_a_bound(item: type[Item]) -> None:
    info = INFO.type_info(item)
    assert isinstance(info, INFO.StructType)
    assert [f for field in info.fields for f in unbounded(field.type, field.name)] == []


def beat(**fields: Any) -> Heartbeat:
    return Heartbeat(lease_ids=(), load=Load(**fields))


ABSURD: dict[str, tuple[Item, str]] = {
    "num_free": (
        LeaseRequest(worker_id="w", num_free=2**63, served=()),
        r"`int` <= 65536 - at `\$.num_free`; got 9223372036854775808",
    ),
    "negative": (
        SessionRequest(trainer_id="t", durable_step=-1, fingerprints=Fingerprints()),
        r">= 0 - at `\$.durable_step`; got -1",
    ),
    "score": (Episode(trajectories=(), score=1e200), r"<= 1000000.0 - at `\$.score`; got 1e\+200"),
    "metric": (
        Commit(epoch=1, step=0, version=1, metrics=(MetricItem("loss", -1e16),)),
        r"at `\$.metrics\[0\]\[1\]`; got -1e\+16",
    ),
    "markup and escapes": (
        beat(waits_for=(WaitReason(kind="scoring", detail="\x1b[2J"),)),
        r"regex .* at `\$.load.waits_for\[0\].detail`; got '\\x1b",
    ),
    "line end": (
        beat(waits_for=(WaitReason(kind="scoring", detail="x\n"),)),
        r"at `\$.load.waits_for\[0\].detail`",
    ),
    "name": (
        RegisterWorker(name="a/b", hosts=(), engine="x", num_slots=1, fingerprints=Fingerprints()),
        r"at `\$.name`; got 'a/b'",
    ),
    "list": (
        Heartbeat(lease_ids=("",) * 65_537, load=Load()),
        r"of length <= 65536 - at `\$.lease_ids`; its length is 65537",
    ),
    "text": (Heartbeat(lease_ids=("9" * 5000,), load=Load()), r"<= 64 .*; its length is 5000"),
    "labels": (
        RegisterWorker(
            name="a", hosts=(), engine="x", num_slots=1, labels={"a": "b" * 2000}, fingerprints=Fingerprints()
        ),
        r"<= 1000 - at `\$.labels\[...\]`; its length is 2000",
    ),
}


@pytest.mark.parametrize("media_type", [wire.JSON, wire.MSGPACK])
@pytest.mark.parametrize("name", ABSURD)
def test_a_value_beyond_its_bound_is_refused_with_field_value_and_bound(name: str, media_type: str) -> None:
    item, message = ABSURD[name]
    with pytest.raises(BoundError, match=f"^{type(item).__name__}: Expected .*{message}"):
        wire.decode(wire.encode(item, media_type), type(item), media_type)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: (Episode(trajectories=(), score=value), Episode),
        lambda value: (beat(spans=(BusySpan("generate", 0.0, value),)), Heartbeat),
        lambda value: (LeaseRequest(worker_id="w", num_free=1, served=(), wait_s=value), LeaseRequest),
    ],
)
def test_no_number_that_is_not_finite_becomes_an_item(make: Any, value: float) -> None:
    item, kind = make(value)
    with pytest.raises(BoundError, match=r"got (nan|-?inf)"):
        wire.decode(wire.encode(item), kind)


@pytest.mark.parametrize("number", ["1e400", "9" * 5000, "-" + "9" * 400])
def test_a_number_that_no_float_holds_is_a_wire_error(number: str) -> None:
    body = b'{"trajectories": [], "type": "episode", "score": %s}' % number.encode()
    with pytest.raises(WireError, match=r"at `\$.score`"):
        wire.decode(body, Episode, wire.JSON)


def test_an_item_made_in_python_can_be_checked() -> None:
    good = Episode(trajectories=(), score=bounds.MAX_REWARD)
    assert wire.checked(good) == good
    with pytest.raises(BoundError, match="score"):
        wire.checked(Episode(trajectories=(), score=bounds.MAX_REWARD * 1.001))


@pytest.mark.parametrize(
    "body",
    [
        b'{"type": "episode", "trajectories": [], "value out of range": 1}',
        b'{"type": "episode", "trajectories": [], "a ` <= 1": 1}',
        b'{"type": "of length <= 3", "trajectories": []}',
        b'{"type": "episode", "trajectories": "matching regex"}',
        b'{"type": "episode", "trajectories": [], "score": "1e400"}',
        b'{"type": "episode", "trajectories": [], "score": 1e400',
        b'{"type": "episode", "trajectories": [], "metrics": [["loss"]], "score": 0}',
        b'{"type": "failure", "error_class": 7, "message": "out of range"}',
    ],
)
def test_a_malformed_message_is_not_taken_for_a_value_beyond_a_bound(body: bytes) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode(b'{"lease_id": "1.0.0", "outcome": %s}' % body, EpisodeResult, wire.JSON)
    assert not isinstance(caught.value, BoundError)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"type": "episode", "trajectories": [], "score": 1e7}', "got 10000000.0"),
        (b'{"type": "episode", "trajectories": [], "score": 1e400}', ""),
        (b'{"type": "episode", "trajectories": [], "score": -1%s}' % (b"0" * 400), ""),
        (b'{"type": "episode", "trajectories": [], "metrics": [["", 1e16]]}', r"got 1e\+16"),
        (b'{"type": "failure", "error_class": "\\u0000", "message": ""}', r"got '\\x00'"),
        (
            b'{"type": "failure", "error_class": "x", "message": "%s"}' % (b"x" * 99_999),
            "its length is 99999",
        ),
    ],
)
def test_the_value_beyond_a_bound_is_found_in_every_member_of_a_union(body: bytes, shown: str) -> None:
    with pytest.raises(BoundError, match=f"{shown}$"):
        wire.decode(b'{"lease_id": "1.0.0", "outcome": %s}' % body, EpisodeResult, wire.JSON)


def test_a_key_beyond_its_bound_is_told_from_a_value_of_the_wrong_type() -> None:
    worker = b'{"name": "a", "hosts": [], "engine": "x", "num_slots": 1, "fingerprints": {}, "labels": {%s}}'
    with pytest.raises(BoundError):
        wire.decode(worker % (b'"%s": ""' % (b"k" * 5000)), RegisterWorker, wire.JSON)
    with pytest.raises(WireError) as caught:
        wire.decode(worker % b'"k": 1', RegisterWorker, wire.JSON)
    assert not isinstance(caught.value, BoundError)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("name\udce9.txt", "name\ufffd.txt"),
        ("\ud83d", "\ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("a\ud83d\ude00b", "a\U0001f600b"),  # both halves, as some JSON writes them
        ("gr\u00fcn \U0001f600", "gr\u00fcn \U0001f600"),
    ],
)
def test_halves_of_surrogate_pairs_become_replacement_characters(given: str, expected: str) -> None:
    assert bounds.as_text(given) == expected
    assert types.Message(role="tool", content=given).content == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (rb'{"a": "name\udce9"}', {"a": "name\ufffd"}),
        (rb'{"a": ["\ud83d", {"\ude00": "\ud83d\ude00"}]}', {"a": ["\ufffd", {"\ufffd": "\U0001f600"}]}),
        (b'{"a": "name\xe9"}', {"a": "name\ufffd"}),
    ],
)
def test_json_of_other_programs_may_have_texts_that_are_no_unicode(body: bytes, expected: Any) -> None:
    assert wire.decode_foreign_json(body, dict[str, Any]) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"a": NaN}', b"[" * 100_000])
def test_what_is_no_json_of_the_kind_stays_an_error(body: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        wire.decode_foreign_json(body, dict[str, Any])
