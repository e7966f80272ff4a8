"""Frames between a service and its children."""

import json
import socket
import struct

import pytest

from astraflow.service import frames


def sent(data: bytes, *, max_bytes: int = 1_000) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        return frames.receive_now(ours, max_bytes)


def test_a_frame_arrives_as_it_was_sent() -> None:
    head, parts = sent(frames.encode({"a": [1]}, [b"x\0", b"", b"yz"])) or ({}, [])
    assert head["a"] == [1]
    assert parts == [b"x\0", b"", b"yz"]


def test_the_end_of_the_socket_is_no_frame() -> None:
    assert sent(b"") is None
    assert sent(b"\0\0") is None


def test_heads_and_parts_are_bounded() -> None:
    with pytest.raises(ValueError, match="at most 65536"):
        sent(struct.pack(">I", 65_537))
    with pytest.raises(ValueError, match="at most 1000 together"):
        sent(frames.encode({}, [b"x" * 600, b"x" * 600]))


@pytest.mark.parametrize("sizes", [[-1, 5], [-5]])
def test_negative_sizes_are_refused(sizes: list[int]) -> None:
    head = json.dumps({"sizes": sizes}).encode()
    with pytest.raises(ValueError, match="at most"):
        sent(struct.pack(">I", len(head)) + head)
