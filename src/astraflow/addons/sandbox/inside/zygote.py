"""The first process of a box. For each program that the service sends, it forks a process and watches it.

    service --(socket)--> zygote --(fork)--> program, or the keeper of an agent program
                             ^---- pipes ------'

The zygote runs none of a program's code. Programs cannot look into the zygote or signal it, because it is in
a process namespace above theirs. It ends when the service closes the socket, and the kernel then ends
everything in the box.
"""

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from astraflow.addons.sandbox.inside import command, kernel, program, seccomp
from astraflow.addons.sandbox.inside.memory import RESERVED_BYTES, Memory
from astraflow.service import frames

__all__ = ["main"]

_PRELOADED = (
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "traceback",
    "typing",
)
"""Modules that many programs import. Each program inherits them through the fork instead of loading them."""
_SCRATCH = f"size={64 << 20},nr_inodes=1024,mode=700"
"""Mount options of the folder that libraries may write to while they are imported."""
_CHUNK = 65_536
_MAX_REQUEST_BYTES = 1 << 30
_LONGEST_POLL_S = 3600.0
"""Longest wait of one poll. The kernel accepts at most about 24 days."""
_MEASURE_S = 0.02
"""Time between two measurements of a program's memory. A program can fill about 100 MB in it."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


_LOOPBACK = "127.0.0.1"
_PROBE_S = 0.05
"""CPU time of the computation that measures how busy the machine is. It spans several time slices."""
_BACKLOG = 128
"""Largest number of connections to the gateway that wait for the service to accept them."""
_Order = program.ProgramOrder | command.CommandOrder


def main(control_fd: int, preloaded: Sequence[str], gateway: int, channel: int, processes: int) -> None:
    """Serves programs until the service closes the socket.

    `gateway`: the only port that is open in the box; 0 for none. `channel`: the socket over which the port's
    listening socket is sent to the service. `processes`: the machine's /proc; -1 for none.
    """
    kernel.allow_looking_in(is_allowed=False)
    with socket.socket(fileno=channel) as to_service:
        if gateway:
            # The only port of the box's network. Its socket goes to the service, which is outside.
            with socket.create_server((_LOOPBACK, gateway), backlog=_BACKLOG) as listener:
                socket.send_fds(to_service, [b"."], [listener.fileno()])
    memory = Memory(processes)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _import((*_PRELOADED, *preloaded), needs_scratch=bool(preloaded))
    # Scripts usually get `exit` and `quit` from the module `site`, which a box doesn't load.
    quitter = importlib.import_module("_sitebuiltins").Quitter
    for name in ("exit", "quit"):
        setattr(builtins, name, quitter(name, "Ctrl-D"))
    gc.collect()
    gc.disable()  # a collection would copy pages that zygote and program share; programs enable it again
    gc.freeze()
    with socket.socket(fileno=control_fd) as control:
        control.sendall(frames.encode({"ready": True}, []))
        while (request := frames.receive_now(control, _MAX_REQUEST_BYTES)) is not None:
            head, (source, stdin, *contents) = request
            files = dict(zip(head["files"], contents, strict=True))
            order = _order(head, source, files, memory)
            reply, outputs = _verdict(order, stdin, control, memory)
            control.sendall(frames.encode(reply, outputs))
    os._exit(0)


def _order(head: dict[str, Any], source: bytes, files: dict[str, bytes], memory: Memory) -> _Order:
    """Returns the order for a program of a model, or for an agent program that `source` describes."""
    limits = head["limits"]
    if head["is_command"]:
        return command.CommandOrder(json.loads(source), files, limits, seccomp.agent_filter())
    if limits["runs_commands"]:
        return program.ProgramOrder(source, files, limits, seccomp.agent_filter())
    may_start_processes = limits["num_processes"] > 1
    # Only one process is measured, so the address space of several is limited.
    reserved = 0 if may_start_processes or not memory.is_measurable else RESERVED_BYTES
    return program.ProgramOrder(source, files, limits, _filter_of(may_start_processes), reserved)


@cache
def _filter_of(may_start_processes: bool) -> bytes:
    return seccomp.filter_of(may_start_processes=may_start_processes)


def _import(names: Sequence[str], *, needs_scratch: bool) -> None:
    """Imports modules. Meanwhile, libraries can get a folder to write to, which no program sees."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"  # threads that a library starts on import don't survive a fork
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    if needs_scratch:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("tmpfs", program.FOLDER, kind="tmpfs", flags=flags, options=_SCRATCH)
    for name in names:
        importlib.import_module(name)
    if needs_scratch:
        kernel.umount(program.FOLDER, kernel.MNT_DETACH)
        # Exit handlers of these libraries must not run at the end of each program.
        atexit._clear()  # pyright: ignore[reportPrivateUsage] - nothing public forgets all callbacks
    os.environ.clear()
    os.environ.update(before)


def _verdict(
    order: _Order, stdin: bytes, control: socket.socket, memory: Memory
) -> tuple[dict[str, Any], list[bytes]]:
    """Runs a program. Returns how it ended, its two outputs, and the report of an agent program's keeper."""
    started_s = time.monotonic()
    pid, watched = _forked(order, stdin)
    try:
        measured = memory if isinstance(order, program.ProgramOrder) and order.reserved_bytes else None
        is_late = watched.wait(started_s + order.limits["wall_s"], control, measured)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        # Measured after the kill, so that the program itself doesn't count as load of the machine.
        slowdown = _slowdown() if is_late else 1.0
    finally:
        watched.close()
    _, status, usage = os.wait4(pid, 0)
    reply = {
        "problem": watched.problem.decode(errors="replace"),
        "code": os.waitstatus_to_exitcode(status),
        "is_late": is_late,
        "slowdown": slowdown,
        "is_full": watched.is_full,
        "is_over_memory": watched.is_over_memory,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.monotonic() - started_s,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    return reply, [bytes(watched.stdout), bytes(watched.stderr), bytes(watched.report)]


def _slowdown() -> float:
    """Returns the ratio of wall time to CPU time of a computation: about 1 on an idle machine."""
    wall_s = time.monotonic()
    cpu_s = time.process_time()
    while (used_s := time.process_time() - cpu_s) < _PROBE_S:
        pass
    return (time.monotonic() - wall_s) / used_s


def _forked(order: _Order, stdin: bytes) -> "tuple[int, _Watched]":
    """Forks the process of a program, as the first process of a new process namespace."""
    given = _read_only_file(stdin)
    stdout, stdout_write = os.pipe()
    stderr, stderr_write = os.pipe()
    started, started_write = os.pipe()
    report, report_write = os.pipe()
    me = os.pidfd_open(os.getpid())
    kernel.unshare(kernel.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        streams = (given, stdout_write, stderr_write)
        if isinstance(order, command.CommandOrder):
            command.become(order, streams=streams, started=started_write, report=report_write)
        program.become(order, streams=streams, started=started_write)
    kernel.setns(me, kernel.CLONE_NEWPID)  # forks are of this namespace again, so `unshare` can succeed again
    for fd in (given, stdout_write, stderr_write, started_write, report_write, me):
        os.close(fd)
    pipes = (stdout, stderr, started, report)
    return pid, _Watched(
        os.pidfd_open(pid), *pipes, order.limits["output_bytes"], order.limits["memory_bytes"]
    )


def _read_only_file(content: bytes) -> int:
    """Returns a file in memory that nobody can change, positioned at its beginning."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


@dataclass(slots=True)
class _Watched:
    """The reading ends of a program's outputs, and what has been read from them so far."""

    ended_fd: int
    stdout_fd: int
    stderr_fd: int
    started_fd: int
    report_fd: int
    max_bytes: int
    """Largest size of each output."""
    max_memory: int
    """Largest size of the program's used memory, if it is measured."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    problem: bytearray = field(default_factory=bytearray)
    """Why the program could not be started."""
    report: bytearray = field(default_factory=bytearray)
    """What the keeper of an agent program reports at its end."""
    is_full: bool = False
    """Whether an output was larger than allowed."""
    is_over_memory: bool = False
    """Whether the program used more memory than allowed."""

    def wait(self, until_s: float, control: socket.socket, memory: Memory | None) -> bool:
        """Reads the outputs until the program ends, is late, or prints or uses too much.

        Returns whether it is late.

        `memory`: what measures the program; None if its address space is limited instead.

        Ends the box if the service closes the socket.
        """
        poll = select.poll()
        poll.register(self.ended_fd, select.POLLIN)
        poll.register(control, select.POLLRDHUP)
        sinks = {
            self.stdout_fd: self.stdout,
            self.stderr_fd: self.stderr,
            self.started_fd: self.problem,
            self.report_fd: self.report,
        }
        for fd in sinks:
            poll.register(fd, select.POLLIN)
        longest_s = _LONGEST_POLL_S if memory is None else _MEASURE_S
        while not (self.is_full or self.is_over_memory):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return True
            ready = {fd for fd, _ in poll.poll(min(left_s, longest_s) * 1000 + 1)}
            if control.fileno() in ready:
                os._exit(0)
            for fd in ready & sinks.keys():
                if not self._read(fd, sinks[fd]):
                    poll.unregister(fd)
            if self.ended_fd in ready:
                self._read_rest(sinks)
                return False
            self.is_over_memory = memory is not None and memory.used_bytes(self.ended_fd) > self.max_memory
        return False

    def _read(self, fd: int, sink: bytearray) -> bool:
        """Reads what is available. Returns False at the end of the output, or if there is too much."""
        chunk = os.read(fd, _CHUNK)
        room = self.max_bytes - len(sink)
        sink += chunk[:room]
        self.is_full |= len(chunk) > room
        return bool(chunk) and not self.is_full

    def _read_rest(self, sinks: dict[int, bytearray]) -> None:
        """Reads what is left in the pipes, which no longer have a writer."""
        for fd, sink in sinks.items():
            while self._read(fd, sink):
                pass

    def close(self) -> None:
        for fd in (self.ended_fd, self.stdout_fd, self.stderr_fd, self.started_fd, self.report_fd):
            os.close(fd)
