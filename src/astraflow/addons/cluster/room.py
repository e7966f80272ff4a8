"""What the machines of a cluster have to give, and what is said of a process that waits for a part of it."""

import asyncio
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.protocols import Needs, ProcessSpec

__all__ = ["Room", "contents_of", "is_movable", "missing_room", "naming_wait", "needs_text"]

_log = logging.getLogger(__name__)

_NAMED_AFTER_S = 20.0
"""A process that still has no machine after this time is named in the log; a busy one starts it in 10 s."""
_MAX_FILE_BYTES = 1024 * 1024
"""Largest file that travels with a process: certificates are smaller."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one machine has, or has left."""

    cpus: float
    gpus: float
    memory_bytes: float

    def holds(self, needs: Needs) -> bool:
        """Whether a process finds room in it."""
        return self.cpus >= needs.cpus and self.gpus >= needs.gpus and self.memory_bytes >= needs.memory_bytes


def missing_room(needs: Needs, rooms: Sequence[Room], *, cluster: str, remedy: str) -> str:
    """Why no machine could hold a process, even if nothing else runs, and what to do; empty if one could.

    Example: `missing_room(Needs(gpus=2), rooms, cluster="the Ray cluster", remedy="add a node")`.
    """
    if any(room.holds(needs) for room in rooms):
        return ""
    had = (
        f"{max((room.cpus for room in rooms), default=0.0):g} CPUs, "
        f"{max((room.gpus for room in rooms), default=0.0):g} GPUs and "
        f"{max((room.memory_bytes for room in rooms), default=0.0) / 1e9:.1f} GB"
    )
    return (
        f"no machine of {cluster} has {needs_text(needs)}; of its {len(rooms)} machines, none has more than "
        f"{had}. Change cluster.rollout, or {remedy}"
    )


def needs_text(needs: Needs) -> str:
    """What a process reserves, in words."""
    parts = [f"{needs.cpus:g} CPUs"]
    if needs.gpus:
        parts.append(f"{needs.gpus:g} GPUs")
    if needs.memory_bytes:
        parts.append(f"{needs.memory_bytes / 1e9:.1f} GB of memory")
    parts += [f"label {name}={value}" for name, value in needs.labels.items()]
    return ", ".join(parts)


def is_movable(spec: ProcessSpec) -> bool:
    """Whether a process can run on another machine than the launcher's: it is near nobody, listens nowhere
    and must find nothing again."""
    return not (spec.near or spec.writes or spec.address)


@contextmanager
def naming_wait(spec: ProcessSpec) -> Generator[None]:
    """While a process waits for a machine in this block, and does so for long, the log says it."""
    named = asyncio.create_task(_name_wait(spec))
    try:
        yield
    finally:
        named.cancel()


async def _name_wait(spec: ProcessSpec) -> None:
    await asyncio.sleep(_NAMED_AFTER_S)
    text = f"{spec.name} waits for a machine with room for it: {needs_text(spec.needs)}"
    _log.warning("%s", text)
    with spec.log_path.open("a", encoding="utf-8") as log:
        log.write(f"--- {text}\n")


def contents_of(spec: ProcessSpec) -> dict[Path, bytes]:
    """The files that travel with a process. Raises: ConfigError for a folder or a large file."""
    for path in spec.reads:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{spec.name} reads {path}, which is no file of at most {_MAX_FILE_BYTES:,} bytes, so it "
                "cannot be sent to another machine"
            )
    return {path: path.read_bytes() for path in spec.reads}
