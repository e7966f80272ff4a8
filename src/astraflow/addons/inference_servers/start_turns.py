"""Lets servers that share a GPU start one after the other.

While a server loads, it measures the free memory of its GPUs, and counts what another server allocates
meanwhile as its own. A start therefore holds a lock per GPU until its server serves. Locks are files of the
user on this machine, so the servers of several services, and of several runs, take turns. The system releases
the locks of a process that dies.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from astraflow.processes.visible_gpus import VISIBLE

__all__ = ["start_turn", "user_folder"]

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_ALL = "all"


@asynccontextmanager
async def start_turn(name: str, env: Mapping[str, str]) -> AsyncGenerator[None]:
    """Holds the GPUs that a server with this environment sees. Waits while another server starts there.

    A server that may use any GPU excludes all others. One without GPUs waits for nobody.
    """
    modes = _lock_modes(env)
    is_told = False
    while (files := _try_locks(modes)) is None:
        if not is_told:
            _log.info("%s waits for another server to start on its GPUs (%s)", name, ", ".join(modes))
            is_told = True
        await asyncio.sleep(_LOOK_EVERY_S)
    try:
        yield
    finally:
        for file in files:
            os.close(file)


def user_folder(name: str) -> Path:
    """A folder that the processes of this user share on this machine. Raises: OSError if it is another's."""
    folder = Path(tempfile.gettempdir()) / f"astraflow-{name}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _lock_modes(env: Mapping[str, str]) -> dict[str, int]:
    """Which locks a start needs, and whether it shares them."""
    visible = env.get(VISIBLE)
    if visible is None:
        return {_ALL: fcntl.LOCK_EX} if any(path.exists() for path in _DRIVER_FILES) else {}
    gpus = sorted({gpu.strip() for gpu in visible.split(",") if gpu.strip()})
    return {_ALL: fcntl.LOCK_SH, **dict.fromkeys(gpus, fcntl.LOCK_EX)} if gpus else {}


def _try_locks(modes: Mapping[str, int]) -> list[int] | None:
    """Takes all locks, or none of them. Returns the open files; None if another start holds one."""
    with contextlib.ExitStack() as on_failure:
        files: list[int] = []
        for gpu, mode in modes.items():
            path = user_folder("gpus") / f"{re.sub(r'[^A-Za-z0-9-]', '_', gpu)}.lock"
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            on_failure.callback(os.close, file)
            try:
                fcntl.flock(file, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            files.append(file)
        on_failure.pop_all()
        return files
