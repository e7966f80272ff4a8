"""Hands a trainer's versions to its publisher: the bytes as files, everything else over HTTP.

    publish(tensors) -> a delta, by comparison with a copy of the previous version
                     -> or in full: the first version, one that is due, one whose delta would not be smaller

The trainer and its publisher run on the same machine (`ProcessSpec.near`), so the bytes cross no network. A
version is written under a temporary name and renamed, so the publisher never reads an incomplete one. It is
deleted once the publisher has answered; by then, chunks that came as files have a name in its store. `ranges`
compares, copies, hashes and writes the bytes, shared among several ranks if there are any; this module joins
their results.
"""

import asyncio
import contextlib
import os
import shutil
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from astraflow.errors import DataError, RefusedError
from astraflow.models.adapters import is_adapter
from astraflow.service.client import ServiceClient
from astraflow.types import Chunk, DeltaFile, FileInfo, Forget, HandOver, Manifest, TensorInfo
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.delta.encoder import HEADER_BYTES, encode_header, encode_trailer
from astraflow.weights.manifest import (
    FILES,
    SEGMENT_BYTES,
    check_file_name,
    check_policy_name,
    digest_of_hashes,
    hash_bytes,
    span_bytes,
    table_of,
)
from astraflow.weights.ranges import RangeJob, RangeWriter, VersionWriter, WrittenRange, part_path
from astraflow.weights.snapshot import with_dtype

__all__ = ["PublisherClient"]

_SLOWEST_BYTES_PER_S = 20e6
"""Slowest expected disk. On a slower one, a publisher that is still writing would be mistaken for one that
hangs."""


@dataclass(frozen=True, slots=True)
class _Base:
    """The version that the publisher received last; `ranges` has a copy of its bytes."""

    version: int
    digest: str
    tensors: tuple[TensorInfo, ...]


class PublisherClient:
    """Implements `protocols.VersionPublisher`. A policy is published by one client at a time, which does not
    own `client`.

    With `delta`, it hands over what changed since the newest version, if the publisher can use that
    (`weights.delta`). `ranges` writes the bytes of versions; by default, this process alone does.
    `chunk_bytes`: the size of the publisher's chunks, which it then needn't cut from one file.

    Example: `manifest = await PublisherClient(client, run / "weights/incoming").publish("actor", 0, tensors,
    {"config.json": model_dir / "config.json"})`.
    """

    def __init__(
        self,
        client: ServiceClient,
        incoming: Path,
        *,
        delta: bool = False,
        ranges: VersionWriter | None = None,
        chunk_bytes: int = 0,
    ) -> None:
        self._client = client
        self._chunk_bytes = 0 if chunk_bytes % SEGMENT_BYTES else chunk_bytes
        self._incoming = incoming
        self._delta = delta
        self._ranges: VersionWriter = ranges or RangeWriter(delta=delta)
        self._bases: dict[str, _Base] = {}
        self._begun: set[str] = set()
        """Policies of which this client has published a version. A client lasts for one session of the
        trainer."""

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        """Makes a version durable and downloadable. Publishing the same content again gives the same
        manifest.

        Raises: WeightsError or DataError for tensors or files that cannot be published; RefusedError if the
        version exists with other content; UnavailableError. After an error, the next version is sent in full.
        """
        hand_over = HandOver(
            policy=check_policy_name(policy),
            version=version,
            tensors=table_of((tensor.name, tensor.shape, tensor.dtype) for tensor in tensors),
            digest="",
            is_first=policy not in self._begun,
        )
        # Threads now change the copy of the base. If this task is cancelled, that copy must not be used
        # again.
        base = self._bases.pop(policy, None)
        manifest: Manifest | None = None
        if base is not None and not (base.tensors == hand_over.tensors and base.version < version):
            base = None
        # Files travel with a full version only.
        is_copied = False
        if base is not None and not files:
            hand_over = await asyncio.to_thread(self._write_delta, hand_over, base, tensors)
            is_copied = True
            manifest = await self._offer(hand_over) if hand_over.delta is not None else None
        if manifest is None:
            hand_over = await asyncio.to_thread(
                self._write_full, hand_over, tensors, files, is_copied=is_copied
            )
            manifest = await self._hand_over(hand_over)
        self._ranges.end()
        if self._delta:
            self._bases[policy] = _Base(version, hand_over.digest, hand_over.tensors)
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
        num_bytes = sum(file.stat().st_size for path in paths for file in (path, *path.rglob("*")))
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
                _delete(path)

    def _write_delta(self, hand_over: HandOver, base: _Base, tensors: Sequence[HostTensor]) -> HandOver:
        """Writes a file with the difference from the base. Returns the hand-over with its digest, and without
        a delta if that would be as large as the version."""
        table = hand_over.tensors
        with self._fresh(hand_over) as (path, aside):
            job = RangeJob(hand_over.policy, hand_over.version, str(aside))
            parts = self._ranges.write_delta(job, tensors, base.version)
            digest = _digest(parts)
            trailer = encode_trailer(table, sum(part.num_blocks for part in parts))
            num_bytes = HEADER_BYTES + sum(part.num_bytes for part in parts) + len(trailer)
            is_smaller = num_bytes < span_bytes(table)
            if is_smaller:
                header = encode_header(table, base_digest=base.digest, digest=digest)
                _join(str(aside), parts, header=header, trailer=trailer)
            for rank in range(1, len(parts)):
                Path(part_path(str(aside), rank)).unlink()
        if not is_smaller:
            path.unlink()
            return msgspec.structs.replace(hand_over, digest=digest)
        delta = DeltaFile(path=f"{hand_over.policy}/{path.name}", base=base.version)
        return msgspec.structs.replace(hand_over, digest=digest, delta=delta)

    def _write_full(
        self,
        hand_over: HandOver,
        tensors: Sequence[HostTensor],
        files: Mapping[str, Path],
        *,
        is_copied: bool,
    ) -> HandOver:
        """Writes the bytes of the version and of the model files to a file, or to a folder for chunks.
        Returns the hand-over."""
        contents = {check_file_name(name): _read(path) for name, path in files.items()}
        if "config.json" in contents:
            dtypes = {tensor.dtype for tensor in hand_over.tensors if not is_adapter(tensor.name)}
            contents["config.json"] = with_dtype(contents["config.json"], dtypes)
        with self._fresh(hand_over) as (path, aside):
            aside.mkdir() if self._chunk_bytes else aside.touch()
            job = RangeJob(hand_over.policy, hand_over.version, str(aside), self._chunk_bytes)
            parts = self._ranges.write_full(job, tensors, is_copied=is_copied)
            with (aside / FILES if self._chunk_bytes else aside).open("ab") as file:
                file.writelines(contents.values())
        return msgspec.structs.replace(
            hand_over,
            path=f"{hand_over.policy}/{path.name}",
            digest=_digest(parts),
            files=tuple(
                FileInfo(name=name, chunk=Chunk(hash=hash_bytes(content), num_bytes=len(content)))
                for name, content in contents.items()
            ),
        )

    @contextlib.contextmanager
    def _fresh(self, hand_over: HandOver) -> Generator[tuple[Path, Path]]:
        """The final and the temporary path of what the context writes into the policy's folder.

        It is renamed when the context ends without error. What a killed trainer left there is deleted.
        """
        folder = self._incoming / hand_over.policy
        folder.mkdir(parents=True, exist_ok=True)
        delta_file = _delta_path(hand_over).rpartition("/")[2]
        for left_over in folder.iterdir():
            if left_over.name != delta_file:
                _delete(left_over)
        path = folder / f"{hand_over.version}.{uuid.uuid4().hex}"
        aside = path.with_suffix(".tmp")
        try:
            yield path, aside
        except BaseException:
            _delete(aside)
            raise
        os.replace(aside, path)


def _digest(parts: Sequence[WrittenRange]) -> str:
    return digest_of_hashes(b"".join(bytes.fromhex(part.hashes) for part in parts))


def _join(path: str, parts: Sequence[WrittenRange], *, header: bytes, trailer: bytes) -> None:
    """Copies the blocks of the other ranks after those of rank 0, and adds the header and the trailer."""
    with Path(path).open("r+b") as whole:
        whole.write(header)
        whole.seek(HEADER_BYTES + parts[0].num_bytes)
        for rank in range(1, len(parts)):
            with Path(part_path(path, rank)).open("rb") as file:
                shutil.copyfileobj(file, whole)
        whole.write(trailer)


def _delete(path: Path) -> None:
    """Deletes a file, or a folder with its files, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _delta_path(hand_over: HandOver) -> str:
    return hand_over.delta.path if hand_over.delta is not None else ""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise DataError(f"model file {path} cannot be read: {err.strerror}") from err
