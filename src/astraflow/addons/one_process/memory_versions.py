"""The weights of a run that has one process: trainers hand their versions to engines in memory."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from astraflow.errors import WeightsError
from astraflow.types import Manifest
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.arrival import Arrival
from astraflow.weights.manifest import build_manifest
from astraflow.weights.snapshot import with_base

__all__ = ["MemoryVersions"]

_NUM_KEPT = 3
"""Number of newest versions to keep, because an engine may still be fetching an earlier one."""
_CHUNK_BYTES = 64 * 1024 * 1024


class MemoryVersions:
    """Passes weights from trainers to engines in memory. Implements `VersionPublisher` and `WeightFetcher`.

    `model_dirs` maps each policy to the folder with its config and tokenizer.
    """

    def __init__(self, model_dirs: Mapping[str, Path]) -> None:
        self._model_dirs = model_dirs
        self._versions: dict[str, dict[int, tuple[HostTensor, ...]]] = {name: {} for name in model_dirs}

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        """Stores the tensors without copying them, so the caller must not change them. `files` is ignored."""
        del files
        self._versions[policy][version] = tuple(tensors)
        return await asyncio.to_thread(build_manifest, policy, version, tensors, chunk_bytes=_CHUNK_BYTES)

    async def forget(self, policy: str, needed: Sequence[int]) -> None:
        """Drops all versions except the needed and the newest ones."""
        known = self._versions[policy]
        for version in sorted(known)[:-_NUM_KEPT]:
            if version not in needed:
                del known[version]

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        """Returns a version. Raises: WeightsError if it was dropped."""
        tensors = self._versions[manifest.policy].get(manifest.version)
        if tensors is None:
            raise WeightsError(
                f"policy {manifest.policy!r} version {manifest.version} is no longer in memory"
            )
        model_dir = self._model_dirs[manifest.policy]
        tensors = await asyncio.to_thread(with_base, tensors, model_dir)
        return WeightSnapshot(manifest.policy, manifest.version, tensors, model_dir)

    def arrival(self, policy: str) -> Arrival:
        """Returns an empty arrival, because versions in memory have no transfer."""
        del policy
        return Arrival()
