"""The process of one service: signals, the launcher's pipes, logging, memory, and the exit code.

A service shuts down gracefully on SIGTERM or SIGINT, when its launcher is gone, or when a `vital` task has
ended. Its event loop writes bytes to a pipe, which tell the launcher that it is alive.

The environment names both pipes by their descriptor numbers. A scheduler such as srun, or ssh, may forward
the environment without the pipes. The number of a pipe may then belong to a closed descriptor or to another
file. The service logs and ignores such a number, so it neither notices the end of its launcher nor shows
signs of life.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import stat
import sys
from collections.abc import Awaitable, Callable

from astraflow.errors import Error
from astraflow.service.connections import raise_file_limit
from astraflow.service.vital import handle_ends

__all__ = [
    "LIFE_FD_VARIABLE",
    "LIFE_SIGN_EVERY_S",
    "MODULE_PATH_VARIABLE",
    "PARENT_FD_VARIABLE",
    "STACKS_SIGNAL",
    "launcher_pipe",
    "log_as",
    "run_service",
    "settle_memory",
]

_log = logging.getLogger(__name__)

PARENT_FD_VARIABLE = "ASTRAFLOW_PARENT_FD"
"""Environment variable with the descriptor of a pipe's read end; the pipe closes when the launcher dies."""
LIFE_FD_VARIABLE = "ASTRAFLOW_LIFE_FD"
"""Environment variable with the descriptor of a pipe's write end, for the signs of life of the process."""
LIFE_SIGN_EVERY_S = 1.0
MODULE_PATH_VARIABLE = "ASTRAFLOW_MODULE_PATH"
"""Environment variable with folders, joined as in PATH, where the recipe's own modules are found."""
STACKS_SIGNAL = signal.SIGUSR2
"""On this signal, a service logs the stacks of all its threads, even while its event loop hangs."""

_LAST_MOMENT_S = 10.0
"""A service that has failed, or lost its launcher or a vital task, has this long to shut down gracefully."""
_GC_THRESHOLD = 50_000
"""Number of new containers between two collections of the youngest generation: 400 episodes that begin and
end together create and free about 40,000."""
_M_TRIM_THRESHOLD = -1
"""The option's number in glibc's malloc.h."""
_M_MMAP_THRESHOLD = -3
_MAX_KEPT_BUFFER_BYTES = 32 * 1024 * 1024
"""Freed buffers up to this size are reused. glibc doesn't allow a higher limit."""
_MAX_KEPT_BYTES = 128 * 1024 * 1024
"""Largest amount of free memory that the process keeps."""


def run_service(main: Callable[[asyncio.Event], Awaitable[int | None]], *, name: str) -> int:
    """Runs `main(stop)` until it returns. `stop` is set when the service has to end (see the module).

    Returns the process's exit code: 0, the value that `main` returned, or 1 after one of our errors, which is
    logged.
    """
    log_as(name)
    # Otherwise, the HTTP clients of agents that run in this process would log a line per request.
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)
    raise_file_limit()
    # Check first: the event loop opens its own pipes, which may get the number of a closed descriptor.
    parent_fd = _checked_pipe(PARENT_FD_VARIABLE)
    life_fd = _checked_pipe(LIFE_FD_VARIABLE)
    loop_factory = asyncio.new_event_loop
    if sys.platform != "win32":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(_run_guarded(main, name, parent_fd, life_fd))
        except Error as err:
            _log.error("%s stopped: %s", name, err)
            # The runner waits for threads that are still at work, which may take forever.
            runner.get_loop().call_later(_LAST_MOMENT_S, os._exit, 1)
            return 1


def log_as(name: str) -> None:
    """Logs to stderr under a name, and on `STACKS_SIGNAL`, writes the stacks of all threads there."""
    logging.basicConfig(
        level=os.environ.get("ASTRAFLOW_LOG", "INFO"),
        format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s",
        stream=sys.stderr,
    )
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def launcher_pipe(variable: str) -> int | None:
    """Returns the descriptor that an environment variable names, if it is an open pipe; None otherwise."""
    try:
        fd = int(os.environ.get(variable, ""))
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
    except (ValueError, OverflowError, OSError):
        return None
    return fd if is_pipe else None


def _checked_pipe(variable: str) -> int | None:
    """Calls `launcher_pipe`, and logs a line if the variable is set but ignored."""
    fd = launcher_pipe(variable)
    text = os.environ.get(variable, "")
    if text and fd is None:
        _log.warning(
            "%s = %r is not an open pipe and is ignored: a scheduler may have forwarded the environment "
            "without the pipe",
            variable,
            text,
        )
    return fd


async def _run_guarded(
    main: Callable[[asyncio.Event], Awaitable[int | None]],
    name: str,
    parent_fd: int | None,
    life_fd: int | None,
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent_fd is not None:
        _watch_parent(loop, stop, name, parent_fd)
    if life_fd is not None:
        _show_life(loop, life_fd)
    failures: list[Error] = []

    def end(error: Error) -> None:
        _log.critical("%s", error)
        failures.append(error)
        stop.set()
        loop.call_later(_LAST_MOMENT_S, os._exit, 1)

    with handle_ends(end):
        code = await main(stop) or 0
    if failures:
        raise failures[0]
    return code


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, name: str, fd: int) -> None:
    """Sets `stop` when the launcher's end of the pipe closes, and ends the process `_LAST_MOMENT_S` later."""

    def parent_died() -> None:
        loop.remove_reader(fd)
        _log.warning("%s: the launcher is gone; stopping", name)
        stop.set()
        loop.call_later(_LAST_MOMENT_S, os._exit, 1)

    loop.add_reader(fd, parent_died)


def _show_life(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    """Writes a byte to the launcher's pipe each second. The event loop does this, so a process falls silent
    if it is stopped or its loop hangs."""
    os.set_blocking(fd, False)
    os.set_inheritable(fd, False)

    def show() -> None:
        # If the pipe is full, the launcher is not reading now, and the bytes in the pipe are enough.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(fd, b".")
        loop.call_later(LIFE_SIGN_EVERY_S, show)

    loop.call_soon(show)


def settle_memory() -> None:
    """Tunes garbage collection and malloc for a long-running process. Call it once, when ready to serve.

    - The collector skips all objects that exist now. Those of imported libraries (half a million with
      transformers) live as long as the process; traversing them repeatedly took a quarter of the time of a
      rollout service's event loop.
    - glibc keeps freed buffers instead of returning them to the kernel. Receiving and padding a batch of
      13 MB then takes 4 ms of CPU time instead of 25 ms, because the kernel doesn't have to map and clear
      8,000 pages again. Only `mallopt` affects a running process: glibc reads its environment variables once,
      at start.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 10, 10)
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library
    set_option(_M_MMAP_THRESHOLD, _MAX_KEPT_BUFFER_BYTES)
    set_option(_M_TRIM_THRESHOLD, _MAX_KEPT_BYTES)
