"""The keeper of a program: starts it, says how it ended, and ends everything that it has left behind.

    python -I -S -c "...; main()" SPECIFICATION LIFELINE_FD STATUS_FD

`kept_process` starts it, in an interpreter that has only the standard library and the modules of this
package. When the program ends, or when the other end of LIFELINE_FD closes because the service has let go of
it or has died, everything that the program started is killed. This includes orphans in other sessions,
because orphans become children of the keeper. Only a keeper that is killed by SIGKILL leaves some behind; the
program itself dies with it.

The keeper writes JSON lines to STATUS_FD: first `pid`, the program's process id, or the problem because of
which there is none, by its kind (`start`, or `box`, the walls around the program). The last line has the
exit `code`, or minus the signal that ended the program.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from astraflow.service.process_ties import adopt_orphans, die_with_parent

__all__ = ["KEEP", "LIMIT_S", "main"]

KEEP = b"keep"
"""If the service writes this to LIFELINE_FD last, the folder `removed` stays."""
LIMIT_S = 10.0
"""A process that still runs this long after SIGKILL hangs in the kernel, so the keeper stops waiting."""

_PAUSE_S = 0.005
"""Pause between two searches for remaining processes."""


class _Keeper:
    """Keeps the program that a specification describes."""

    def __init__(
        self,
        *,
        argv: list[str],
        fds: list[int],
        grace_s: float,
        removed: str,
        walls: str,
        box: dict[str, Any] | None,
    ) -> None:
        """`argv`, `fds`: the program, and what it inherits. The others are those of `kept_process.Care`."""
        self._argv = argv
        self._fds = fds
        self._grace_s = grace_s
        self._removed = removed
        self._walls: Any = importlib.import_module(walls) if walls else None
        self._box = box
        self._is_walled = self._walls is not None and self._walls.keep_signals_in()
        self._pid = 0
        self._has_ended = threading.Event()
        """Set once the program has ended."""
        self._is_removing = False

    def start(self) -> bytes:
        """Starts the program. Returns: the first line of the status."""
        problem_read, problem_write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(problem_read)
            self._become(problem_write)
        for fd in (problem_write, *self._fds):  # the end of the program's sockets must be seen at once
            os.close(fd)
        # Ends without a problem once the program has started, because `exec` closes the pipe's other end.
        return _read_all(problem_read) or json.dumps({"pid": self._pid}).encode()

    def end_when_let_go(self, lifeline: int) -> None:
        """Waits until the other end of the lifeline closes, then ends the program."""
        last_words = _read_all(lifeline)
        self._is_removing = bool(self._removed) and last_words != KEEP
        if self._grace_s and not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
            self._has_ended.wait(self._grace_s)
        self._kill_all()

    def wait(self) -> bytes:
        """Waits for the program, and cleans up after it. Returns: the last line of the status."""
        ended = 0
        status = 0
        while ended != self._pid:  # the others are orphans
            ended, status = os.wait()
        self._has_ended.set()
        self._kill_all()
        if self._is_removing:
            import shutil  # here, because most keepers don't need it and it takes a while to import

            shutil.rmtree(self._removed, ignore_errors=True)
        return json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode()

    def _become(self, problem_write: int) -> None:
        """Becomes the program, in its box if it has one. A problem is written to the pipe, and ends this."""
        kind = "box"
        try:
            os.setsid()
            die_with_parent()
            if self._box is not None:
                self._walls.enter(**self._box)
            if self._walls is not None:
                self._walls.keep_signals_in()
            kind = "start"
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; the program would inherit that
            os.execvp(self._argv[0], self._argv)
        except Exception as err:  # noqa: BLE001 - reported to the service; this process must end here
            reason = str(err)
            if isinstance(err, OSError) and (kind == "start" or err.filename is None):
                reason = err.strerror  # without the number; the service names the file of a failed start
            os.write(problem_write, json.dumps({kind: reason or type(err).__name__}).encode())
            os._exit(127)

    def _kill_all(self) -> None:
        """Kills everything that the program started. Returns when all of it is gone, or after `LIMIT_S`."""
        give_up_s = time.monotonic() + LIMIT_S
        while time.monotonic() < give_up_s:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            if self._is_walled:
                # -1 means everything that this process may signal, which here is only what it started. The
                # kernel sends all of these signals at once, so not even a chain of forks escapes.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(-1, signal.SIGKILL)
            left = _descendants()
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if threading.current_thread() is threading.main_thread():
                # In the other thread, reaping would take the program's exit status away from `wait`.
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG) != (0, 0):
                        pass
            if not left:
                return
            time.sleep(_PAUSE_S)


def _descendants() -> list[int]:
    """Returns all processes below this one, except zombies. Without a /proc, the list is empty."""
    parents: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (parent := _living_parent(name)):
                parents[int(name)] = parent
    descendants = set[int]()
    news = {os.getpid()}
    while news:
        news = {pid for pid, parent in parents.items() if parent in news} - descendants
        descendants |= news
    return list(descendants)


def _living_parent(pid: str) -> int:
    """Returns the parent of a process; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name comes before, in parentheses, and may itself contain parentheses and blanks.
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state in (b"Z", b"X") else int(parent)


def _read_all(fd: int) -> bytes:
    parts: list[bytes] = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts)


def _tell(status: int, line: bytes) -> None:
    with contextlib.suppress(OSError):  # the service has died
        os.write(status, line + b"\n")


def main() -> None:
    """Runs the program until it ends or is let go of, then reports how it ended."""
    lifeline = int(sys.argv[2])
    status = int(sys.argv[3])
    os.set_inheritable(lifeline, False)
    os.set_inheritable(status, False)
    adopt_orphans()
    keeper = _Keeper(**json.loads(sys.argv[1]))
    _tell(status, keeper.start())
    threading.Thread(target=keeper.end_when_let_go, args=(lifeline,), daemon=True).start()
    _tell(status, keeper.wait())
    os._exit(0)
