"""The address of a run's viewer: a socket that listens from the start, and a process once somebody comes.

    launching process:  the door listens on loopback; at a connection it starts the viewer, and shows the
                        empty page until the viewer is ready
    viewer process:     accepts from the same socket; reads the run folder; ends after ten quiet minutes

So a viewer that nobody opens costs the run one open socket. One that ends, for whatever reason, is started
again at the next connection.
"""

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

from astraflow.addons.view.viewer_porch import Porch
from astraflow.processes.program import PRIVATE_VARIABLE, TOKEN_VARIABLE
from astraflow.service.process import LIFE_FD_VARIABLE, PARENT_FD_VARIABLE
from astraflow.service.readable import until_readable

__all__ = ["ViewerDoor"]

_HOST = "127.0.0.1"
_PORT = 7433
"""Taken if it is free, so that a link to the page lasts; otherwise any free port."""
_PAUSE_S = 2.0
"""Between the end of a viewer and the start of the next one: one that fails at once must not spin."""
_GRACE_S = 1.0
_MODULE = "astraflow.addons.view.process"
"""By name: the viewer stands above this package."""


class ViewerDoor:
    """Example: `async with ViewerDoor(run_dir, log_path) as door: print(door.url)`."""

    def __init__(self, run_dir: Path, log_path: Path) -> None:
        """Raises: OSError if loopback cannot be listened on."""
        self._run_dir = run_dir
        self._log_path = log_path
        self._listener = _listening()
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return f"http://{_HOST}:{self._listener.getsockname()[1]}"

    async def __aenter__(self) -> "ViewerDoor":
        self._task = asyncio.create_task(self._keep(), name="viewer door")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._listener.close()

    async def _keep(self) -> None:
        """Starts a viewer at each connection that finds none, until cancelled."""
        while True:
            await until_readable(self._listener.fileno())  # the connection waits for whoever accepts
            try:
                await self._run_viewer()
            except OSError as err:
                self._log(f"the viewer cannot be started: {err}")
            await asyncio.sleep(_PAUSE_S)

    async def _run_viewer(self) -> None:
        """Runs one viewer until it ends; ends it when cancelled. Raises: OSError."""
        read_fd, write_fd = os.pipe()
        ready_fd, tells_fd = os.pipe()
        # The viewer ends when the launching process does, for then the first pipe closes. The second one
        # closes when the viewer is ready, or has ended.
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            fd = self._listener.fileno()
            with self._log_path.open("ab", buffering=0) as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    _MODULE,
                    str(self._run_dir),
                    str(fd),
                    str(tells_fd),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_environment(read_fd),
                    pass_fds=(fd, read_fd, tells_fd),
                    start_new_session=True,
                )
            os.close(tells_fd)
            tells_fd = -1
            try:
                with Porch(self._listener):
                    await until_readable(ready_fd)  # closed by a viewer that is ready, or has ended
                await process.wait()
            finally:
                await _end(process)
        finally:
            for each in (read_fd, write_fd, ready_fd, tells_fd):
                if each >= 0:
                    os.close(each)

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError), self._log_path.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")


def _listening() -> socket.socket:
    """Raises: OSError."""
    for port in (_PORT, 0):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `HttpServer` does
        try:
            listener.bind((_HOST, port))
        except OSError:
            listener.close()
            continue
        listener.listen()
        listener.setblocking(False)
        return listener
    raise OSError(f"no port of {_HOST} can be bound")


def _environment(parent_fd: int) -> dict[str, str]:
    """That of the launching process, without what is only for services; the viewer gets no token."""
    dropped = {TOKEN_VARIABLE, PRIVATE_VARIABLE, LIFE_FD_VARIABLE}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, PARENT_FD_VARIABLE: str(parent_fd)}


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a process that still runs, first kindly."""
    for signal_process in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal_process()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
