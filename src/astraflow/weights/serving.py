"""Serves chunk files over HTTP: the code that publishers and peers share.

GET /v1/chunks/HASH (Range) -> bytes straight from the system's page cache, within the upload limit
"""

import asyncio
import mmap
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from astraflow.errors import Error, RefusedError, WeightsError
from astraflow.service.messages import error_response

__all__ = [
    "Handler",
    "UploadLimit",
    "chunk_response",
    "parse_version",
    "require_role",
    "with_error_responses",
]

Handler = Callable[[Request], Awaitable[Response]]
"""A function that answers the requests of a route."""

_BLOCK_BYTES = 1024 * 1024
"""Bytes per send: enough to hide the cost of a send, few enough that many receivers take turns."""
_LIMITED_BLOCK_BYTES = 64 * 1024
"""The same under an upload limit: small, so that the rate is smooth and receivers share it evenly."""
_SMOOTH_S = 0.02
"""A send that is due within this time is done immediately, because timers are not more precise."""
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")
_VERSION = re.compile(r"[0-9]{1,15}")
"""ASCII digits only: `int` accepts the digits of all scripts, and raises for thousands of digits."""
_MAX_SHOWN = 80
"""Characters of a request that a message repeats."""


class UploadLimit:
    """Limits the bytes per second that a service sends over all its connections; 0 means no limit.

    Passive: time is an argument.

    Example: `await asyncio.sleep(limit.delay_s(65536, loop.time()))`, then send 65,536 bytes.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0
        """Chunk bytes sent since the start."""
        self._free_at_s = 0.0

    def delay_s(self, num_bytes: int, now_s: float) -> float:
        """Reserves the next slot for these bytes; returns how long the sender must wait for it."""
        self.sent_bytes += num_bytes
        if not self.bytes_per_s:
            return 0.0
        begins_s = max(self._free_at_s, now_s)
        self._free_at_s = begins_s + num_bytes / self.bytes_per_s
        return begins_s - now_s if begins_s - now_s > _SMOOTH_S else 0.0


def with_error_responses(handler: Handler) -> Handler:
    """The handler, with our errors converted to responses."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Error as err:
            return error_response(err, request)

    return answer


def require_role(request: Request, *roles: str) -> None:
    """Raises: RefusedError unless the caller has one of the roles, or is admin."""
    role = str(request.scope["role"])
    if role not in {*roles, "admin"}:
        message = f"{request.url.path}: role {role!r} is not allowed; expected {' or '.join(roles)}"
        raise RefusedError(message, code="forbidden", status=403)


def parse_version(text: str) -> int | None:
    """The version that a request names; None if the text is not a version number."""
    return int(text) if _VERSION.fullmatch(text) else None


async def chunk_response(request: Request, path: Path, size: int | None, limit: UploadLimit) -> Response:
    """The chunk file, or the requested range of it. `size` is None for a chunk that is not here."""
    name = path.name[:_MAX_SHOWN]
    if size is None:
        message = f"chunk {name!r} is not here; its version may have been forgotten"
        raise RefusedError(message, code="unknown_chunk", status=404)
    start, end = _parse_range(request.headers.get("range", ""), size)
    try:
        fd = await asyncio.to_thread(os.open, path, os.O_RDONLY)
    except FileNotFoundError as err:
        message = f"chunk {name!r} has just been deleted"
        raise RefusedError(message, code="unknown_chunk", status=404) from err
    return _ChunkResponse(fd, (start, end), size, limit)


class _ChunkResponse(Response):
    """Streams `[start, end)` of an open file straight from the system's page cache, and closes the file.

    A thread first reads the blocks that are not in the cache, so that the event loop never waits for the
    disk.
    """

    def __init__(self, fd: int, span: tuple[int, int], size: int, limit: UploadLimit) -> None:
        start, end = span
        headers = {"content-length": str(end - start), "accept-ranges": "bytes"}
        is_part = span != (0, size)
        if is_part:
            headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
        super().__init__(
            status_code=206 if is_part else 200, headers=headers, media_type="application/octet-stream"
        )
        self._fd = fd
        self._start = start
        self._end = end
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        block_bytes = _LIMITED_BLOCK_BYTES if self._limit.bytes_per_s else _BLOCK_BYTES
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            if (size := os.fstat(self._fd).st_size) < self._end:
                raise WeightsError(f"a chunk file ends at {size} instead of {self._end}")
            if self._start == self._end:
                await send({"type": "http.response.body", "body": b""})
                return
            content = memoryview(mmap.mmap(self._fd, self._end, access=mmap.ACCESS_READ))
            for position in range(self._start, self._end, block_bytes):
                stop = min(position + block_bytes, self._end)
                if not _is_cached(self._fd, position, stop):
                    await asyncio.to_thread(os.pread, self._fd, stop - position, position)
                if delay_s := self._limit.delay_s(stop - position, loop.time()):
                    await asyncio.sleep(delay_s)
                is_last = stop == self._end
                body = content[position:stop]
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        finally:
            os.close(self._fd)


def _is_cached(fd: int, start: int, end: int) -> bool:
    """Whether both ends of a block are in memory. Also True if the file system (such as tmpfs) cannot
    tell."""
    if not hasattr(os, "RWF_NOWAIT"):  # not Linux
        return False
    try:
        for position in (start, end - 1):
            os.preadv(fd, [bytearray(1)], position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _parse_range(header: str, size: int) -> tuple[int, int]:
    """`[start, end)` of a Range header with one range; the whole chunk without a header."""
    if not header:
        return 0, size
    match = _RANGE.fullmatch(header.strip())
    first, last = match.groups() if match else ("", "")
    start = 0
    end = 0
    if first:
        start = int(first)
        end = min(int(last) + 1 if last else size, size)
    elif last:
        start = max(size - int(last), 0)
        end = size
    if start >= end:
        message = (
            f"range {header[:_MAX_SHOWN]!r} of {size} bytes cannot be served; expected one range bytes=A-B"
        )
        raise RefusedError(message, code="bad_range", status=416)
    return start, end
