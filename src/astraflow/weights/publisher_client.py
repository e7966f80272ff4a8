"""A trainer's way to its publisher: bytes through a file, everything else through HTTP.

The trainer and its publisher share a disk. A version is written under a temporary name and renamed, so that
the publisher never reads half of it; the file goes when the publisher has answered. A publisher of deltas
gives a spare file back, which is written over: its pages are there already, which is most of the cost.
"""

import asyncio
import contextlib
import mmap
import os
import uuid
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import DataError
from astraflow.protocols import HostTensor
from astraflow.service import ServiceClient
from astraflow.types import Chunk, FileInfo, Forget, HandOver, Manifest, TensorInfo
from astraflow.weights.bases import SPARE_FOLDER
from astraflow.weights.manifest import (
    SEGMENT_BYTES,
    check_file_name,
    check_policy_name,
    cut,
    hash_bytes,
    hash_segment,
    join_hashes,
    lay_out,
    span_bytes,
)
from astraflow.weights.threads import give_up, shared_threads

__all__ = ["PublisherClient"]

_SLOWEST_BYTES_PER_S = 20e6
"""A disk slower than this is taken for a publisher that hangs."""
_PART_BYTES = 16 * SEGMENT_BYTES
"""What a thread writes before it takes the next."""
_NUM_MAPS = 2
"""The publisher's base and the spare take turns."""


class _ReusedFile:
    """Writes files of which some come again: those are mapped, which is three times faster than writing.

    Only a file that has the bytes already is mapped: a full disk is then an error and not a signal.
    """

    def __init__(self) -> None:
        self._maps: dict[int, NDArray[np.uint8]] = {}

    @contextlib.contextmanager
    def opened(self, path: Path, num_mapped: int) -> Generator[Callable[[int, bytes | memoryview], None]]:
        """Gives `write(offset, bytes)`; the first `num_mapped` bytes may go through a map."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            status = os.fstat(fd)
            known = self._maps.pop(status.st_ino, None)
            mapped = known if known is not None and known.nbytes == num_mapped else None
            if mapped is None and 0 < num_mapped <= status.st_size:
                mapped = np.frombuffer(mmap.mmap(fd, num_mapped), np.uint8)
            if mapped is not None:
                self._maps[status.st_ino] = mapped
                for inode in [*self._maps][:-_NUM_MAPS]:
                    del self._maps[inode]

            def write(offset: int, data: bytes | memoryview) -> None:
                view = memoryview(data)
                if mapped is not None and offset + view.nbytes <= mapped.nbytes:
                    mapped[offset : offset + view.nbytes] = view
                    return
                while view.nbytes:
                    num_bytes = os.pwrite(fd, view, offset)
                    view, offset = view[num_bytes:], offset + num_bytes

            yield write
        finally:
            os.close(fd)


class PublisherClient:
    """Implements `protocols.Publishes`. One client publishes a policy at a time; it does not own `client`.

    Example: `manifest = await PublisherClient(client, run / "weights/incoming").publish("actor", 0, tensors,
    {"config.json": model_dir / "config.json"})`.
    """

    def __init__(self, client: ServiceClient, incoming: Path) -> None:
        self._client = client
        self._incoming = incoming
        self._file = _ReusedFile()
        self._begun: set[str] = set()
        """Policies of which this client, and so this trainer's session, has published a version."""

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        """Makes a version durable and downloadable; publishing the same again answers the same.

        Raises: WeightsError or DataError for tensors or files that cannot travel; RefusedError if the version
        is known with other content; UnavailableError.
        """
        hand_over, num_bytes = await asyncio.to_thread(self._write, policy, version, tensors, files)
        timeout_s = 30.0 + num_bytes / _SLOWEST_BYTES_PER_S
        try:
            manifest = await self._client.call(
                "POST", "/v1/publish", Manifest, body=hand_over, timeout_s=timeout_s
            )
        finally:
            (self._incoming / hand_over.path).unlink(missing_ok=True)
        self._begun.add(policy)
        return manifest

    async def forget(self, policy: str, needed: Sequence[int]) -> None:
        """Lets the publisher delete versions that are neither needed nor among the newest."""
        await self._client.call("POST", "/v1/forget", None, body=Forget(policy=policy, needed=tuple(needed)))

    def _write(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> tuple[HandOver, int]:
        infos = lay_out(tensors)
        contents = {check_file_name(name): _read(path) for name, path in files.items()}
        folder = self._incoming / check_policy_name(policy)
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.iterdir():  # of a trainer that was killed while it handed over
            left_over.unlink(missing_ok=True)
        path = folder / f"{version}.{uuid.uuid4().hex}"
        aside = path.with_suffix(".tmp")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._incoming / SPARE_FOLDER / policy, aside)
        num_bytes = span_bytes(infos)
        with self._file.opened(aside, num_bytes) as write:
            digest = _write_tensors(infos, tensors, write)
            for content in contents.values():
                write(num_bytes, content)
                num_bytes += len(content)
        os.truncate(aside, num_bytes)
        os.replace(aside, path)
        hand_over = HandOver(
            policy=policy,
            version=version,
            path=f"{policy}/{path.name}",
            tensors=infos,
            digest=digest,
            files=tuple(
                FileInfo(name=name, chunk=Chunk(hash=hash_bytes(content), num_bytes=len(content)))
                for name, content in contents.items()
            ),
            is_first=policy not in self._begun,
        )
        return hand_over, num_bytes


def _write_tensors(
    infos: Sequence[TensorInfo],
    tensors: Sequence[HostTensor],
    write: Callable[[int, bytes | memoryview], None],
) -> str:
    """Writes a version's bytes by a few threads, each segment hashed while the cache holds it. The digest."""
    starts = [info.offset for info in infos]

    def pieces(start: int, end: int) -> Iterator[bytes | memoryview]:
        """`[start, end)` of the version: parts of tensors, and zeros between them."""
        idx = max(bisect_right(starts, start) - 1, 0)
        while start < end:
            low, high = starts[idx], starts[idx] + infos[idx].num_bytes
            if start < min(high, end):
                yield tensors[idx].data[start - low : min(high, end) - low].data
                start = min(high, end)
            idx += 1
            if start < end:
                following = min(starts[idx], end)
                yield bytes(following - start)
                start = following

    def write_part(start: int, end: int) -> list[bytes]:
        hashes: list[bytes] = []
        for low, high in cut(end - start, SEGMENT_BYTES):
            segment = [*pieces(start + low, start + high)]
            at = start + low
            for piece in segment:
                write(at, piece)
                at += len(piece)
            hashes.append(hash_segment(*segment))
        return hashes

    spans = cut(span_bytes(infos), _PART_BYTES)
    writing = [shared_threads().submit(write_part, *span) for span in spans]
    try:
        return join_hashes(part for future in writing for part in future.result())
    finally:
        give_up(writing)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise DataError(f"model file {path} cannot be read: {err.strerror}") from err
