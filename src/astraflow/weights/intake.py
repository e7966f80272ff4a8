"""Takes over a version from a trainer: files in `incoming/` become chunks and a manifest.

Several threads map, cut, hash and store a full version, whose digest must be the one that the trainer named.
Chunks that come as files get a second name, so they are written once. A delta is parsed, which checks every
block, and must name the digests of its base and of the version. That it really leads from one to the other is
left to the receivers, which verify the result when they apply it: the publisher would need both versions in
memory. If a version is refused or a crash interrupts the work, the store keeps nothing of it.
"""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import Error, RefusedError, UnavailableError, WireError
from astraflow.types import Chunk, FileInfo, HandOver, Manifest, Shortcut
from astraflow.weights.config import WeightsConfig
from astraflow.weights.delta.delta import parse_delta
from astraflow.weights.delta.layout import ENCODING
from astraflow.weights.manifest import (
    FILES,
    SEGMENT_BYTES,
    VersionDigest,
    check_file_name,
    check_manifest,
    check_tensors,
    cut,
    delta_of,
    digest_of,
    digest_of_hashes,
    span_bytes,
)
from astraflow.weights.stores.chunk_store import ChunkStore

__all__ = ["is_same", "take_over"]

_log = logging.getLogger(__name__)
_NUM_WRITERS = 4
"""Number of chunks written and synced in parallel, since disks need several requests in flight."""


def is_same(manifest: Manifest, hand_over: HandOver) -> bool:
    """Whether the known version has the content that is handed over."""
    return (
        manifest.digest == hand_over.digest
        and manifest.tensors == hand_over.tensors
        and (not hand_over.files or manifest.files == hand_over.files)
    )


def take_over(store: ChunkStore, hand_over: HandOver, config: WeightsConfig) -> Manifest:
    """Makes a handed-over version durable, and returns its manifest without sources. Blocks.

    With `config.delta`, the version is stored as a delta if one was handed over that fits and is smaller than
    the version. From time to time, it is stored in full as well (see `_is_full_due`).

    Raises: WireError or WeightsError if files, table and digest disagree, or a path lies outside `incoming`;
    RefusedError with code `full_needed` if a delta alone is not enough; UnavailableError if the disk fails.
    The store is then unchanged.
    """
    counted: list[Chunk] = []
    try:
        check_tensors(hand_over.tensors)
        for info in hand_over.files:
            check_file_name(info.name)
        manifest = _store_version(store, hand_over, config, counted)
        check_manifest(manifest)
        store.add(manifest)
    except Error:
        store.release(counted)
        raise
    except OSError as err:
        store.release(counted)
        raise UnavailableError(f"publisher cannot store {_name(hand_over)}: {err}") from err
    _log.info(
        "%s: %s of %d bytes in %d chunks",
        _name(hand_over),
        manifest.kind,
        manifest.num_bytes,
        len(manifest.chunks),
    )
    return manifest


def _store_version(
    store: ChunkStore, hand_over: HandOver, config: WeightsConfig, counted: list[Chunk]
) -> Manifest:
    """Stores the chunks and makes the manifest.

    `counted` collects the chunks that the store counts for this version, so that the caller can release them
    after a failure.
    """
    # The delta comes first: whether the full version is needed depends on the chain that it would extend.
    shortcut = _store_delta(store, hand_over, config, counted)
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
    if delta is not None and not _is_full_due(store, config, delta):
        manifest = delta
        files = _reuse_files(store, hand_over.policy, counted)
    elif not hand_over.path and hand_over.delta is not None:
        raise RefusedError(
            f"{_name(hand_over)} is needed in full; hand over the delta and the file of all tensors",
            code="full_needed",
        )
    else:
        full = _full_path(store.incoming, hand_over, config.chunk_bytes)
        files = _store_files(store, hand_over, full, counted)
        chunks = _store_chunks(store, hand_over, full, config.chunk_bytes, counted)
        manifest = msgspec.structs.replace(manifest, chunks=chunks)
    num_bytes = sum(c.num_bytes for c in (*manifest.chunks, *(f.chunk for f in files)))
    return msgspec.structs.replace(manifest, files=files, num_bytes=num_bytes)


def _store_files(
    store: ChunkStore, hand_over: HandOver, full: Path, counted: list[Chunk]
) -> tuple[FileInfo, ...]:
    """Stores the model files, whose bytes follow those of the tensors if all are in one file. If there are
    none, those of the policy's newest version are reused."""
    is_folder = full.is_dir()
    end = 0 if is_folder else span_bytes(hand_over.tensors)
    for info in hand_over.files:
        data = _map(full / FILES if is_folder else full, end, info.chunk.num_bytes)
        counted.append(store.put(data.data))
        end += info.chunk.num_bytes
        if counted[-1] != info.chunk:
            raise WireError(f"{_name(hand_over)}: file {info.name!r} does not hash to {info.chunk.hash}")
    return hand_over.files or _reuse_files(store, hand_over.policy, counted)


def _reuse_files(store: ChunkStore, policy: str, counted: list[Chunk]) -> tuple[FileInfo, ...]:
    files = store.reuse_files(policy)
    counted.extend(f.chunk for f in files)
    return files


def _store_delta(
    store: ChunkStore, hand_over: HandOver, config: WeightsConfig, counted: list[Chunk]
) -> Shortcut | None:
    """Stores the delta that was handed over; None unless its base is stored here and it is smaller than the
    version."""
    given = hand_over.delta
    if given is None or not config.delta or hand_over.is_first or hand_over.files:
        return None
    base = store.manifest(hand_over.policy, given.base)
    if base is None or base.tensors != hand_over.tensors or base.version >= hand_over.version:
        return None
    path = _path_inside(store.incoming, hand_over, given.path)
    data = _map(path, 0, path.stat().st_size)
    if data.nbytes >= span_bytes(hand_over.tensors):
        return None
    delta = parse_delta(data.data, hand_over.tensors)
    if (delta.base_digest, delta.digest) != (base.digest, hand_over.digest):
        raise WireError(
            f"{_name(hand_over)}: the delta in {given.path} leads from {delta.base_digest} to "
            f"{delta.digest}, expected {base.digest} and {hand_over.digest}; hand it over again"
        )
    chunks: list[Chunk] = []
    for start, end in cut(data.nbytes, config.chunk_bytes):
        chunks.append(store.put(data[start:end].data))
        counted.append(chunks[-1])
    return Shortcut(base=base.version, encoding=ENCODING, chunks=tuple(chunks))


def _is_full_due(store: ChunkStore, config: WeightsConfig, delta: Manifest) -> bool:
    """Whether the version must be stored in full in addition to the delta.

    This is the case if a receiver that holds nothing would otherwise need a chain that is longer than
    allowed, does not begin with a full version, or has more bytes than the version itself.
    """
    length = 1
    num_bytes = sum(c.num_bytes for c in delta.chunks)
    base = store.manifest(delta.policy, delta.base)
    while base is not None and base.kind == "delta":
        length += 1
        num_bytes += sum(c.num_bytes for c in base.chunks)
        base = store.manifest(base.policy, base.base)
    is_chain_broken = base is None
    return is_chain_broken or length >= config.full_every or num_bytes > span_bytes(delta.tensors)


def _store_chunks(
    store: ChunkStore, hand_over: HandOver, full: Path, chunk_bytes: int, counted: list[Chunk]
) -> tuple[Chunk, ...]:
    """Cuts, hashes and stores the bytes of the tensors, a few chunks at a time."""
    num_bytes = span_bytes(hand_over.tensors)
    is_folder = full.is_dir()

    def store_one(start: int, end: int) -> tuple[Chunk, bytes]:
        file = full / str(start // chunk_bytes) if is_folder else None
        data = _map(file or full, 0 if is_folder else start, end - start)
        return store.put(data.data, file), VersionDigest(data).hashes(0, -(-data.nbytes // SEGMENT_BYTES))

    with ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="publisher") as pool:
        writing = [pool.submit(store_one, *span) for span in cut(num_bytes, chunk_bytes)]
        try:
            stored = [future.result() for future in writing]
        finally:
            # Chunks that were written before a failure are counted as well, and must be released.
            for future in writing:
                future.cancel()
            wait(writing)
            counted.extend(f.result()[0] for f in writing if not f.cancelled() and not f.exception())
    if chunk_bytes % SEGMENT_BYTES:  # segments straddle chunks
        actual = digest_of(_map(full, 0, num_bytes))
    else:
        actual = digest_of_hashes(b"".join(hashes for _, hashes in stored))
    if actual != hand_over.digest:
        raise WireError(
            f"{_name(hand_over)}: the tensors in {hand_over.path} hash to {actual}, expected "
            f"{hand_over.digest}; hand it over again"
        )
    return tuple(chunk for chunk, _ in stored)


def _name(hand_over: HandOver) -> str:
    return f"{hand_over.policy!r} version {hand_over.version}"


def _full_path(incoming: Path, hand_over: HandOver, chunk_bytes: int) -> Path:
    """The file of a full version, or the folder of its chunks, of the sizes that its table requires."""
    is_folder = not chunk_bytes % SEGMENT_BYTES and os.path.isfile(incoming / hand_over.path / FILES)
    path = _path_inside(incoming, hand_over, f"{hand_over.path}/{FILES}" if is_folder else hand_over.path)
    num_bytes = span_bytes(hand_over.tensors)
    num_file_bytes = sum(f.chunk.num_bytes for f in hand_over.files)
    sizes = {path.name: path.stat().st_size}
    expected = {path.name: num_bytes + num_file_bytes}
    if is_folder:
        path = path.parent
        sizes = {e.name: e.stat().st_size for e in os.scandir(path) if e.is_file(follow_symlinks=False)}
        expected = {str(start // chunk_bytes): end - start for start, end in cut(num_bytes, chunk_bytes)}
        expected[FILES] = num_file_bytes
    if sizes != expected:
        wrong = min(sizes.items() ^ expected.items())[0]
        raise WireError(
            f"{_name(hand_over)}: {hand_over.path!r} has {sum(sizes.values())} bytes; its table needs "
            f"{sum(expected.values())}, and its file {wrong} {expected.get(wrong, 0)}"
        )
    return path


def _path_inside(incoming: Path, hand_over: HandOver, name: str) -> Path:
    """The path of a file that was handed over, which must lie inside `incoming`."""
    root = incoming.resolve()
    path = root
    try:
        path = (root / name).resolve()
        is_inside = path.is_relative_to(root) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # the name is too long, has a zero byte, or is a link loop
        is_inside = False
    if not is_inside:
        raise WireError(f"{_name(hand_over)}: {name[:200]!r} is not a file inside the incoming folder")
    return path


def _map(path: Path, start: int, num_bytes: int) -> NDArray[np.uint8]:
    """Bytes of a file that has them, mapped for reading."""
    return np.memmap(path, np.uint8, "r", start, (num_bytes,)) if num_bytes else np.zeros(0, np.uint8)
