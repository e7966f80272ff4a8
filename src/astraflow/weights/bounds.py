"""What a version may ask of this machine before a byte of it is fetched: how much memory and disk.

A manifest can agree with itself and still claim 2^50 bytes. Whoever fetches asks here first, so that such a
version is refused by name and the old one goes on serving. Reads the kernel's figures, opens nothing else.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from astraflow.errors import WeightsError
from astraflow.types import Manifest
from astraflow.weights.manifest import span_bytes

__all__ = ["available_bytes", "check_fits", "check_follows"]

_MOST_GROWTH = 8
"""Another dtype makes a version four times as large at most, and adapters add little."""
_SMALL_BYTES = 1 << 20
"""Versions up to this size may grow as they like: what is held against them are mistakes of scale."""


def check_follows(manifest: Manifest, held: Manifest) -> None:
    """Raises: WeightsError if a version is too large to be one of the same policy as the version that is
    here. What its tensors must be, the engine says."""
    most = max(_MOST_GROWTH * span_bytes(held.tensors), _SMALL_BYTES)
    if (needed := span_bytes(manifest.tensors)) > most:
        raise WeightsError(
            f"{_name(manifest)}: its tensors need {needed} bytes, and version {held.version}, which is here, "
            f"has {span_bytes(held.tensors)}; a version of the same policy has {most} at most"
        )


def check_fits(path: Sequence[Manifest], cache_dir: Path, memory_bytes: int, *, kept_bytes: int = 0) -> None:
    """Raises: WeightsError if what is to be fetched is more than `memory_bytes` and what `kept_bytes` frees,
    or the model files are more than the disk has room for."""
    target = path[-1]
    files = sum(info.chunk.num_bytes for info in target.files)
    needed = files + sum(chunk.num_bytes for manifest in path for chunk in manifest.chunks)
    if needed > memory_bytes + kept_bytes:
        raise WeightsError(
            f"{_name(target)}: {needed} bytes are to be fetched into memory, and {memory_bytes + kept_bytes} "
            "are available on this machine"
        )
    folder = next(parent for parent in (cache_dir, *cache_dir.absolute().parents) if parent.is_dir())
    if files > (free := shutil.disk_usage(folder).free):
        raise WeightsError(
            f"{_name(target)}: its model files have {files} bytes, and {folder} has room for {free}"
        )


def available_bytes() -> int:
    """Memory that this process can still have: the machine's, or what its control group leaves."""
    fields = dict(line.split(":", 1) for line in _text(Path("/proc/meminfo")).splitlines())
    available = int(fields.get("MemAvailable", "0 kB").split()[0]) * 1024 or 1 << 62
    group = Path("/sys/fs/cgroup")
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        cached = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        reclaimable = int(cached.get("inactive_file", "0"))
        available = min(available, max(int(limit) - int(used) + reclaimable, 0))
    return available


def _text(path: Path) -> str:
    """A file of the kernel's; empty where it has none (another system, another version of control groups)."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _name(manifest: Manifest) -> str:
    return f"policy {manifest.policy!r} version {manifest.version}"
