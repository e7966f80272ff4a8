import json
from typing import Annotated

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow import wire
from astraflow.errors import WireError
from astraflow.types import EpisodeResult, Failure, Sampling, Task, Trajectory, Turn, VersionSpan

TRAJECTORY = Trajectory(
    policy="actor",
    role="actor",
    token_ids=wire.column([5, 6, 7, 8, 2], "int32"),
    mask=wire.column([0, 0, 0, 1, 1], "uint8"),
    behavior_logprobs=wire.column([0, 0, 0, -0.7, -0.1], "float32"),
    versions=(VersionSpan(start=3, length=2, version=4),),
    temperature=1.0,
    finish_reason="stop",
    turns=(Turn(start=3, end=5, reward=1.0),),
    reward=1.0,
)


@pytest.mark.parametrize("media_type", [wire.JSON, wire.MSGPACK])
def test_an_item_survives_both_encodings(media_type: str) -> None:
    assert wire.decode(wire.encode(TRAJECTORY, media_type), Trajectory, media_type) == TRAJECTORY


def test_columns_are_base64_in_json_and_raw_in_msgpack() -> None:
    assert json.loads(wire.encode(TRAJECTORY, wire.JSON))["mask"] == "AAAAAQE="
    assert wire.column([5, 6, 7, 8, 2], "int32") in wire.encode(TRAJECTORY)


def test_a_tagged_outcome_is_decoded_to_its_type() -> None:
    result = EpisodeResult(lease_id="1.0.0", outcome=Failure(error_class="Timeout", message="slow"))
    assert wire.decode(wire.encode(result, wire.JSON), EpisodeResult, wire.JSON) == result


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"id":"a","source":"b","prompt":"c","extra":1}', "unknown field"),
        (b'{"id":"a","source":"b"}', "missing required field"),
        (b'{"id":1,"source":"b","prompt":"c"}', "Expected `str`"),
        (b'{"id":"a","source":"b","prompt":"c"', "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 5000, "."),
    ],
)
def test_malformed_bodies_are_refused_with_the_reason(body: bytes, problem: str) -> None:
    with pytest.raises(WireError, match=problem):
        wire.decode(body, Task, wire.JSON)


def test_nan_is_no_json_number() -> None:
    with pytest.raises(WireError):
        wire.decode(b'{"temperature": NaN}', Sampling, wire.JSON)


def test_half_of_a_surrogate_pair_in_an_item_is_refused() -> None:
    with pytest.raises(WireError, match=r"Task: .*not valid Unicode: .*; correct it"):
        wire.checked(Task(id="a", source="b", prompt="\ud83d"))


def test_an_oversized_body_is_refused_before_decoding() -> None:
    with pytest.raises(WireError, match="over the limit of 10"):
        wire.decode(b"x" * 11, Task, wire.JSON, limit=10)


def test_an_unknown_media_type_is_refused() -> None:
    with pytest.raises(WireError, match="text/html"):
        wire.decode(b"{}", Task, "text/html")


def test_a_column_of_odd_length_is_refused() -> None:
    with pytest.raises(WireError, match="expected a multiple of 4"):
        wire.array(b"12345", "int32")


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_int_columns_round_trip(values: list[int]) -> None:
    assert wire.array(wire.column(values, "int32"), "int32").tolist() == values


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_float_columns_round_trip_bit_exactly(bits: list[int]) -> None:
    data = np.asarray(bits, dtype=np.uint32).view(np.float32)
    assert wire.array(wire.column(data, "float32"), "float32").tobytes() == data.tobytes()


@given(st.binary(max_size=200))
def test_decoding_any_bytes_gives_an_item_or_a_wire_error(body: bytes) -> None:
    for media_type in (wire.JSON, wire.MSGPACK):
        try:
            item = wire.decode(body, Task, media_type)
        except WireError:
            continue
        assert isinstance(item, msgspec.Struct)


class Few(msgspec.Struct):
    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=2)]


def test_a_short_list_of_long_items_is_shown_in_part() -> None:
    body = json.dumps({"names": ["x" * 9_000] * 3}).encode()
    with pytest.raises(WireError, match=r"; got \['xxx.*\.\.\.") as raised:
        wire.decode(body, Few, wire.JSON)
    assert len(str(raised.value)) < 2_000
