"""The newest version of each policy as one plain file: what the publisher takes the next delta against.

    incoming/POLICY/N.xxx     written by the trainer, moved to bases/ when its version is published
    bases/POLICY/N            the base of the next delta
    incoming/.spare/POLICY    the base before: the trainer's next file, whose pages are there already

Files move by renaming, so that a crash leaves each in one place; memory maps move with them. A base that was
there before a restart is hashed before it is used. Losing a base costs one full version, nothing else.
"""

import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow.types import Manifest, TensorInfo
from astraflow.weights.chunk_store import ChunkStore
from astraflow.weights.manifest import digest_of, span_bytes

__all__ = ["SPARE_FOLDER", "Base", "Bases", "map_file"]

_log = logging.getLogger(__name__)

SPARE_FOLDER = ".spare"
"""In `incoming`; no policy has this name."""


@dataclass(frozen=True, slots=True)
class Base:
    """A version's bytes, mapped; `manifest` says what they are."""

    manifest: Manifest
    data: NDArray[np.uint8]


class Bases:
    """The bases of a publisher; called from one thread a policy. `folder` is the publisher's."""

    def __init__(self, folder: Path, store: ChunkStore) -> None:
        self._folder = folder / "bases"
        self._store = store
        self._bases: dict[str, Base | None] = {}
        self._maps: dict[str, dict[int, NDArray[np.uint8]]] = {}

    def base(self, policy: str, tensors: tuple[TensorInfo, ...]) -> Base | None:
        """The newest version of the policy if it is here and has this tensor table."""
        if policy not in self._bases:
            self._bases[policy] = self._restore(policy)
        base = self._bases[policy]
        return base if base is not None and base.manifest.tensors == tensors else None

    def map(self, policy: str, fd: int, num_bytes: int) -> NDArray[np.uint8]:
        """The file's first bytes; a file that comes again keeps its map, with its pages."""
        maps, inode = self._maps.setdefault(policy, {}), os.fstat(fd).st_ino
        known = maps.get(inode)
        if known is None or known.nbytes != num_bytes:
            maps[inode] = known = map_file(fd, num_bytes)
        return known

    def keep(self, manifest: Manifest, path: Path) -> None:
        """Takes the published version's file as the next base; the one before becomes the spare."""
        policy = manifest.policy
        folder = self._folder / policy
        spare = self._store.incoming / SPARE_FOLDER / policy
        self._bases[policy] = None
        try:
            for part in (folder, spare.parent):
                part.mkdir(parents=True, exist_ok=True)
            for older in folder.iterdir():
                older.replace(spare)
            kept = path.rename(folder / str(manifest.version))
            self._bases[policy] = self._open(kept, manifest)
            in_use = {p.stat().st_ino for p in (kept, spare) if p.exists()}
        except OSError as err:
            _log.warning("%s version %d is no base, the next is full: %s", policy, manifest.version, err)
            return
        maps = self._maps.get(policy, {})
        self._maps[policy] = {inode: array for inode, array in maps.items() if inode in in_use}

    def _open(self, path: Path, manifest: Manifest) -> Base:
        fd = os.open(path, os.O_RDONLY)
        try:
            return Base(manifest, self.map(manifest.policy, fd, span_bytes(manifest.tensors)))
        finally:
            os.close(fd)

    def _restore(self, policy: str) -> Base | None:
        """The base that an earlier process left, if it is whole."""
        folder = self._folder / policy
        for path in folder.iterdir() if folder.is_dir() else ():
            manifest = self._store.manifest(policy, int(path.name)) if path.name.isdecimal() else None
            if manifest is not None and path.stat().st_size >= span_bytes(manifest.tensors):
                base = self._open(path, manifest)
                if digest_of(base.data) == manifest.digest:
                    return base
            _log.warning("%s is no base any more and is removed", path)
            path.unlink()
        return None


def map_file(fd: int, num_bytes: int) -> NDArray[np.uint8]:
    """The first bytes of a file that is at least that long, to read."""
    if not num_bytes:
        return np.zeros(0, np.uint8)
    return np.frombuffer(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ), np.uint8)
