"""The room on the machines of a cluster, and the messages about processes that wait for room."""

import asyncio
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.protocols import Needs, ProcessSpec

__all__ = ["Room", "contents_of", "is_movable", "log_long_wait", "missing_room", "needs_text"]

_log = logging.getLogger(__name__)

_LONG_WAIT_S = 20.0
"""Time after which a waiting process is mentioned in the log. Even a busy machine starts one within 10 s."""
_MAX_FILE_BYTES = 1024 * 1024
"""Largest file that is sent with a process; certificates are smaller."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one machine has in total, or has left."""

    cpus: float
    gpus: float
    memory_bytes: float

    def holds(self, needs: Needs) -> bool:
        """Checks whether there is enough room for a process."""
        return self.cpus >= needs.cpus and self.gpus >= needs.gpus and self.memory_bytes >= needs.memory_bytes


def missing_room(needs: Needs, rooms: Sequence[Room], *, cluster: str, remedy: str) -> str:
    """Explains why a process doesn't fit on any machine, even an idle one, and what to do; empty if it fits.

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
        f"no machine of {cluster} has {needs_text(needs)}; none of its {len(rooms)} machines has more than "
        f"{had}. Change cluster.rollout, or {remedy}"
    )


def needs_text(needs: Needs) -> str:
    """Describes in words what a process reserves."""
    parts = [f"{needs.cpus:g} CPUs"]
    if needs.gpus:
        parts.append(f"{needs.gpus:g} GPUs")
    if needs.memory_bytes:
        parts.append(f"{needs.memory_bytes / 1e9:.1f} GB of memory")
    parts += [f"label {name}={value}" for name, value in needs.labels.items()]
    return ", ".join(parts)


def is_movable(spec: ProcessSpec) -> bool:
    """Checks whether a process can run on another machine than the launcher's.

    Such a process doesn't have to share its machine with another process, doesn't listen, and doesn't have a
    folder that it must find again.
    """
    return not (spec.near or spec.writes or spec.address)


@contextmanager
def log_long_wait(spec: ProcessSpec) -> Generator[None]:
    """Logs that a process waits for a machine if the block takes long."""
    warning = asyncio.create_task(_log_wait(spec))
    try:
        yield
    finally:
        warning.cancel()


async def _log_wait(spec: ProcessSpec) -> None:
    await asyncio.sleep(_LONG_WAIT_S)
    text = f"{spec.name} waits for a machine with room for it: {needs_text(spec.needs)}"
    _log.warning("%s", text)
    with spec.log_path.open("a", encoding="utf-8") as log:
        log.write(f"--- {text}\n")


def contents_of(spec: ProcessSpec) -> dict[Path, bytes]:
    """Reads the files that are sent with a process. Raises: ConfigError for a folder or a large file."""
    for path in spec.reads:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{spec.name} reads {path}, which cannot be sent to another machine; expected a file of at "
                f"most {_MAX_FILE_BYTES:,} bytes"
            )
    return {path: path.read_bytes() for path in spec.reads}
