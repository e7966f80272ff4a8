"""The process of one program, from its fork to its end.

It is the first process of its own process namespace, so when it ends, the kernel ends everything that it
started. It sees the box's read-only files and its own /tmp, which holds only its files and is gone with it.
"""

import atexit
import gc
import io
import math
import os
import resource
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from errno import EDQUOT, EFBIG, ENOSPC
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from astraflow.addons.sandbox.inside import kernel, walls

__all__ = [
    "BOX_FOLDER",
    "EXIT_MEMORY",
    "EXIT_OUTPUT",
    "FOLDER",
    "MAIN",
    "STDIN_PATHS",
    "ProgramOrder",
    "become",
]

FOLDER = "/tmp"
"""The only folder in which a program can write, and its current folder."""
BOX_FOLDER = "/box"
"""The folder in which a box has this package. Programs cannot import it."""
MAIN = "main.py"
"""Name of the program's own file."""
STDIN_PATHS = ("/dev/stdin", "/dev/fd/0")
"""Paths at which a program can open its standard input. Boxes for programs have a file at each path, and
each program mounts its own input over these files."""
EXIT_MEMORY = 251
"""Exit code of a program that was ended by an uncaught MemoryError. A program that exits with this code on
purpose is mistaken for one. That does no harm: either way, it has not passed."""
EXIT_OUTPUT = 252
"""Exit code of a program that ended because it could no longer write to its files."""

_EXIT_UNFLUSHED = 120
"""Exit code of CPython if its outputs cannot be flushed."""
_MAX_FD = 1 << 16
"""Upper bound on the file descriptors of a zygote."""
_MAX_OPEN_FILES = 64
_MAX_FILES = 1024
"""Largest number of files in the folder of a program."""
_MAX_FILES_OF_COMMANDS = 16_384
"""The same for a program that runs shell commands."""
_MAX_THREADS = 64
"""Number of threads that are allowed in addition to processes: the kernel counts threads as processes."""
_OUT_OF_SPACE = (EDQUOT, EFBIG, ENOSPC)
_STACK_BYTES = 120 << 20
"""Stack of the main thread. Recursion through C code needs more than the usual 8 MiB. The kernel keeps at
least 128 MiB free below a stack, so a process can get this much even after it has started."""


@dataclass(frozen=True, slots=True)
class ProgramOrder:
    """A program and its limits. The keys of `limits` are the fields of `sandbox.verdict.BoxLimits`."""

    source: bytes
    files: Mapping[str, bytes]
    limits: Mapping[str, Any]
    filter: bytes
    """The filter of system calls."""
    reserved_bytes: int = 0
    """Address space in addition to the limit of memory, if the memory that the program uses is measured."""


def become(order: ProgramOrder, *, streams: Sequence[int], started: int) -> NoReturn:
    """Makes this process the program. `streams`: its standard input and outputs.

    If that fails, the reason is written to `started`. Otherwise, `started` is closed before the program
    begins.
    """
    stdin, *outputs = streams
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        if not order.limits["runs_commands"]:
            stdin = _named_stdin(stdin)
        _enter_folder(order)
        for number, fd in enumerate((stdin, *outputs)):
            os.dup2(fd, number)
        # Moved to the next number, so that all higher descriptors can be closed.
        started = os.dup2(started, len(streams), inheritable=False)
        os.closerange(started + 1, _MAX_FD)
        _limit(order.limits, order.reserved_bytes)
        kernel.give_up_rights()
        runs_commands = order.limits["runs_commands"]
        may_start_processes = runs_commands or order.limits["num_processes"] > 1
        walls.restrict_files(
            FOLDER, reads_programs=may_start_processes, runs_own_files=runs_commands, has_network=False
        )
        kernel.seccomp(order.filter)
        os.close(started)
    except BaseException as error:  # noqa: BLE001 - told to the service; this process must end here
        os.write(started, str(error).encode()[:1000])
        os._exit(1)
    os._exit(_run(order.source))


def _named_stdin(given: int) -> int:
    """Opens a copy of the standard input, and makes it available at `STDIN_PATHS`.

    A box has no /proc, so these paths cannot be links to the open file, as they usually are.
    """
    kernel.mount("tmpfs", FOLDER, kind="tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    path = f"{FOLDER}/stdin"
    with open(path, "wb") as file:
        left = os.fstat(given).st_size
        while left:
            left -= os.sendfile(file.fileno(), given, None, left)
    os.chmod(path, 0o400)
    for place in STDIN_PATHS:
        kernel.mount(path, place, flags=kernel.MS_BIND)
        kernel.set_read_only(place)
    # A shared mapping of this device would be memory that no limit counts.
    kernel.mount("/dev/null", "/dev/zero", flags=kernel.MS_BIND)
    stdin = os.open(path, os.O_RDONLY)
    kernel.umount(FOLDER, kernel.MNT_DETACH)
    return stdin


def _enter_folder(order: ProgramOrder) -> None:
    """Mounts the program's own folder, and writes its files."""
    runs_commands = order.limits["runs_commands"]
    num_files = _MAX_FILES_OF_COMMANDS if runs_commands else _MAX_FILES
    options = f"size={order.limits['disk_bytes']},nr_inodes={num_files},mode=700"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | (0 if runs_commands else kernel.MS_NOEXEC)
    kernel.mount("tmpfs", FOLDER, kind="tmpfs", flags=flags, options=options)
    os.chdir(FOLDER)
    for name, content in (*order.files.items(), (MAIN, order.source)):
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def _limit(limits: Mapping[str, Any], reserved_bytes: int) -> None:
    """Sets the kernel's limits, which hold for one process each.

    For all processes together, files are limited by the folder's size, and memory by the number of processes.
    """
    walls.limit(
        {
            resource.RLIMIT_CPU: math.ceil(limits["cpu_s"]),
            resource.RLIMIT_AS: limits["memory_bytes"] + reserved_bytes,
            resource.RLIMIT_FSIZE: limits["disk_bytes"],
            resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
            resource.RLIMIT_NPROC: limits["num_processes"] + _MAX_THREADS,
        }
    )
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK_BYTES if most == resource.RLIM_INFINITY else min(_STACK_BYTES, most)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, most))


def _run(source: bytes) -> int:
    """Runs the program as CPython runs a script. Returns its exit code."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "astraflow"]:
        del sys.modules[name]
    sys.path[:] = [FOLDER, *(path for path in sys.path if path != BOX_FOLDER)]
    sys.argv[:] = [MAIN]
    main = ModuleType("__main__")
    main.__dict__["__file__"] = MAIN
    sys.modules["__main__"] = main
    gc.enable()
    try:
        exec(compile(source, MAIN, "exec", dont_inherit=True), main.__dict__)
        code = 0
    except SystemExit as stop:
        code = _code_of(stop)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises
        code = _report_error(error)
    return _ended(code, main)


def _code_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    _try(lambda: sys.stderr.write(f"{stop.code}\n"))
    return 1


def _report_error(error: BaseException) -> int:
    """Prints the traceback, without this module's own frame. Returns the exit code."""
    trace = error.__traceback__
    error = error.with_traceback(trace.tb_next if trace else None)
    _try(lambda: sys.excepthook(type(error), error, error.__traceback__))
    if isinstance(error, MemoryError):
        return EXIT_MEMORY
    if isinstance(error, OSError) and error.errno in _OUT_OF_SPACE:
        return EXIT_OUTPUT
    return 1


def _ended(code: int, main: ModuleType) -> int:
    """Does what CPython does at the end: waits for threads, calls exit handlers, and flushes files.

    `code`: the exit code so far. Returns the final one.
    """
    shutdown = getattr(threading, "_shutdown")  # noqa: B009 - private, but the only way to wait as CPython does
    run_registered = getattr(atexit, "_run_exitfuncs")  # noqa: B009 - as above
    _try(shutdown)
    _try(run_registered)
    is_flushed = _try(lambda: sys.stdout.closed or sys.stdout.flush())
    # A program may have replaced `sys.stdout`, or may write to a file that it never closes.
    files = [each for each in main.__dict__.values() if isinstance(each, io.IOBase)]
    for file in (*files, sys.__stdout__, sys.stderr):
        _try(partial(_flush, file))
    return code or (0 if is_flushed else _EXIT_UNFLUSHED)


def _flush(file: Any) -> None:
    if not file.closed:
        file.flush()


def _try(call: Any) -> bool:
    """Calls a function that the program may have replaced. Returns whether it raised nothing."""
    try:
        call()
    except BaseException:  # noqa: BLE001 - the program is over, so nobody is left to be told
        return False
    return True
