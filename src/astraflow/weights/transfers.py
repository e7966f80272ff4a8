"""A version's way from the chunks that arrived to a verified host copy. Blocks; opens nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.host_tensors import WeightChanges
from astraflow.types import FileInfo, Manifest
from astraflow.weights.codec.delta import Delta, apply_delta, parse_delta
from astraflow.weights.codec.layout import ENCODING
from astraflow.weights.downloads import Part
from astraflow.weights.host_copy import HostCopy
from astraflow.weights.manifest import ITEM_BYTES, digest_of

__all__ = ["Held", "Transfer", "build", "check_digest", "check_encoding", "content_of", "name_of"]

_FEW = 16
"""One element in so many changed at most: beyond, writing all of a tensor is as fast as looking up where."""


@dataclass(slots=True)
class Held:
    """The newest version of a policy that is here whole."""

    manifest: Manifest
    copy: HostCopy


@dataclass(slots=True)
class Transfer:
    """What has arrived of the versions of a path. `copy` is for a full version at its beginning."""

    path: tuple[Manifest, ...]
    target: Manifest
    copy: HostCopy | None
    deltas: list[bytearray]
    parts: list[Part]
    files: list[tuple[FileInfo, Part]] = field(default_factory=list[tuple[FileInfo, Part]])

    @property
    def all_parts(self) -> list[Part]:
        return [*self.parts, *(part for _, part in self.files)]


def build(transfer: Transfer, held: Held | None) -> tuple[HostCopy, WeightChanges | None]:
    """The target version in a host copy, and where it differs from the held one, whose copy, which nobody may
    look at, is patched. Blocks.

    Raises: WeightsError; a copy that was patched is then lost.
    """
    deltas = [m for m in transfer.path if m.kind == "delta"]
    if transfer.copy is not None:
        base, copy = transfer.path[0], transfer.copy
        if not deltas:
            check_digest(base, copy)
    else:
        assert held is not None
        base, copy = held.manifest, held.copy
    applied: list[Delta] = []
    for manifest, data in zip(deltas, transfer.deltas, strict=True):
        try:
            if manifest.tensors != base.tensors:
                raise WeightsError("its tensor table differs from its base's")
            delta = parse_delta(data, manifest.tensors)
            if (delta.base_digest, delta.digest) != (base.digest, manifest.digest):
                raise WeightsError(
                    f"it leads from {delta.base_digest} to {delta.digest}, expected {base.digest} and "
                    f"{manifest.digest}"
                )
            apply_delta(delta, copy.data, is_verified=manifest is deltas[-1])
        except WeightsError as err:
            raise WeightsError(f"{name_of(manifest)} as a delta on version {base.version}: {err}") from err
        applied.append(delta)
        base = manifest
    return copy, _changes(held.manifest, applied) if held is not None and transfer.copy is None else None


def _changes(base: Manifest, deltas: Sequence[Delta]) -> WeightChanges | None:
    """What a chain of deltas touches; None if that is much."""
    num_elements = sum(t.num_bytes // ITEM_BYTES[t.dtype] for t in base.tensors)
    if sum(delta.num_changed for delta in deltas) * _FEW > num_elements:
        return None
    return WeightChanges(base.version, partial(_positions, deltas))


def _positions(deltas: Sequence[Delta]) -> Mapping[str, NDArray[np.int64]]:
    pieces: dict[str, list[NDArray[np.int64]]] = {}
    for delta in deltas:
        for idx, positions in delta.changed():
            pieces.setdefault(delta.tensors[idx].name, []).append(positions)
    return {name: np.concatenate(some) for name, some in pieces.items()}


def check_encoding(manifest: Manifest) -> None:
    expected = "raw" if manifest.kind == "full" else ENCODING
    if manifest.encoding != expected:
        raise WeightsError(
            f"{name_of(manifest)}: encoding {manifest.encoding!r} of a {manifest.kind} version is not known; "
            f"{expected!r} is expected"
        )


def check_digest(manifest: Manifest, copy: HostCopy) -> None:
    if (found := digest_of(copy.data)) != manifest.digest:
        raise WeightsError(f"{name_of(manifest)}: the tensors hash to {found}, expected {manifest.digest}")


def name_of(manifest: Manifest) -> str:
    return f"policy {manifest.policy!r} version {manifest.version}"


def content_of(manifest: Manifest) -> Manifest:
    """The manifest without what may differ between two tellings of one version."""
    return msgspec.structs.replace(manifest, sources=(), created_s=0.0)
