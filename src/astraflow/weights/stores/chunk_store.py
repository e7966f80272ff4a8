"""Content-addressed chunk files and the manifests that name them, in one folder.

    chunks/HASH                 bytes of one chunk
    manifests/POLICY/N.json     manifest of a version, without sources
    incoming/POLICY/            where trainers put the files that they hand over (not managed by the store)
    lock                        held by the one process that owns the folder

Invariants: a file under its final name is complete and durable (written aside, synced, renamed); a manifest
appears after all its chunks; a chunk stays as long as a manifest or a publication in progress refers to it.
Opening the folder restores these invariants by removing what a crash left unfinished. All methods block, so
call them from an executor; several threads may do so.
"""

import contextlib
import fcntl
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from astraflow import wire
from astraflow.errors import ConfigError, WireError
from astraflow.types import Chunk, FileInfo, Manifest
from astraflow.weights.manifest import check_policy_name, hash_bytes

__all__ = ["ChunkStore", "Fsync", "sync_path", "write_durably"]

Fsync = Callable[[int], None]
"""Makes the file or folder behind an open file descriptor durable."""

_log = logging.getLogger(__name__)


class ChunkStore:
    """Chunks and manifests of one or more policies; `close` it to let another process open the folder.

    Example::

        store = ChunkStore(Path("weights"), keep=4)
        chunks = tuple(store.put(part) for part in parts)     # counted for this publication
        store.add(manifest_of(chunks))                        # durable; the counts are now the manifest's
        store.retain("actor", needed=[3])                     # all but version 3 and the newest 4 go

    `fsync` makes a file or folder durable; a test passes its own.
    Raises: ConfigError if another process holds the folder.
    """

    def __init__(self, folder: Path, *, keep: int, fsync: Fsync = os.fsync) -> None:
        self._keep = keep
        self._fsync = fsync
        self._chunks = folder / "chunks"
        self._manifests = folder / "manifests"
        self.incoming = folder / "incoming"
        for part in (self._chunks, self._manifests, self.incoming):
            part.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock_folder(folder)
        self._mutex = threading.Lock()
        self._counts: Counter[str] = Counter()
        """How many manifests and publications in progress refer to a chunk, by hash."""
        self._sizes: dict[str, int] = {}
        """Bytes of the complete chunks, by hash."""
        self._known: dict[str, dict[int, Manifest]] = {}
        """The manifests that are stored, by policy and version."""
        try:
            self._restore()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the folder."""
        os.close(self._lock_fd)

    def manifest(self, policy: str, version: int) -> Manifest | None:
        """The manifest of a version, without sources."""
        return self._known.get(policy, {}).get(version)

    def versions(self) -> dict[str, tuple[int, ...]]:
        """The versions of each policy, oldest first."""
        with self._mutex:
            return {policy: tuple(sorted(known)) for policy, known in self._known.items()}

    def usage(self) -> tuple[int, int]:
        """The number of chunks, and their total bytes."""
        with self._mutex:
            return len(self._sizes), sum(self._sizes.values())

    def hashes(self) -> frozenset[str]:
        """The hashes of the complete chunks."""
        with self._mutex:
            return frozenset(self._sizes)

    def size(self, chunk_hash: str) -> int | None:
        """Bytes of a complete chunk; None for any other."""
        return self._sizes.get(chunk_hash)

    def path(self, chunk_hash: str) -> Path:
        """The file of a chunk. Only for hashes that `size` knows."""
        return self._chunks / chunk_hash

    def put(self, data: bytes | memoryview, source: Path | None = None) -> Chunk:
        """Makes the bytes durable under their hash, and counts them for the publication in progress.
        `source`: see `write_durably`."""
        view = memoryview(data)
        chunk = Chunk(hash=hash_bytes(view), num_bytes=view.nbytes)
        with self._mutex:
            self._counts[chunk.hash] += 1
        try:
            if not self._holds(chunk):
                write_durably(self.path(chunk.hash), view, self._fsync, source)
        except OSError:
            self.release((chunk,))
            raise
        with self._mutex:
            self._sizes[chunk.hash] = chunk.num_bytes
        return chunk

    def release(self, chunks: Iterable[Chunk]) -> None:
        """Takes back counts of `put` that no manifest has taken over."""
        with self._mutex:
            self._drop(chunks)

    def reuse_files(self, policy: str) -> tuple[FileInfo, ...]:
        """The model files of the policy's newest version, counted for another manifest."""
        with self._mutex:
            known = self._known.get(policy)
            files = known[max(known)].files if known else ()
            self._counts.update(f.chunk.hash for f in files)
        return files

    def add(self, manifest: Manifest) -> None:
        """Makes the manifest durable. From now on the counts of its chunks belong to it.

        A manifest for the same version (the same content in another encoding) is replaced, and its chunks are
        released.
        """
        folder = self._manifests / check_policy_name(manifest.policy)
        folder.mkdir(exist_ok=True)
        sync_path(self._manifests, self._fsync)
        sync_path(self._chunks, self._fsync)
        encoded = memoryview(wire.encode(manifest, wire.JSON))
        write_durably(folder / f"{manifest.version}.json", encoded, self._fsync)
        sync_path(folder, self._fsync)
        with self._mutex:
            known = self._known.setdefault(manifest.policy, {})
            replaced = known.get(manifest.version)
            known[manifest.version] = manifest
            if replaced is not None:
                self._drop(_chunks_of(replaced))

    def retain(self, policy: str, needed: Collection[int]) -> tuple[int, ...]:
        """Removes versions, and returns their numbers.

        The versions in `needed` stay, and so do the newest `keep` and the base of every delta that stays.
        """
        with self._mutex:
            known = self._known.get(policy, {})
            survivors = {*sorted(known)[-self._keep :], *needed}
            for version in sorted(known, reverse=True):  # newest first, so that bases of bases stay as well
                if version in survivors and known[version].kind == "delta":
                    survivors.add(known[version].base)
            gone = tuple(v for v in sorted(known) if v not in survivors)
            for version in gone:
                manifest = known.pop(version)
                (self._manifests / policy / f"{version}.json").unlink(missing_ok=True)
                self._drop(_chunks_of(manifest))
        return gone

    def _drop(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._counts[chunk.hash] -= 1
            if self._counts[chunk.hash] <= 0:
                del self._counts[chunk.hash]
                self._sizes.pop(chunk.hash, None)
                self.path(chunk.hash).unlink(missing_ok=True)

    def _holds(self, chunk: Chunk) -> bool:
        """Whether the file exists and is undamaged. The caller rewrites a damaged one."""
        if self._sizes.get(chunk.hash) != chunk.num_bytes:
            return False
        try:
            return hash_bytes(self.path(chunk.hash).read_bytes()) == chunk.hash
        except FileNotFoundError:
            return False

    def _restore(self) -> None:
        on_disk = {entry.name: entry.stat().st_size for entry in os.scandir(self._chunks)}
        for folder in sorted(self._manifests.iterdir()):
            for path in sorted(folder.iterdir()):
                manifest = _read_manifest(path, on_disk)
                if manifest is None:
                    path.unlink()
                    continue
                self._known.setdefault(folder.name, {})[manifest.version] = manifest
                for chunk in _chunks_of(manifest):
                    self._counts[chunk.hash] += 1
                    self._sizes[chunk.hash] = chunk.num_bytes
        for name in on_disk.keys() - self._counts.keys():
            (self._chunks / name).unlink()


def _chunks_of(manifest: Manifest) -> tuple[Chunk, ...]:
    shortcut = manifest.shortcut.chunks if manifest.shortcut else ()
    return (*manifest.chunks, *shortcut, *(f.chunk for f in manifest.files))


def _read_manifest(path: Path, on_disk: dict[str, int]) -> Manifest | None:
    """The manifest; None, with a warning, if a crash or a disk fault left a version that cannot be served."""
    if path.suffix != ".json":
        return None
    try:
        manifest = wire.decode(path.read_bytes(), Manifest, wire.JSON)
    except WireError as err:
        _log.warning("%s is damaged and is removed; the version is lost: %s", path, err)
        return None
    for chunk in _chunks_of(manifest):
        if on_disk.get(chunk.hash) != chunk.num_bytes:
            _log.warning(
                "%s version %d is removed: chunk %s has %s bytes, expected %d",
                manifest.policy,
                manifest.version,
                chunk.hash,
                on_disk.get(chunk.hash, "no"),
                chunk.num_bytes,
            )
            return None
    return msgspec.structs.replace(manifest, sources=())


def _lock_folder(folder: Path) -> int:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(fd)
        raise ConfigError(
            f"{folder} is in use by another publisher; stop that one, or choose another folder"
        ) from err
    return fd


def write_durably(path: Path, view: memoryview, fsync: Fsync = os.fsync, source: Path | None = None) -> None:
    """Writes a temporary file, syncs and renames it. The new name is durable once its folder is synced.

    `source`: a file with the same bytes, which never changes. It gets a second name instead of being copied.
    """
    aside = path.with_name(f"{path.name}.{threading.get_ident()}.tmp")
    aside.unlink(missing_ok=True)  # never write into a file that has another name
    try:
        with contextlib.suppress(OSError):  # file systems without links
            if source is not None:
                aside.hardlink_to(source)
        if not aside.exists():
            aside.write_bytes(view)
        sync_path(aside, fsync)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)  # still there after a failure, or if `path` was the same file already


def sync_path(path: Path, fsync: Fsync = os.fsync) -> None:
    """Makes the bytes of a file, or the names in a folder, survive a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fsync(fd)
    finally:
        os.close(fd)
