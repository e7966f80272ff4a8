"""The protocol between a rollout service and a host: frames over a pair of Unix sockets.

The frames are those of `service.frames`, and their bodies are JSON. Both sides use this module, and a host
has only the standard library.

| kind | from | body | answer |
|---|---|---|---|
| `open` | service | `protocol`, `serve`, `args`, `paths`, `lists` | `opened`, or `failed` |
| `tasks` | service | `split`, `skip`, `limit` | `page`, or `failed` |
| `run` | service | the task and its endpoint | `ended`, or `failed` |
| `cancel` | service | `{}`; it has the number of a `run` | that of the `run`, or `failed` if that was over |
| `close` | service | `{}` | none: the host ends |
"""

import asyncio

from astraflow.service.frames import Frame, receive_frame

__all__ = ["MAX_BODY_BYTES", "PROTOCOL", "next_frame"]

PROTOCOL = 1
"""Version of the protocol. It changes with every incompatible change."""
MAX_BODY_BYTES = 16 << 20
"""Largest size of a body. The largest bodies are pages of tasks with their data."""


async def next_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Reads the next frame. Returns None if the other end has closed the socket.

    Raises: ValueError if the received bytes are not a frame.
    """
    try:
        return await receive_frame(reader.readexactly, MAX_BODY_BYTES)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
