"""Taking over a version from a trainer: a file in `incoming/` becomes chunks and a manifest.

In full: the file is mapped, cut, hashed, stored by a few threads, and compared with what the trainer
said. As a delta: both versions are mapped and compared, the new one is hashed on the way.
Nothing of a version that is refused, or that a crash cuts short, stays in the store.
"""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec

from astraflow.errors import Error, UnavailableError, WireError
from astraflow.types import Chunk, FileInfo, HandOver, Manifest, Shortcut
from astraflow.weights.bases import Bases, map_file
from astraflow.weights.chunk_store import ChunkStore
from astraflow.weights.codec.encoder import encode_delta
from astraflow.weights.codec.layout import ENCODING
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import (
    VersionDigest,
    check_file_name,
    check_manifest,
    check_tensors,
    cut,
    delta_of,
    span_bytes,
)

__all__ = ["is_same", "take_over"]

_log = logging.getLogger(__name__)
_NUM_WRITERS = 4
"""Chunks that are written and synced at once: disks need a few requests in flight."""


def is_same(manifest: Manifest, hand_over: HandOver) -> bool:
    """True if the version that is known has the content that is handed over."""
    return (
        manifest.digest == hand_over.digest
        and manifest.tensors == hand_over.tensors
        and (not hand_over.files or manifest.files == hand_over.files)
    )


def take_over(
    store: ChunkStore, hand_over: HandOver, config: WeightsConfig, bases: Bases | None = None
) -> Manifest:
    """Makes a handed-over version durable; blocks. The manifest has no sources.

    With `bases` it becomes a delta to the version before where one exists and is smaller, and is stored in
    full only from time to time; its file is then kept as the next base.

    Raises: WireError or WeightsError if file, table and digest disagree or the path lies outside `incoming`;
    UnavailableError if the disk refuses. The store is then as before.
    """
    counted: list[Chunk] = []
    try:
        with _opened(store.incoming, hand_over) as fd:
            content = _Content(fd, hand_over, config, counted)
            manifest = _store_version(store, content, bases)
        check_manifest(manifest)
        store.add(manifest)
    except Error:
        store.release(counted)
        raise
    except OSError as err:
        store.release(counted)
        raise UnavailableError(f"publisher cannot store {_name(hand_over)}: {err}") from err
    if bases is not None:
        bases.keep(manifest, store.incoming / hand_over.path)
    _log.info(
        "%s: %s of %d bytes in %d chunks",
        *(_name(hand_over), manifest.kind, manifest.num_bytes, len(manifest.chunks)),
    )
    return manifest


@dataclass(frozen=True, slots=True)
class _Content:
    """A version on its way in. `counted` collects what the store counts for it, also on failure."""

    fd: int
    hand_over: HandOver
    config: WeightsConfig
    counted: list[Chunk]


def _store_version(store: ChunkStore, content: _Content, bases: Bases | None) -> Manifest:
    hand_over = content.hand_over
    shortcut = _store_delta(store, content, bases) if bases is not None else None
    manifest = Manifest(
        policy=hand_over.policy,
        version=hand_over.version,
        kind="full",
        tensors=hand_over.tensors,
        chunks=(),
        digest=hand_over.digest,
        num_bytes=0,
        created_s=time.time(),
        shortcut=shortcut,
    )
    delta = delta_of(manifest)
    if delta is not None and not _is_full_due(store, content, delta):
        manifest = delta
    else:
        manifest = msgspec.structs.replace(manifest, chunks=_store_chunks(store, content))
    files = _store_files(store, content)
    num_bytes = sum(c.num_bytes for c in (*manifest.chunks, *(f.chunk for f in files)))
    return msgspec.structs.replace(manifest, files=files, num_bytes=num_bytes)


def _store_files(store: ChunkStore, content: _Content) -> tuple[FileInfo, ...]:
    hand_over = content.hand_over
    end = span_bytes(hand_over.tensors)
    for info in hand_over.files:
        content.counted.append(store.put(os.pread(content.fd, info.chunk.num_bytes, end)))
        end += info.chunk.num_bytes
        if content.counted[-1] != info.chunk:
            raise WireError(f"{_name(hand_over)}: file {info.name!r} does not hash to {info.chunk.hash}")
    if hand_over.files:
        return hand_over.files
    files = store.reuse_files(hand_over.policy)
    content.counted.extend(f.chunk for f in files)
    return files


def _store_delta(store: ChunkStore, content: _Content, bases: Bases) -> Shortcut | None:
    """The difference to the version before, if there is one that a receiver may start from and the
    difference is smaller than the version."""
    hand_over, config = content.hand_over, content.config
    base = bases.base(hand_over.policy, hand_over.tensors)
    if base is None or hand_over.is_first or hand_over.files or base.manifest.version >= hand_over.version:
        return None
    new = bases.map(hand_over.policy, content.fd, span_bytes(hand_over.tensors))
    digest = VersionDigest(new)
    pieces = encode_delta(
        base.data,
        new,
        hand_over.tensors,
        base_digest=base.manifest.digest,
        digest=hand_over.digest,
        hashed=digest,
    )
    chunks: list[Chunk] = []
    waiting = bytearray()

    def put(num_bytes: int) -> None:
        chunks.append(store.put(bytes(waiting[:num_bytes])))
        content.counted.append(chunks[-1])
        del waiting[:num_bytes]

    for piece in pieces:
        waiting += piece
        while len(waiting) > config.chunk_bytes:
            put(config.chunk_bytes)
    put(len(waiting))
    _check_digest(hand_over, digest)
    if sum(c.num_bytes for c in chunks) < new.nbytes:
        return Shortcut(base=base.manifest.version, encoding=ENCODING, chunks=tuple(chunks))
    del content.counted[-len(chunks) :]
    store.release(chunks)
    return None


def _is_full_due(store: ChunkStore, content: _Content, delta: Manifest) -> bool:
    """True if who starts from nothing would else need a longer chain than is allowed, or more bytes for
    the chain than for the version itself."""
    length, num_bytes = 1, sum(c.num_bytes for c in delta.chunks)
    base = store.manifest(delta.policy, delta.base)
    while base is not None and base.kind == "delta":
        length += 1
        num_bytes += sum(c.num_bytes for c in base.chunks)
        base = store.manifest(base.policy, base.base)
    is_whole = base is not None
    return not is_whole or length >= content.config.full_every or num_bytes > span_bytes(delta.tensors)


def _store_chunks(store: ChunkStore, content: _Content) -> tuple[Chunk, ...]:
    """Cuts, hashes and stores the tensors' bytes, a few chunks at once."""
    data = map_file(content.fd, span_bytes(content.hand_over.tensors))
    digest = VersionDigest(data)

    def store_one(start: int, end: int) -> Chunk:
        digest.take(start, end)
        return store.put(data.data[start:end])

    with ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="publisher") as pool:
        writing = [pool.submit(store_one, *span) for span in cut(data.nbytes, content.config.chunk_bytes)]
        try:
            chunks = tuple(future.result() for future in writing)
        finally:
            for future in writing:
                future.cancel()
            wait(writing)
            content.counted.extend(f.result() for f in writing if not f.cancelled() and not f.exception())
    _check_digest(content.hand_over, digest)
    return chunks


def _check_digest(hand_over: HandOver, digest: VersionDigest) -> None:
    if (found := digest.hexdigest()) != hand_over.digest:
        raise WireError(
            f"{_name(hand_over)}: the tensors in {hand_over.path} hash to {found}, the trainer said "
            f"{hand_over.digest}; hand it over again"
        )


def _name(hand_over: HandOver) -> str:
    return f"{hand_over.policy!r} version {hand_over.version}"


@contextlib.contextmanager
def _opened(incoming: Path, hand_over: HandOver) -> Generator[int]:
    """The handed-over file, which must lie inside `incoming` and hold exactly what the table says."""
    check_tensors(hand_over.tensors)
    for info in hand_over.files:
        check_file_name(info.name)
    root = incoming.resolve()
    path = (root / hand_over.path).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        raise WireError(f"{_name(hand_over)}: {hand_over.path!r} is no file inside the incoming folder")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        expected = span_bytes(hand_over.tensors) + sum(f.chunk.num_bytes for f in hand_over.files)
        if not stat.S_ISREG(status.st_mode) or status.st_size != expected:
            raise WireError(
                f"{_name(hand_over)}: {hand_over.path!r} has {status.st_size} bytes, its table "
                f"needs {expected}"
            )
        yield fd
    finally:
        os.close(fd)
