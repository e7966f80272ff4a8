"""Publishes and fetches the bases of adapters: each one once, as a version of its own.

    trainer    first version of a session: base-DIGEST 0, unless the publisher has it; then the factors, with
               the model files and the base's manifest (`BASE_FILE`). Every later version: only the factors.
    receiver   factors -> BASE_FILE -> the base, if no adapter here has needed it yet -> a whole snapshot

A base is identified by its bytes and its table, never by a folder or a policy, so policies that share one
need it once. It comes from the same sources as the adapter. Its chunks have hashes like all others.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from astraflow import wire
from astraflow.errors import RefusedError, WeightsError
from astraflow.models.adapters import BASE_FILE, are_adapters
from astraflow.protocols import VersionPublisher
from astraflow.recipe.run_folder import write_atomic
from astraflow.rollout.policy_host import WeightFetcher
from astraflow.service.client import ServiceClient
from astraflow.types import HandOver, Manifest
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.arrival import Arrival
from astraflow.weights.manifest import TensorBytes, base_name, digest_of, lay_out, read_base, span_bytes
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.snapshot import read_model

__all__ = ["AdapterPublisher", "BaseFetcher"]

_SLOWEST_BYTES_PER_S = 20e6
"""Slowest expected upload to a store."""


class AdapterPublisher:
    """Implements `VersionPublisher` for a policy that may train an adapter: publishes its base first.

    `inner` publishes the versions, and `client` reaches the same publisher. The base has the weights of
    `model_dir`, bit for bit. Versions that don't consist of adapters pass through.
    """

    def __init__(
        self,
        inner: VersionPublisher,
        client: ServiceClient,
        incoming: Path,
        *,
        model_dir: Path,
        chunk_bytes: int,
    ) -> None:
        self._inner = inner
        self._client = client
        self._incoming = incoming
        self._model_dir = model_dir
        self._chunk_bytes = chunk_bytes

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        """Publishes a version. Raises: as `PublisherClient.publish`; DataError if the base can't be read."""
        if files and are_adapters(tensor.name for tensor in tensors):
            files = {**files, BASE_FILE: await self._publish_base()}
        return await self._inner.publish(policy, version, tensors, files)

    async def forget(self, policy: str, needed: Sequence[int]) -> None:
        """Lets the publisher delete old versions. It keeps the base."""
        await self._inner.forget(policy, needed)

    async def _publish_base(self) -> Path:
        """Publishes the base unless the publisher has it. Returns the file with its manifest."""
        tensors = await asyncio.to_thread(read_model, self._model_dir)
        table = lay_out(tensors)
        digest = await asyncio.to_thread(digest_of, TensorBytes(table, tensors))
        name = base_name(digest, table)
        try:
            await self._client.call("GET", f"/v1/manifests/{name}/0", Manifest)
        except RefusedError as err:
            if err.code != "unknown_version":
                raise
            publisher = PublisherClient(self._client, self._incoming, chunk_bytes=self._chunk_bytes)
            manifest = await publisher.publish(name, 0, tensors, {})
        else:
            # Without any bytes, this has the publisher copy the version to its store, in case that failed.
            known = HandOver(policy=name, version=0, tensors=table, digest=digest)
            timeout_s = 30.0 + span_bytes(table) / _SLOWEST_BYTES_PER_S
            manifest = await self._client.call(
                "POST", "/v1/publish", Manifest, body=known, timeout_s=timeout_s
            )
        path = self._incoming / BASE_FILE
        write_atomic(path, wire.encode(msgspec.structs.replace(manifest, sources=()), wire.JSON))
        return path


class BaseFetcher:
    """Implements `WeightFetcher`: adds the base to each adapter that `inner` fetches.

    A base is fetched for the first adapter that needs it, and stays in memory until no policy needs it any
    more. All snapshots share its memory.
    """

    def __init__(self, inner: WeightFetcher) -> None:
        self._inner = inner
        self._bases: dict[str, WeightSnapshot] = {}
        self._base_of: dict[str, str] = {}
        """Policy -> the base of its newest adapter."""
        self._turns: dict[str, asyncio.Lock] = {}

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        """Returns a version with all weights. Raises: WeightsError, UnavailableError."""
        snapshot = await self._inner.fetch(manifest)
        if not are_adapters(tensor.name for tensor in manifest.tensors):
            return snapshot
        path = snapshot.model_dir / BASE_FILE
        if not path.is_file():
            raise WeightsError(
                f"policy {manifest.policy!r} version {manifest.version} consists of adapters, but has no "
                f"{BASE_FILE}, which names their base; publish it with every full version"
            )
        base = read_base(manifest, path.read_bytes())
        self._base_of[manifest.policy] = base.policy
        async with self._turns.setdefault(base.policy, asyncio.Lock()):
            if base.policy not in self._bases:
                named = msgspec.structs.replace(base, sources=manifest.sources)
                self._bases[base.policy] = await self._inner.fetch(named)
            whole = self._bases[base.policy]
        for unneeded in self._bases.keys() - self._base_of.values():
            del self._bases[unneeded]
        return replace(snapshot, tensors=(*whole.tensors, *snapshot.tensors), base=base.policy)

    def arrival(self, policy: str) -> Arrival:
        """Progress of the transfer of a policy's version, and of its base."""
        own = self._inner.arrival(policy)
        base = self._inner.arrival(self._base_of[policy]) if policy in self._base_of else Arrival()
        return replace(
            own,
            num_bytes=own.num_bytes + base.num_bytes,
            arrived_bytes=own.arrived_bytes + base.arrived_bytes,
        )
