"""A peer, publisher or store of weights that misbehaves, over a real socket."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec

from astraflow.types import ChunkState

__all__ = ["SOURCE_KINDS", "Hostile", "hostile"]

SOURCE_KINDS = [
    "silent", "drips", "drips_head", "wrong_bytes", "wrong_length", "endless", "redirects", "huge_head",
    "hangs_up",
]  # fmt: skip
"""How a source of any kind misbehaves; a peer may also say `coming_for_ever`."""


class Hostile:
    """Claims to have every chunk, and misbehaves as its kind says; counts its requests."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.num_requests = 0
        self.inner_url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                self.num_requests += 1
                await self._answer(head, writer)
                await writer.drain()
        writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        if self.kind == "silent":
            await asyncio.Event().wait()
        if self.kind == "hangs_up":
            raise ConnectionError
        if whole := self._whole_answer(head):
            writer.write(whole)
            return
        first, last = asked_range(head)
        num_bytes, span = last - first + 1, f"Content-Range: bytes {first}-{last}/99999999"
        if self.kind == "drips":
            writer.write(f"HTTP/1.1 206 X\r\nContent-Length: {num_bytes}\r\n{span}\r\n\r\n".encode())
            await forever(writer, b"0", every_s=0.05)
        if self.kind == "drips_head":
            writer.write(b"HTTP/1.1 206 X\r\nX-Long: ")
            await forever(writer, b"0", every_s=0.05)
        if self.kind == "huge_head":
            writer.write(b"HTTP/1.1 206 X\r\nX-Long: ")
            await forever(writer, b"0" * 65_536, every_s=0.0)
        writer.write(f"HTTP/1.1 206 X\r\n{span}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        await forever(writer, b"10000\r\n" + bytes(65_536) + b"\r\n", every_s=0.0)

    def _whole_answer(self, head: str) -> bytes:
        """An answer that comes at once; empty if it never ends."""
        path = head.split()[1]
        if self.kind == "redirects":
            return reply("307 X", b"", f"Location: {self.inner_url}{path}")
        if "/state?" in path:
            state = "coming" if self.kind == "coming_for_ever" else "here"
            body = msgspec.msgpack.encode(ChunkState(state=state))
            return reply("200 OK", body, "Content-Type: application/msgpack")
        if self.kind not in {"wrong_bytes", "wrong_length"}:
            return b""
        first, last = asked_range(head)
        body = bytes(last - first + (self.kind == "wrong_bytes"))
        return reply("206 X", body, f"Content-Range: bytes {first}-{last}/99999999")


def asked_range(head: str) -> tuple[int, int]:
    first, last = head.split("bytes=")[1].split("\r\n")[0].split("-")
    return int(first), int(last)


def reply(status: str, body: bytes, field: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{field}\r\n\r\n".encode() + body


async def forever(writer: asyncio.StreamWriter, data: bytes, *, every_s: float) -> None:
    while True:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(every_s)


@contextlib.asynccontextmanager
async def hostile(kind: str) -> AsyncGenerator[tuple[Hostile, str]]:
    part = Hostile(kind)
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await part.answer(reader, writer)
        except asyncio.CancelledError:
            writer.close()
        finally:
            running.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 17)
    try:
        yield part, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in [*running]:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
