"""Messages between the launcher and a host: what arrives is what was sent, within bounds."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from astraflow.addons.cluster.host_frames import (
    FromHost,
    ProcessReport,
    Start,
    ToHost,
    encode_frame,
    read_frame,
)
from astraflow.errors import BoundError, WireError
from astraflow.protocols import ProcessSpec

TO_HOST = msgspec.msgpack.Decoder(ToHost)
FROM_HOST = msgspec.msgpack.Decoder(FromHost)


def stream_of(data: bytes) -> asyncio.StreamReader:
    stream = asyncio.StreamReader()
    stream.feed_data(data)
    stream.feed_eof()
    return stream


async def test_a_process_arrives_as_it_was_sent() -> None:
    spec = ProcessSpec(
        "rollout-0",
        ("python", "-m", "x"),
        {"A": "1"},
        Path("/far/rollout-0.log"),
        secrets={"TOKEN": "t"},
        reads=(Path("/far/ca.pem"),),
        scratch=(Path("/far/cache"),),
    )
    sent = Start.of(spec, {Path("/far/ca.pem"): b"certificate"}, version="1.0")
    got = await read_frame(stream_of(encode_frame(sent)), TO_HOST)
    assert got == sent
    assert isinstance(got, Start)
    assert got.spec == spec


async def test_a_frame_that_claims_gigabytes_is_refused_before_it_is_read() -> None:
    with pytest.raises(BoundError, match=r"4,294,967,295 bytes"):
        await read_frame(stream_of(b"\xff\xff\xff\xff"), TO_HOST)


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode({"type": "Format", "disk": "c"})])
async def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="not a message between launcher and host"):
        await read_frame(stream_of(len(body).to_bytes(4, "big") + body), TO_HOST)


async def test_output_beyond_its_bound_is_refused() -> None:
    log = b"x" * 300_000
    report = ProcessReport(log=log, silent_s=None, works=True, condition="", code=None, is_evicted=False)
    with pytest.raises(WireError, match="log"):
        await read_frame(stream_of(encode_frame(report)), FROM_HOST)


async def test_a_frame_that_is_cut_off_is_the_end() -> None:
    with pytest.raises(EOFError):
        await read_frame(stream_of(b"\x00\x00\x00\x09abc"), TO_HOST)
