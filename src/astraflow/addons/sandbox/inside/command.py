"""The processes of an agent program: a keeper, and the program with everything that it starts.

    zygote --(fork)--> keeper --(fork)--> program

The keeper is the first process of its own process namespace. It runs none of the program's code, waits for
the program's end, and reaps orphans. When the keeper ends, the kernel ends everything else in the namespace.
"""

import os
import resource
import signal
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from astraflow.addons.sandbox.inside import kernel, walls
from astraflow.addons.sandbox.inside.program import FOLDER

__all__ = ["EXIT_UNSTARTABLE", "REPORT_HEAD", "CommandOrder", "become"]

EXIT_UNSTARTABLE = 127
"""Exit code if the program could not be started, as in shells."""
REPORT_HEAD = struct.Struct(">i?")
"""Start of a report: the exit code, or minus the signal that ended the program, and whether the program left
a result. The result follows."""

_MAX_RESULT_BYTES = 1 << 19
"""Largest result, which is usually a few numbers or a text. A longer one is cut off, so it cannot be read."""
_MAX_FILES = 65_536
_MAX_OPEN_FILES = 1024
_MAX_FD = 1 << 16
_NUM_OURS = 8
"""More processes than the box itself has. They also count toward the kernel's limit on processes."""
_PROC_FLAGS = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC


@dataclass(frozen=True, slots=True)
class CommandOrder:
    """An agent program and its limits."""

    spec: Mapping[str, Any]
    """`program`: path of its file. `argv` and `env`: as for execve(2). `folder`: its current folder. `kept`:
    paths in /tmp that stay visible. `result`: the path at which it may leave a result."""
    files: Mapping[str, bytes]
    """The files in its /tmp, by relative path."""
    limits: Mapping[str, Any]
    """The fields of `sandbox.command.CommandLimits`."""
    filter: bytes
    """The filter of system calls."""


def become(order: CommandOrder, *, streams: Sequence[int], started: int, report: int) -> NoReturn:
    """Makes this process the keeper of the program, and starts the program.

    `streams`: the program's standard input and outputs.

    If that fails, the reason is written to `started`. Otherwise, `started` is closed before the program
    begins. When the program has ended, the keeper writes to `report` and ends, which ends everything that is
    left.
    """
    try:
        _enter_folder(order)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        _close_all_but(len(streams), started, report)
        _limit(order.limits)
        kernel.give_up_rights()
        walls.restrict_files(FOLDER, reads_programs=True, runs_own_files=True, has_network=True)
        kernel.seccomp(order.filter)
        pid = os.fork()
    except BaseException as error:  # noqa: BLE001 - told to the service; this process must end here
        os.write(started, str(error).encode()[:1000])
        os._exit(1)
    if pid == 0:
        _execute(order.spec, started)
    os.close(started)
    code = _wait_for(pid)
    _write_all(report, _report(code, order.spec["result"]))
    # The exit code says only whether the program was started, because it cannot also represent a signal.
    os._exit(EXIT_UNSTARTABLE if code == EXIT_UNSTARTABLE else 0)


def _enter_folder(order: CommandOrder) -> None:
    """Mounts a /tmp and a /proc for this program alone, and writes its files."""
    kernel.unshare(kernel.CLONE_NEWNS)
    # Opened before the new /tmp is mounted, because that hides them.
    folders = [(os.open(path, os.O_PATH), path) for path in order.spec["kept"]]
    options = f"size={order.limits['disk_bytes']},nr_inodes={_MAX_FILES},mode=700"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", FOLDER, kind="tmpfs", flags=flags, options=options)
    for fd, path in folders:
        kernel.bind_opened(fd, path)
    kernel.mount("proc", "/proc", kind="proc", flags=_PROC_FLAGS)
    for name, content in order.files.items():
        with open(f"{FOLDER}/{name}", "wb") as file:
            file.write(content)
    os.chdir(order.spec["folder"])


def _close_all_but(first: int, *exceptions: int) -> None:
    """Closes all file descriptors from number `first` on, except those in `exceptions`."""
    for fd in sorted(exceptions):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, _MAX_FD)


def _limit(limits: Mapping[str, Any]) -> None:
    walls.limit(
        {
            resource.RLIMIT_AS: limits["memory_bytes"],
            resource.RLIMIT_FSIZE: limits["disk_bytes"],
            resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
            resource.RLIMIT_NPROC: limits["num_processes"] + _NUM_OURS,
        }
    )


def _execute(spec: Mapping[str, Any], started: int) -> NoReturn:
    try:
        os.setsid()
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        os.execve(spec["program"], spec["argv"], spec["env"])
    except BaseException as error:  # noqa: BLE001 - told to the service; this process must end here
        reason = error.strerror if isinstance(error, OSError) else str(error)
        os.write(started, (reason or type(error).__name__).encode()[:1000])
        os._exit(EXIT_UNSTARTABLE)


def _wait_for(pid: int) -> int:
    """Waits for the program and reaps orphans. Returns the exit code, or minus the signal that ended it."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _report(code: int, path: str) -> bytes:
    """Returns the exit code and the file at `path`, if the program left one there."""
    try:
        # Don't follow a link, and don't wait for the writer of a pipe: the program may have made either.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return REPORT_HEAD.pack(code, False)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return REPORT_HEAD.pack(code, False)
    return REPORT_HEAD.pack(code, True) + os.read(fd, _MAX_RESULT_BYTES)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
