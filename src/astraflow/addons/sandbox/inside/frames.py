"""The frames in which a service and a box talk over a stream socket: a JSON object and some byte strings.

    length of the head (4 bytes, big-endian) | head: JSON | the byte strings, one after the other

The head's key `sizes` holds the length of each byte string.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["LENGTH_BYTES", "MAX_HEAD_BYTES", "decoded_head", "decoded_length", "encoded", "received"]

LENGTH_BYTES = 4
MAX_HEAD_BYTES = 65_536
"""Largest head. Most of a head is names of files."""


def encoded(head: dict[str, Any], parts: Sequence[bytes]) -> bytes:
    """Returns a frame."""
    text = json.dumps({**head, "sizes": [len(part) for part in parts]}).encode()
    return b"".join([struct.pack(">I", len(text)), text, *parts])


def decoded_length(start: bytes) -> int:
    """Returns the length of the head. Raises: ValueError if it is too large."""
    (length,) = struct.unpack(">I", start)
    if length > MAX_HEAD_BYTES:
        raise ValueError(f"the head of a frame has {length} bytes; at most {MAX_HEAD_BYTES} are allowed")
    return length


def decoded_head(text: bytes, max_bytes: int) -> tuple[dict[str, Any], list[int]]:
    """Returns the head and the sizes of the byte strings.

    Raises: ValueError if the text isn't JSON, or if the byte strings together have more than `max_bytes`.
    """
    head: dict[str, Any] = json.loads(text)
    sizes: list[int] = head["sizes"]
    if sum(sizes) > max_bytes or min(sizes, default=0) < 0:
        raise ValueError(f"a frame has parts of {sizes} bytes; at most {max_bytes} together are allowed")
    return head, sizes


def received(source: socket.socket, max_bytes: int) -> tuple[dict[str, Any], list[bytes]] | None:
    """Reads a frame. Returns its head and its byte strings; None if the other end has closed the socket."""
    start = _read(source, LENGTH_BYTES)
    if start is None:
        return None
    head, sizes = decoded_head(_read(source, decoded_length(start)) or b"", max_bytes)
    parts = [_read(source, size) for size in sizes]
    return head, [part for part in parts if part is not None]


def _read(source: socket.socket, num_bytes: int) -> bytes | None:
    """Reads exactly this many bytes. Returns None if the socket closes before that."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    filled = 0
    while filled < num_bytes:
        num_read = source.recv_into(view[filled:])
        if num_read == 0:
            return None
        filled += num_read
    return bytes(data)
