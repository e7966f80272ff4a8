"""Refuses versions that this machine cannot decode or hold, before any byte of them is fetched.

A consistent manifest can still claim 2^50 bytes. Receivers call these checks first, so that such a version is
refused by name while the old one keeps serving.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from astraflow.errors import WeightsError
from astraflow.types import Manifest
from astraflow.weights.delta.layout import ENCODING
from astraflow.weights.manifest import name_of, span_bytes

__all__ = ["check_encoding", "check_fits", "check_follows"]

_MAX_GROWTH = 8
"""Largest size ratio of two versions of a policy. Another dtype gives 4, and adapters add little."""
_SMALL_BYTES = 1 << 20
"""A version up to this size is never too large, because the check is for mistakes of scale."""


def check_encoding(manifest: Manifest) -> None:
    """Raises: WeightsError if this receiver cannot decode the version."""
    expected = "raw" if manifest.kind == "full" else ENCODING
    if manifest.encoding != expected:
        raise WeightsError(
            f"{name_of(manifest)}: unknown encoding {manifest.encoding!r} of a {manifest.kind} version; "
            f"expected {expected!r}"
        )


def check_follows(manifest: Manifest, held: Manifest) -> None:
    """Raises: WeightsError if a version is too large to belong to the same policy as the held version.

    The engine checks whether the version has the right tensors.
    """
    needed = span_bytes(manifest.tensors)
    held_bytes = span_bytes(held.tensors)
    most = max(_MAX_GROWTH * held_bytes, _SMALL_BYTES)
    if needed > most:
        raise WeightsError(
            f"{name_of(manifest)}: its tensors need {needed} bytes, and version {held.version}, which is "
            f"here, has {held_bytes}; a version of the same policy can have at most {most}"
        )


def check_fits(path: Sequence[Manifest], cache_dir: Path, memory_bytes: int, *, kept_bytes: int = 0) -> None:
    """Raises: WeightsError if the versions of `path` do not fit into memory, or the last one's model files do
    not fit onto the disk.

    The available memory is `memory_bytes`, plus `kept_bytes` that the versions may overwrite.
    """
    target = path[-1]
    files_bytes = sum(info.chunk.num_bytes for info in target.files)
    needed = files_bytes + sum(chunk.num_bytes for manifest in path for chunk in manifest.chunks)
    available = memory_bytes + kept_bytes
    if needed > available:
        raise WeightsError(
            f"{name_of(target)}: {needed} bytes must be fetched into memory, but only {available} are "
            "available on this machine"
        )
    folder = next(parent for parent in (cache_dir, *cache_dir.absolute().parents) if parent.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    if files_bytes > free_bytes:
        raise WeightsError(
            f"{name_of(target)}: its model files have {files_bytes} bytes, but {folder} has room for only "
            f"{free_bytes}"
        )
