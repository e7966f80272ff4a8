"""Reads chunks, with one class per kind of source.

Each class implements `ChunkReader`, and `ManifestReader` for the manifests that are stored with the chunks.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from astraflow import wire
from astraflow.errors import RefusedError, UnavailableError, WeightsError, WireError
from astraflow.service.client import ServiceClient
from astraflow.types import Chunk, ChunkState, Manifest
from astraflow.weights.peers.peer import State
from astraflow.weights.range_sockets import RangeSockets

__all__ = ["ChunkReader", "FileReader", "HttpReader", "ManifestReader"]

_ANSWER_S = 2.0
"""Longest time from the end of a peer's wait to its answer."""


class ChunkReader(Protocol):
    """Reads content-addressed chunks from one kind of source."""

    async def read(self, url: str, chunk_hash: str, *, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a chunk.

        Raises: UnavailableError if the source does not answer; WeightsError if it does not have the bytes.
        """
        ...


class ManifestReader(Protocol):
    """Looks up versions at a source of their chunks."""

    async def manifest(self, url: str, policy: str, version: int) -> Manifest | None:
        """The manifest; None if the source does not have it.

        Raises: UnavailableError if the source does not answer; WeightsError if it refuses.
        """
        ...


class HttpReader:
    """Reads from publishers and peers over HTTP, with one client per URL. Call `close` at the end.

    `connect` makes the client of a URL. The client's patience is how long a source is tried before the next
    one. `read_into` first reads straight into the caller's memory, over separate connections that show the
    `token`. It abandons a source that sends no byte for `quiet_s`.
    """

    def __init__(
        self,
        connect: Callable[[str], ServiceClient],
        *,
        token: str = "",
        range_timeout_s: float = 60.0,
        quiet_s: float = 10.0,
    ) -> None:
        self._connect = connect
        self._token = token
        self._range_timeout_s = range_timeout_s
        self._quiet_s = quiet_s
        self._clients: dict[str, ServiceClient] = {}
        self._sockets: dict[str, RangeSockets] = {}
        self.received_bytes = 0
        """Bytes of chunks that have arrived since the start, complete or not, right or wrong."""

    async def read(self, url: str, chunk_hash: str, *, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a chunk. Raises: UnavailableError; WeightsError if the source refuses."""
        try:
            data = await self._client(url).fetch(
                f"/v1/chunks/{chunk_hash}", start=start, end=end, timeout_s=self._range_timeout_s
            )
            self._note_received(len(data))
            return data
        except (RefusedError, WireError) as err:
            raise WeightsError(str(err)) from err

    async def read_into(self, url: str, chunk_hash: str, view: memoryview, *, start: int) -> None:
        """Like `read`, but directly into `view`."""
        if url not in self._sockets:
            self._sockets[url] = RangeSockets(
                url, token=self._token, quiet_s=self._quiet_s, on_bytes=self._note_received
            )
        path = f"/v1/chunks/{chunk_hash}"
        timeout_s = self._range_timeout_s
        if not await self._sockets[url].fill(path, view, start=start, timeout_s=timeout_s):
            view[:] = await self.read(url, chunk_hash, start=start, end=start + view.nbytes)

    async def manifest(self, url: str, policy: str, version: int) -> Manifest | None:
        """The manifest of a version; None if the publisher does not have it, or no longer has it."""
        try:
            return await self._client(url).call("GET", f"/v1/manifests/{policy}/{version}", Manifest)
        except RefusedError as err:
            if err.status == 404:
                return None
            raise WeightsError(str(err)) from err
        except WireError as err:
            raise WeightsError(str(err)) from err

    async def state(self, url: str, chunk: Chunk, manifest: Manifest, wait_s: float) -> State:
        """The state of a chunk at a peer, which waits up to `wait_s` for the chunk before it answers.

        Raises: UnavailableError if the peer does not answer; WeightsError if it refuses.
        """
        params = {"policy": manifest.policy, "version": str(manifest.version), "wait_s": f"{wait_s:.3f}"}
        path = f"/v1/chunks/{chunk.hash}/state"
        timeout_s = wait_s + _ANSWER_S
        try:
            reply = await self._client(url).call("GET", path, ChunkState, params=params, timeout_s=timeout_s)
        except (RefusedError, WireError) as err:
            raise WeightsError(str(err)) from err
        return reply.state

    async def close(self) -> None:
        """Closes the connections."""
        for client in self._clients.values():
            await client.close()
        for sockets in self._sockets.values():
            sockets.close()
        self._clients.clear()
        self._sockets.clear()

    def _note_received(self, num_bytes: int) -> None:
        self.received_bytes += num_bytes

    def _client(self, url: str) -> ServiceClient:
        if url not in self._clients:
            self._clients[url] = self._connect(url)
        return self._clients[url]


class FileReader:
    """Reads from a folder of chunk files; the URL is a path, or `file:///path`."""

    async def read(self, url: str, chunk_hash: str, *, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a chunk.

        Raises: UnavailableError if the folder does not exist; WeightsError if the chunk does not exist or is
        too short.
        """
        return await asyncio.to_thread(_read_range, _folder(url), chunk_hash, start, end)

    async def manifest(self, url: str, policy: str, version: int) -> Manifest | None:
        """The manifest of a version, if the folder is the chunk folder of a publisher."""
        path = _folder(url).parent / "manifests" / policy / f"{version}.json"
        try:
            return wire.decode(await asyncio.to_thread(path.read_bytes), Manifest, wire.JSON)
        except OSError:
            return None
        except WireError as err:
            raise WeightsError(f"{path}: {err}") from err


def _folder(url: str) -> Path:
    return Path(unquote(urlsplit(url).path)) if url.startswith("file:") else Path(url)


def _read_range(folder: Path, chunk_hash: str, start: int, end: int) -> bytes:
    try:
        with (folder / chunk_hash).open("rb") as file:
            data = os.pread(file.fileno(), end - start, start)
    except FileNotFoundError as err:
        if folder.is_dir():
            raise WeightsError(f"chunk {chunk_hash} is not in {folder}") from err
        raise UnavailableError(f"{folder} does not exist") from err
    except OSError as err:
        raise UnavailableError(f"{folder}: {err}") from err
    if len(data) != end - start:
        raise WeightsError(
            f"chunk {chunk_hash} in {folder} ends at {start + len(data)}, expected {end} or more"
        )
    return data
