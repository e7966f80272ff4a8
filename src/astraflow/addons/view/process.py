"""The main function of the viewer process, which `astraflow run` starts when somebody opens the page.

    python -m astraflow.addons.view.process RUN_DIR FD READY_FD

FD is a socket that listens on loopback. The viewer closes READY_FD when it accepts connections. The process
ends with its launcher, or after ten minutes without a request. The launcher then starts another one on the
next connection.
"""

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

from astraflow.addons.view.server import Viewing, serve
from astraflow.service.process import run_service

__all__ = ["main"]

_IDLE_S = 600.0
_NICE = 19
"""The lowest priority: on a busy machine, the services of the run come first."""


def main() -> int:
    """Runs the process; returns its exit code."""
    run_dir, fd, ready_fd = sys.argv[1:]
    _go_last()
    listener = socket.socket(fileno=int(fd))
    listener.setblocking(False)

    async def run(stop: asyncio.Event) -> None:
        started = asyncio.get_running_loop().create_future()
        started.add_done_callback(lambda _: os.close(int(ready_fd)))
        await serve(stop, [Path(run_dir)], Viewing(idle_s=_IDLE_S), listener=listener, started=started)

    return run_service(run, name="viewer")


def _go_last() -> None:
    """Lowers the priority of this process and of its session.

    Many systems give each session an equal share of the CPUs, whatever the priority of its processes
    (autogroups, see sched(7)).
    """
    os.nice(_NICE)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # the system has no autogroups
            Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")


if __name__ == "__main__":
    sys.exit(main())
