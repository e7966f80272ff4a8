"""The protocol between a rollout service and a host: frames over a pair of Unix sockets.

A frame has the format of the sandbox (`sandbox.inside.frames`), with one byte string: the body, which is
JSON. Its head has the `kind` of the message and the `number` of its request. Both sides use this module, and
a host has only the standard library.

| kind | from | body | answer |
|---|---|---|---|
| `open` | service | `protocol`, `serve`, `args`, `paths`, `lists` | `opened`, or `failed` |
| `tasks` | service | `split`, `skip`, `limit` | `page`, or `failed` |
| `run` | service | the task and its endpoint | `ended`, or `failed` |
| `cancel` | service | `{}`; it has the number of a `run` | that of the `run`, or `failed` if that was over |
| `close` | service | `{}` | none: the host ends |
"""

import asyncio
from typing import NamedTuple

from astraflow.addons.sandbox.inside import frames

__all__ = ["MAX_BODY_BYTES", "PROTOCOL", "Frame", "next_frame", "pack"]

PROTOCOL = 1
"""Version of the protocol. It changes with every incompatible change."""
MAX_BODY_BYTES = 16 << 20
"""Largest size of a body. The largest bodies are pages of tasks with their data."""


class Frame(NamedTuple):
    """A message."""

    kind: str
    number: int
    body: bytes


def pack(frame: Frame) -> bytes:
    """Encodes a frame."""
    return frames.encoded({"kind": frame.kind, "number": frame.number}, [frame.body])


async def next_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Reads the next frame. Returns None if the other end has closed the socket.

    Raises: ValueError if the received bytes are not a frame.
    """
    try:
        length = frames.decoded_length(await reader.readexactly(frames.LENGTH_BYTES))
        head, sizes = frames.decoded_head(await reader.readexactly(length), MAX_BODY_BYTES)
        kind = head["kind"]
        number = head["number"]
        if not (isinstance(kind, str) and isinstance(number, int) and len(sizes) == 1):
            raise ValueError(f"a frame has the head {head!r:.200}")
        return Frame(kind, number, await reader.readexactly(sizes[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except (KeyError, TypeError, RecursionError) as err:
        raise ValueError(f"the head of a frame cannot be read: {type(err).__name__}: {err}") from err
