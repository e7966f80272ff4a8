"""The frames in which this process talks to its children over stream sockets: JSON and some byte strings.

    length of the head (4 bytes, big-endian) | head: JSON | the byte strings, one after the other

The head's key `sizes` holds the length of each byte string. Where several requests can be open, or an answer
can belong to another request, the head has a `kind` and a `number`, and there is one byte string (`Frame`).

Hosts and boxes import this module in a Python that may have only the standard library.

Three channels have other forms: orders to the fork server carry descriptors, answers of a trainer's ranks may
be longer than a head, and messages to other machines have types (`host_frames`).
"""

import json
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Frame", "encode", "pack", "receive", "receive_frame", "receive_now"]

_LENGTH_BYTES = 4
_MAX_HEAD_BYTES = 65_536
"""Largest head. Most of a head is names of files."""


class Frame(NamedTuple):
    """A request or an answer."""

    kind: str
    number: int
    """The number of the request. Its answer has the same number."""
    body: bytes


def encode(head: dict[str, Any], parts: Sequence[bytes]) -> bytes:
    """Returns the bytes of a head and some byte strings."""
    text = json.dumps({**head, "sizes": [len(part) for part in parts]}).encode()
    return b"".join([struct.pack(">I", len(text)), text, *parts])


def pack(frame: Frame) -> bytes:
    """Returns the bytes of a frame."""
    return encode({"kind": frame.kind, "number": frame.number}, [frame.body])


async def receive(
    read: Callable[[int], Awaitable[bytes]], max_bytes: int
) -> tuple[dict[str, Any], list[bytes]]:
    """Receives a head and its byte strings. `read` reads exactly as many bytes as it's asked for.

    Raises: ValueError if these aren't frames, or the byte strings together have more than `max_bytes`; what
    `read` raises.
    """
    length = _decode_length(await read(_LENGTH_BYTES))
    head, sizes = _decode_head(await read(length), max_bytes)
    return head, [await read(size) for size in sizes]


async def receive_frame(read: Callable[[int], Awaitable[bytes]], max_bytes: int) -> Frame:
    """Receives a frame. Raises: as `receive`."""
    head, parts = await receive(read, max_bytes)
    kind = head.get("kind")
    number = head.get("number")
    if not (isinstance(kind, str) and isinstance(number, int) and len(parts) == 1):
        raise ValueError(f"a frame has the head {head!r:.200}")
    return Frame(kind, number, parts[0])


def receive_now(source: socket.socket, max_bytes: int) -> tuple[dict[str, Any], list[bytes]] | None:
    """Does what `receive` does, on a blocking socket. Returns None if the other end has closed the socket."""
    start = _read(source, _LENGTH_BYTES)
    if start is None:
        return None
    head, sizes = _decode_head(_read(source, _decode_length(start)) or b"", max_bytes)
    parts = [_read(source, size) for size in sizes]
    return head, [part for part in parts if part is not None]


def _decode_length(start: bytes) -> int:
    (length,) = struct.unpack(">I", start)
    if length > _MAX_HEAD_BYTES:
        raise ValueError(f"the head of a frame has {length} bytes; at most {_MAX_HEAD_BYTES} are allowed")
    return length


def _decode_head(text: bytes, max_bytes: int) -> tuple[dict[str, Any], list[int]]:
    try:
        head: dict[str, Any] = json.loads(text)
        sizes: list[int] = head.pop("sizes")
        is_bounded = sum(sizes) <= max_bytes and min(sizes, default=0) >= 0
    except (KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ValueError(f"the head of a frame cannot be read: {type(err).__name__}: {err}") from err
    if not is_bounded:
        raise ValueError(f"a frame has parts of {sizes} bytes; at most {max_bytes} together are allowed")
    return head, sizes


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
