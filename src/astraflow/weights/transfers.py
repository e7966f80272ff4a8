"""Turns the fetched chunks of a version into a verified copy in host memory. Blocks; opens no files."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.types import FileInfo, Manifest
from astraflow.types.host_tensors import WeightChanges
from astraflow.weights.delta.delta import Delta, apply_delta, parse_delta
from astraflow.weights.downloads import ChunkDownload
from astraflow.weights.manifest import ITEM_BYTES, check_digest, name_of

__all__ = ["HeldVersion", "HostCopy", "Transfer", "build", "content_of"]

_FEW = 16
"""Positions of changed elements are collected if at most one in this many changed. If more changed, writing
whole tensors is as fast as looking up the positions."""


class HostCopy:
    """The bytes of a version in host memory, lent to the users of its tensors and patched in place when
    nobody uses them.

    `lend` gives an array. Every view of it, and every torch tensor on its memory, keeps the loan alive. The
    owner writes only while `is_free` is true.

    Example::

        copy = HostCopy(num_bytes)
        tensors = tensors_of(manifest, copy.lend())
        del tensors
        assert copy.is_free
    """

    def __init__(self, num_bytes: int) -> None:
        self.data: NDArray[np.uint8] = np.empty(num_bytes, dtype=np.uint8)
        """For the owner only; it is never handed out."""
        self._loan: weakref.ref[NDArray[np.uint8]] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no view of the loan is alive."""
        return self._loan is None or self._loan() is None

    def lend(self) -> NDArray[np.uint8]:
        """The bytes, for reading only."""
        assert self.is_free, "a host copy is lent once at a time"
        # The loan must stay alive as long as any view of it. If the loan were a view of `data`, numpy would
        # make `data` the base of the loan's views, and the loan could die before them. An array made from a
        # memoryview is the base of its own views.
        loan: NDArray[np.uint8] = np.asarray(self.data.data)
        self._loan = weakref.ref(loan)
        return loan

    def duplicate(self) -> "HostCopy":
        """A copy of the bytes in new memory."""
        other = HostCopy(self.data.nbytes)
        other.data[:] = self.data
        return other


@dataclass(slots=True)
class HeldVersion:
    """The newest version of a policy that has been fetched completely."""

    manifest: Manifest
    copy: HostCopy


@dataclass(slots=True)
class Transfer:
    """Progress of fetching the versions of a path."""

    path: tuple[Manifest, ...]
    """Versions to fetch, in this order: at most one full version, then deltas."""
    target: Manifest
    copy: HostCopy | None
    """Memory for the full version at the beginning of the path."""
    deltas: list[bytearray]
    parts: list[ChunkDownload]
    files: list[tuple[FileInfo, ChunkDownload]] = field(default_factory=list[tuple[FileInfo, ChunkDownload]])

    @property
    def all_parts(self) -> list[ChunkDownload]:
        """Parts of the versions and of the model files."""
        return [*self.parts, *(part for _, part in self.files)]


def build(transfer: Transfer, held: HeldVersion | None) -> tuple[HostCopy, WeightChanges | None]:
    """Returns the target version in a host copy, and where it differs from the held version. Blocks.

    If the path has no full version, the held copy is patched in place, so nobody else may be reading it.

    Raises: WeightsError if the bytes are wrong. A copy that was being patched is then unusable.
    """
    deltas = [manifest for manifest in transfer.path if manifest.kind == "delta"]
    if transfer.copy is not None:
        base = transfer.path[0]
        copy = transfer.copy
        if not deltas:
            check_digest(base, copy.data)
    else:
        assert held is not None
        base = held.manifest
        copy = held.copy
    applied: list[Delta] = []
    for manifest, data in zip(deltas, transfer.deltas, strict=True):
        try:
            applied.append(_apply(manifest, data, base, copy, is_last=manifest is deltas[-1]))
        except WeightsError as err:
            raise WeightsError(f"{name_of(manifest)} as a delta on version {base.version}: {err}") from err
        base = manifest
    if held is None or transfer.copy is not None:
        return copy, None
    return copy, _changes(held.manifest, applied)


def _apply(manifest: Manifest, data: bytearray, base: Manifest, copy: HostCopy, *, is_last: bool) -> Delta:
    """Patches the copy from `base` to `manifest`, and verifies the result only for the last of a chain: its
    digest can match only if all steps before it were right."""
    if manifest.tensors != base.tensors:
        raise WeightsError("its tensor table differs from its base's")
    delta = parse_delta(data, manifest.tensors)
    if (delta.base_digest, delta.digest) != (base.digest, manifest.digest):
        raise WeightsError(
            f"it leads from {delta.base_digest} to {delta.digest}, expected {base.digest} and "
            f"{manifest.digest}"
        )
    apply_delta(delta, copy.data, is_verified=is_last)
    return delta


def _changes(base: Manifest, deltas: Sequence[Delta]) -> WeightChanges | None:
    """The elements that a chain of deltas changes; None if they are many."""
    num_elements = sum(t.num_bytes // ITEM_BYTES[t.dtype] for t in base.tensors)
    if sum(delta.num_changed for delta in deltas) * _FEW > num_elements:
        return None
    return WeightChanges(base.version, partial(_positions, deltas))


def _positions(deltas: Sequence[Delta]) -> Mapping[str, NDArray[np.int64]]:
    """Positions of changed elements, by the name of their tensor."""
    pieces: dict[str, list[NDArray[np.int64]]] = {}
    for delta in deltas:
        for idx, positions in delta.changed():
            pieces.setdefault(delta.tensors[idx].name, []).append(positions)
    return {name: np.concatenate(some) for name, some in pieces.items()}


def content_of(manifest: Manifest) -> Manifest:
    """The manifest without the fields that may differ between two announcements of the same version."""
    return msgspec.structs.replace(manifest, sources=(), created_s=0.0)
