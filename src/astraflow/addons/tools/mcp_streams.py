"""Carries the messages of an MCP server: of a program in the sandbox, or over HTTP.

    mcp.Client <--(messages)--> boxed_streams <--(the box's one open port)--> bridge <--(pipes)--> server

The bridge is a small program that starts the server in its box. Lines that aren't messages are skipped,
because many servers print some. A message that is too long is never held in memory.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectSendStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import ErrorData, JSONRPCError, jsonrpc_message_adapter

from astraflow.addons.sandbox.backends import chosen_maker
from astraflow.addons.sandbox.command import CommandEnd, CommandLimits
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.inside.program import FOLDER
from astraflow.addons.sandbox.openings import openings_for
from astraflow.addons.sandbox.passed_variables import passed_variables
from astraflow.errors import RolloutError, SandboxError

__all__ = ["TOO_LONG", "boxed_streams", "http_streams"]

TOO_LONG = -32_050
"""Code of the error that a request gets if its answer is too long. JSON-RPC leaves it to implementations."""
_MAX_BYTES = 8 << 20
"""Largest size of a message of a server."""
_KEPT_BYTES = 256
"""Number of bytes at each end of a longer message that are kept, to find the id of its request."""
_FIRST_ID = re.compile(rb'\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)')
_LAST_ID = re.compile(rb'"id"\s*:\s*(\d+)\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
_CHUNK = 1 << 16
_PORT = 50_000
"""The open port in a box. Each box has a network of its own."""
_LIFETIME_S = 1e7
"""Longer than a run lasts. The service ends the box."""
_ENDING_S = 2.0
"""Time for a server to end after its input is closed."""
_SILENCE_S = 300.0
"""Longest wait for a part of an answer over HTTP. Calls have their own deadline."""
_BRIDGE = """
import os, socket, subprocess, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as channel:
    server = subprocess.Popen(sys.argv[2:], stdin=channel, stdout=channel, stderr=subprocess.PIPE)
left = 65536
while part := server.stderr.read1():
    left -= os.write(2, part[:left]) if left else 0
sys.exit(server.wait() & 255)
"""
"""Passes on only the beginning of what a server prints as errors: a box ends a program that prints too much,
and some servers log each call."""
_Streams: TypeAlias = tuple[Any, Any]
"""The streams from which a client reads and to which it writes. Their types are private to the library."""


@asynccontextmanager
async def boxed_streams(
    argv: Sequence[str], visible: Sequence[str], private: Sequence[Path], words: list[str]
) -> AsyncGenerator[_Streams]:
    """Starts a server in a box, which ends with the block.

    `visible`: further files and folders that it can read. `private`: those that it must not see. `words`
    gets, for error messages, the first line that isn't a message, and how the server ended.

    Raises: ConfigError if there is no usable sandbox or no such program; SandboxError; RolloutError.
    """
    words.clear()
    maker = await chosen_maker(SandboxConfig(), for_agents=True)
    env = {**passed_variables(), "HOME": FOLDER, "TMPDIR": FOLDER}
    openings = await asyncio.to_thread(
        openings_for,
        argv,
        folder=Path.cwd(),
        path=env.get("PATH", os.defpath),
        gateway=_PORT,
        visible=[Path(each) for each in visible],
        private=private,
    )
    bridge = ("python", "-I", "-S", "-c", _BRIDGE, str(_PORT), openings.program, *argv[1:])
    command = replace(openings, program=maker.python).command(
        bridge, {**env, "PWD": openings.folder}, limits=CommandLimits(wall_s=_LIFETIME_S)
    )
    box = await maker.make(openings)
    running = asyncio.create_task(box.execute(command, is_forwarding=False))
    connecting = asyncio.create_task(box.connect())
    try:
        await asyncio.wait({running, connecting}, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            raise RolloutError(f"the server did not start: {_end_text(running.result())}")
        reader, writer = connecting.result()
        try:
            async with _pumped(reader, writer, words) as streams:
                yield streams
        finally:
            writer.close()
            with suppress(TimeoutError, SandboxError):
                async with asyncio.timeout(_ENDING_S):
                    words.append(_end_text(await asyncio.shield(running)))
    finally:
        for task in (running, connecting):
            task.cancel()
        await asyncio.wait({running, connecting})
        await box.close()


def _end_text(end: CommandEnd) -> str:
    printed = (end.stderr or end.unstartable).strip()
    return f"it ended with exit code {end.code}: {printed[-500:] or 'it printed no error'}"


@asynccontextmanager
async def _pumped(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: list[str]
) -> AsyncGenerator[_Streams]:
    """Converts a connection to streams of messages."""
    received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_send = anyio.create_memory_object_stream[SessionMessage](0)

    async def send() -> None:
        with to_send, suppress(OSError):
            async for message in to_send:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                writer.write(text.encode() + b"\n")
                await writer.drain()

    with incoming, outgoing:
        pumps = [asyncio.create_task(send()), asyncio.create_task(_receive(reader, received, words))]
        try:
            yield incoming, outgoing
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)


async def _receive(
    reader: asyncio.StreamReader, sink: MemoryObjectSendStream[SessionMessage | Exception], words: list[str]
) -> None:
    """Passes on the messages of a server until its output ends, which closes the sink."""
    with sink, suppress(OSError, anyio.BrokenResourceError):
        async for line, is_cut in _lines(reader):
            try:
                message = (
                    _too_long(line) if is_cut else jsonrpc_message_adapter.validate_json(line, by_name=False)
                )
            except ValueError:
                if line.strip() and not words:
                    words.append(f"it printed {line[:200]!r}")
            else:
                await sink.send(SessionMessage(message))


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bool]]:
    """Yields each line, and whether it was too long. The middle of such a line is missing."""
    line = bytearray()
    is_cut = False
    while chunk := await reader.read(_CHUNK):
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            yield bytes(line + part), is_cut
            line.clear()
            is_cut = False
        line += rest
        if len(line) > _MAX_BYTES:
            del line[_KEPT_BYTES:-_KEPT_BYTES]
            is_cut = True


def _too_long(line: bytes) -> JSONRPCError:
    """Returns the error that replaces a message. Raises: ValueError if it answers no request."""
    found = _FIRST_ID.match(line) or _LAST_ID.search(line[-_KEPT_BYTES:])
    if found is None:
        raise ValueError("no id")
    error = ErrorData(code=TOO_LONG, message=f"the result has more than {_MAX_BYTES:,} bytes")
    return JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=error)


@asynccontextmanager
async def http_streams(url: str, key: str) -> AsyncGenerator[_Streams]:
    """Connects to a URL, and sends the key, unless it is empty, with each request.

    The library follows no redirect to another origin.
    """
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
    timeout = httpx2.Timeout(30.0, read=_SILENCE_S)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [_bound]}) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=_MAX_BYTES) as streams,
    ):
        yield streams


async def _bound(response: httpx2.Response) -> None:
    """Bounds the size of an answer. The library itself bounds the events of a stream."""
    if "content-encoding" in response.headers:
        raise httpx2.DecodingError("the server compresses its answer, though it was asked not to")
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedBody(response.stream)


class _BoundedBody(httpx2.AsyncByteStream):
    def __init__(self, body: httpx2.AsyncByteStream) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in self._body:
            num_bytes += len(chunk)
            if num_bytes > _MAX_BYTES:
                raise httpx2.StreamError(f"the answer has more than {_MAX_BYTES:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()
