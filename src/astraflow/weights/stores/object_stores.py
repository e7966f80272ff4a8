"""Versions in a store, for receivers that cannot reach the publisher: a shared folder or S3 object storage.

    publisher --- upload(manifest) ---> STORE/chunks/HASH, STORE/manifests/POLICY/N.json <--- receivers

The layout is that of a publisher's folder, so that a store on a shared disk can be read like one. A manifest
appears after all its chunks; chunks that no kept version refers to are deleted. S3 is an add-on.
"""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

from astraflow import added, wire
from astraflow.errors import ConfigError, UnavailableError, WeightsError, WireError
from astraflow.types import Chunk, Manifest, SourceLink
from astraflow.weights.stores.chunk_store import ChunkStore, Fsync, sync_path, write_durably

__all__ = ["FileStore", "FolderStore", "Mirror", "ObjectReader", "make_store"]

_NUM_PARALLEL = 4


class FileStore(Protocol):
    """A place for named files. Methods raise OSError if they fail."""

    async def put(self, name: str, content: Path | bytes) -> None:
        """Stores a file, which appears only when it is complete."""

    async def delete(self, name: str) -> None:
        """Removes a file; does nothing if it does not exist."""


class FolderStore:
    """A folder that receivers see under the same path: a shared disk, or /dev/shm of one machine."""

    def __init__(self, folder: Path, *, fsync: Fsync = os.fsync) -> None:
        self._folder = folder
        self._fsync = fsync

    async def put(self, name: str, content: Path | bytes) -> None:
        """Writes a temporary file, syncs and renames it; durable on return."""
        await asyncio.to_thread(self._put, self._folder / name, content)

    async def delete(self, name: str) -> None:
        """Removes the file; does nothing if it does not exist."""
        await asyncio.to_thread((self._folder / name).unlink, missing_ok=True)

    def _put(self, path: Path, content: Path | bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.read_bytes()
        write_durably(path, memoryview(data), self._fsync)
        for folder in path.parents:  # the name of a new folder is durable once the one above it is synced
            sync_path(folder, self._fsync)
            if folder == self._folder:
                break


def make_store(url: str) -> FileStore:
    """The store at `file:///path` or `s3://bucket/prefix`. Raises: ConfigError."""
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return FolderStore(Path(unquote(urlsplit(url).path)))
    if scheme == "s3":
        return added.ObjectStore(url)
    raise ConfigError(f"store {url!r}: file:///path or s3://bucket/prefix is expected")


class Mirror:
    """Keeps a store equal to the folder of a publisher.

    Example: `await Mirror("s3://bucket/run").upload(manifest, chunks)`, then list `mirror.link` as a source.
    """

    def __init__(self, url: str, store: FileStore | None = None) -> None:
        self._store = store or make_store(url)
        self._there: set[str] = set()
        """Chunks known to be in the store. After a restart none is known, and all are uploaded again."""
        kind = "file" if urlsplit(url).scheme == "file" else "s3"
        self.link = SourceLink(kind=kind, url=f"{url.rstrip('/')}/chunks", labels={"store": "yes"})

    async def upload(self, manifest: Manifest, chunks: ChunkStore) -> None:
        """Makes a version downloadable from the store.

        Raises: UnavailableError if the store fails.
        """
        shortcut = manifest.shortcut.chunks if manifest.shortcut else ()
        wanted = (*manifest.chunks, *shortcut, *(f.chunk for f in manifest.files))
        slots = asyncio.Semaphore(_NUM_PARALLEL)

        async def put(chunk: Chunk) -> None:
            async with slots:
                await self._store.put(f"chunks/{chunk.hash}", chunks.path(chunk.hash))
            self._there.add(chunk.hash)

        try:
            missing = {c.hash: c for c in wanted if c.hash not in self._there}
            outcomes = await asyncio.gather(*map(put, missing.values()), return_exceptions=True)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
            await self._store.put(
                _manifest_name(manifest.policy, manifest.version), wire.encode(manifest, wire.JSON)
            )
        except OSError as err:
            raise UnavailableError(
                f"{manifest.policy!r} version {manifest.version} cannot be put into {self.link.url}: {err}"
            ) from err

    async def forget(self, policy: str, versions: Iterable[int], chunk_hashes: Iterable[str]) -> None:
        """Removes what the publisher forgot.

        Raises: OSError if the store fails; the call may then be repeated.
        """
        for version in versions:
            await self._store.delete(_manifest_name(policy, version))
        for chunk_hash in chunk_hashes:
            self._there.discard(chunk_hash)
            await self._store.delete(f"chunks/{chunk_hash}")


class ObjectReader:
    """Reads chunks of `s3` sources; implements `ChunkReader`, and finds manifests."""

    def __init__(self) -> None:
        self._stores: dict[str, added.ObjectStore] = {}

    async def read(self, url: str, chunk_hash: str, *, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a chunk.

        Raises: UnavailableError if the store fails; WeightsError if the chunk does not exist.
        """
        try:
            return await self._store(url).read(f"chunks/{chunk_hash}", start, end)
        except FileNotFoundError as err:
            raise WeightsError(f"chunk {chunk_hash} is not in {url}") from err
        except (OSError, ConfigError) as err:
            raise UnavailableError(f"{url}: {err}") from err

    async def manifest(self, url: str, policy: str, version: int) -> Manifest | None:
        """The manifest of a version; None if the store does not have it."""
        name = _manifest_name(policy, version)
        try:
            return wire.decode(await self._store(url).read_all(name), Manifest, wire.JSON)
        except FileNotFoundError:
            return None
        except (OSError, ConfigError) as err:
            raise UnavailableError(f"{url}: {err}") from err
        except WireError as err:
            raise WeightsError(f"{url}: {name}: {err}") from err

    def _store(self, url: str) -> "added.ObjectStore":
        root = url.removesuffix("/chunks")
        # Without this check, the author of a manifest could make this process call any address.
        if not root.startswith("s3://"):
            raise ConfigError(f"source {url!r} of kind s3: s3://bucket/prefix is expected")
        if root not in self._stores:
            self._stores[root] = added.ObjectStore(root)
        return self._stores[root]


def _manifest_name(policy: str, version: int) -> str:
    return str(PurePosixPath("manifests", policy, f"{version}.json"))
