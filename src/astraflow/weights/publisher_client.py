"""How a trainer hands versions to its publisher: the bytes as files, everything else over HTTP.

    publish(tensors) -> compared with a copy of the version before -> a delta
                     -> in full: the first version, one that is due, one whose delta would not be smaller

The trainer and its publisher run on one machine (`ProcessSpec.near`), so that the bytes cross no network. A
file is written under a temporary name and renamed, so that the publisher never reads half of it, and is
deleted once the publisher has answered. The copy lives in the trainer's memory and is as large as the
version; the comparison updates it and hashes the version in the same pass.
"""

import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import DataError, RefusedError
from astraflow.host_tensors import HostTensor
from astraflow.service.client import ServiceClient
from astraflow.types import Chunk, DeltaFile, FileInfo, Forget, HandOver, Manifest, TensorInfo
from astraflow.weights.codec.encoder import HEADER_BYTES, encode_blocks, encode_header
from astraflow.weights.manifest import (
    SEGMENT_BYTES,
    TensorBytes,
    VersionBytes,
    VersionDigest,
    check_file_name,
    check_policy_name,
    cut,
    hash_bytes,
    lay_out,
    span_bytes,
)
from astraflow.weights.threads import give_up, shared_threads

__all__ = ["PublisherClient"]

_SLOWEST_BYTES_PER_S = 20e6
"""Slowest disk that is expected. On a slower one, a publisher that is still writing would be taken for one
that hangs."""
_PART_BYTES = 16 * SEGMENT_BYTES
"""Bytes that a thread writes before it takes the next part."""


@dataclass(frozen=True, slots=True)
class _Base:
    """A copy of the version that the publisher received last."""

    version: int
    digest: str
    tensors: tuple[TensorInfo, ...]
    data: NDArray[np.uint8]


class PublisherClient:
    """Implements `protocols.Publishes`. A policy is published by one client at a time, which does not own
    `client`.

    With `delta` it keeps a copy of the newest version and hands over what changed, if the publisher can use
    it (`weights.delta`).

    Example: `manifest = await PublisherClient(client, run / "weights/incoming").publish("actor", 0, tensors,
    {"config.json": model_dir / "config.json"})`.
    """

    def __init__(self, client: ServiceClient, incoming: Path, *, delta: bool = False) -> None:
        self._client = client
        self._incoming = incoming
        self._delta = delta
        self._bases: dict[str, _Base] = {}
        self._begun: set[str] = set()
        """Policies of which this client has published a version. A client lives for one session of the
        trainer."""

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        """Makes a version durable and downloadable. Publishing the same content again gives the same
        manifest.

        Raises: WeightsError or DataError for tensors or files that cannot be published; RefusedError if the
        version exists with other content; UnavailableError. After an error the next version is sent in full.
        """
        hand_over = HandOver(
            policy=check_policy_name(policy),
            version=version,
            tensors=lay_out(tensors),
            digest="",
            is_first=policy not in self._begun,
        )
        # From here on the threads change the base. If this task is cancelled, nobody may use it any more.
        base = self._bases.pop(policy, None)
        manifest: Manifest | None = None
        if base is not None and not (base.tensors == hand_over.tensors and base.version < version):
            base = None
        # Files travel with a full version only.
        if base is not None and not files:
            delta, base = await asyncio.to_thread(self._write_delta, hand_over, base, tensors)
            hand_over = msgspec.structs.replace(hand_over, delta=delta, digest=base.digest)
            manifest = await self._offer(hand_over) if delta is not None else None
        if manifest is None:
            hand_over, base = await asyncio.to_thread(self._write_full, hand_over, base, tensors, files)
            manifest = await self._hand_over(hand_over)
        if base is not None:
            self._bases[policy] = base
        self._begun.add(policy)
        return manifest

    async def forget(self, policy: str, needed: Sequence[int]) -> None:
        """Lets the publisher delete the versions that are neither needed nor among the newest."""
        await self._client.call("POST", "/v1/forget", None, body=Forget(policy=policy, needed=tuple(needed)))

    async def _offer(self, hand_over: HandOver) -> Manifest | None:
        """Hands over a delta alone; None if the publisher also needs the version in full."""
        try:
            return await self._hand_over(hand_over)
        except RefusedError as err:
            if err.code != "full_needed":
                raise
            return None

    async def _hand_over(self, hand_over: HandOver) -> Manifest:
        paths = [self._incoming / path for path in (hand_over.path, _delta_path(hand_over)) if path]
        num_bytes = sum(path.stat().st_size for path in paths)
        timeout_s = 30.0 + num_bytes / _SLOWEST_BYTES_PER_S
        is_done = True
        try:
            return await self._client.call(
                "POST", "/v1/publish", Manifest, body=hand_over, timeout_s=timeout_s
            )
        except RefusedError as err:
            is_done = err.code != "full_needed"  # the next call hands over the same delta and more
            raise
        finally:
            for path in paths if is_done else ():
                path.unlink(missing_ok=True)

    # --- files; these block ---

    def _write_delta(
        self, hand_over: HandOver, base: _Base, tensors: Sequence[HostTensor]
    ) -> tuple[DeltaFile | None, _Base]:
        """Writes a file with the difference to the base, and turns the base into the new version.

        Returns no file if it would be as large as the version.
        """
        infos = hand_over.tensors
        new = TensorBytes(hand_over.tensors, tensors)
        hashed = VersionDigest(new)
        with self._fresh_file(hand_over) as (path, fd):
            end = HEADER_BYTES
            for piece in encode_blocks(base.data, new, infos, hashed=hashed, is_advancing=True):
                # Beyond this size no delta is kept, but the comparison continues, since it updates the base.
                if end < new.nbytes:
                    _write_at(fd, end, piece)
                end += len(piece)
            digest = hashed.hexdigest()
            _write_at(fd, 0, encode_header(infos, base_digest=base.digest, digest=digest))
        updated = _Base(hand_over.version, digest, infos, base.data)
        if end >= new.nbytes:
            path.unlink()
            return None, updated
        return DeltaFile(path=f"{hand_over.policy}/{path.name}", base=base.version), updated

    def _write_full(
        self,
        hand_over: HandOver,
        base: _Base | None,
        tensors: Sequence[HostTensor],
        files: Mapping[str, Path],
    ) -> tuple[HandOver, _Base | None]:
        """Writes a file with the bytes of the version and of the model files. Returns the hand-over, and the
        base of the next delta."""
        infos = hand_over.tensors
        contents = {check_file_name(name): _read(path) for name, path in files.items()}
        num_bytes = span_bytes(infos)
        copy: NDArray[np.uint8] | None = None
        if base is not None and base.version == hand_over.version:  # `_write_delta` has updated it already
            source: VersionBytes = base.data
        else:
            source = TensorBytes(infos, tensors)
            if self._delta:
                copy = base.data if base is not None else np.zeros(num_bytes, np.uint8)
        with self._fresh_file(hand_over) as (path, fd):
            digest = _write_version(source, lambda start, data: _write_at(fd, start, data), copy)
            end = num_bytes
            for content in contents.values():
                _write_at(fd, end, content)
                end += len(content)
        full = msgspec.structs.replace(
            hand_over,
            path=f"{hand_over.policy}/{path.name}",
            digest=digest,
            files=tuple(
                FileInfo(name=name, chunk=Chunk(hash=hash_bytes(content), num_bytes=len(content)))
                for name, content in contents.items()
            ),
        )
        if copy is not None:
            base = _Base(hand_over.version, digest, infos, copy)
        return full, base

    @contextlib.contextmanager
    def _fresh_file(self, hand_over: HandOver) -> Generator[tuple[Path, int]]:
        """A new file in the policy's folder, which gets its final name when the context ends without error.

        Files that a killed trainer left in the folder are deleted.
        """
        folder = self._incoming / hand_over.policy
        folder.mkdir(parents=True, exist_ok=True)
        kept = _delta_path(hand_over).rpartition("/")[2]
        for left_over in folder.iterdir():
            if left_over.name != kept:
                left_over.unlink(missing_ok=True)
        path = folder / f"{hand_over.version}.{uuid.uuid4().hex}"
        aside = path.with_suffix(".tmp")
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            yield path, fd
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        os.replace(aside, path)


def _write_version(
    source: VersionBytes, write: Callable[[int, memoryview], None], copy: NDArray[np.uint8] | None
) -> str:
    """Writes the bytes of a version with a few threads, also into `copy` if there is one.

    Returns the digest.
    """
    hashed = VersionDigest(source)

    def write_part(start: int, end: int) -> None:
        for low, high in cut(end - start, SEGMENT_BYTES):
            segment = source[start + low : start + high]
            write(start + low, segment.data)
            if copy is not None:
                copy[start + low : start + high] = segment
            hashed.take(start + low, start + high)

    writing = [shared_threads().submit(write_part, *span) for span in cut(source.nbytes, _PART_BYTES)]
    try:
        for future in writing:
            future.result()
    finally:
        give_up(writing)
    return hashed.hexdigest()


def _write_at(fd: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view.nbytes:
        num_bytes = os.pwrite(fd, view, offset)
        view = view[num_bytes:]
        offset = offset + num_bytes


def _delta_path(hand_over: HandOver) -> str:
    return hand_over.delta.path if hand_over.delta is not None else ""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise DataError(f"model file {path} cannot be read: {err.strerror}") from err
