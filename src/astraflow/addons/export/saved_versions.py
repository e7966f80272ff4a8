"""Reads versions from a publisher's folder without the publisher, while it runs or long afterwards.

Unlike `ChunkStore`, this module never writes and takes no lock. A running publisher may therefore delete an
old version while it is being read; the error then says so. Every chunk and the whole version are verified.
All calls block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow import wire
from astraflow.errors import DataError, WeightsError, WireError
from astraflow.models.adapters import BASE_FILE, are_adapters
from astraflow.types import Chunk, Manifest
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.manifest import (
    check_digest,
    check_file_name,
    check_manifest,
    hash_bytes,
    plan_path,
    read_base,
    tensors_of,
)

__all__ = ["SavedVersion", "SavedVersions"]


@dataclass(frozen=True, slots=True)
class SavedVersion:
    """A verified version in host memory."""

    manifest: Manifest
    tensors: tuple[HostTensor, ...]
    """If the version consists of adapters, they follow the tensors of their base."""
    files: dict[str, bytes]
    """The small files of the model folder, by name."""

    def snapshot(self, model_dir: Path) -> WeightSnapshot:
        """The version as engines load it. Its files are written to `model_dir`, which is created if
        missing."""
        model_dir.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (model_dir / name).write_bytes(content)
        return WeightSnapshot(self.manifest.policy, self.manifest.version, self.tensors, model_dir)


class SavedVersions:
    """The versions of one policy in a publisher's folder.

    Example: `SavedVersions(run / "weights" / "actor", "actor").read(-1).manifest.version`.
    """

    def __init__(self, folder: Path, policy: str) -> None:
        self._policy = policy
        self._chunks = folder / "chunks"
        self._manifests = folder / "manifests" / policy

    def versions(self) -> tuple[int, ...]:
        """The versions that are stored, oldest first."""
        if not self._manifests.is_dir():
            return ()
        return tuple(sorted(int(p.stem) for p in self._manifests.glob("*.json") if p.stem.isdecimal()))

    def read(self, version: int = -1) -> SavedVersion:
        """A verified version; -1 is the newest.

        Raises: DataError if it is not stored, naming those that are; WeightsError if its bytes are damaged.
        """
        known = self.versions()
        if not known:
            raise DataError(f"policy {self._policy!r}: no version is stored in {self._manifests}")
        if version < 0:
            version = known[-1]
        if version not in known:
            raise DataError(
                f"policy {self._policy!r}: version {version} is not kept "
                f"(there are: {', '.join(map(str, known))}); `weights.keep` in the recipe sets how many are"
            )
        manifests = [self._manifest(number) for number in known if number <= version]
        manifest = manifests[-1]
        buffer = self._buffer(plan_path(manifests, held=()))
        check_digest(manifest, buffer)
        files = {check_file_name(f.name): self._read(manifest, f.chunk) for f in manifest.files}
        tensors = tensors_of(manifest, buffer)
        if are_adapters(tensor.name for tensor in tensors):
            base = read_base(manifest, files.pop(BASE_FILE, b""))
            whole = self._buffer([base])
            check_digest(base, whole)
            tensors = (*tensors_of(base, whole), *tensors)
        return SavedVersion(manifest, tensors, files)

    def _manifest(self, version: int) -> Manifest:
        path = self._manifests / f"{version}.json"
        try:
            manifest = wire.decode(path.read_bytes(), Manifest, wire.JSON)
        except FileNotFoundError as err:
            raise DataError(
                f"{path} was just deleted: the run continues and keeps newer versions; ask for one of them"
            ) from err
        except WireError as err:
            raise WeightsError(f"{path} is damaged: {err}") from err
        check_manifest(manifest)
        return manifest

    def _buffer(self, path: Sequence[Manifest]) -> NDArray[np.uint8]:
        """The bytes of a full version with the deltas after it applied."""
        buffer = np.frombuffer(bytearray(self._join(path[0])), dtype=np.uint8)
        for delta in path[1:]:
            from astraflow.weights.delta.delta import apply_delta, parse_delta  # heavy: compiles its kernels

            apply_delta(parse_delta(self._join(delta), delta.tensors), buffer)
        return buffer

    def _join(self, manifest: Manifest) -> bytes:
        return b"".join(self._read(manifest, chunk) for chunk in manifest.chunks)

    def _read(self, manifest: Manifest, chunk: Chunk) -> bytes:
        where = f"policy {self._policy!r} version {manifest.version}: chunk {chunk.hash}"
        try:
            data = (self._chunks / chunk.hash).read_bytes()
        except OSError as err:
            raise DataError(f"{where} cannot be read: {err.strerror}; is the version still kept?") from err
        if (digest := hash_bytes(data)) != chunk.hash:
            raise WeightsError(f"{where}: its bytes hash to {digest}; the file is damaged")
        return data
