"""A script that runs a server for an engine, and ends the server when the engine's process ends.

    python -I -S keeper.py FOLDER PROGRAM [ARGUMENT ...]

The engine's process starts the script and keeps its standard input open. When standard input ends, for
whatever reason, the script asks the server to stop, waits for a while, kills what remains of it and of
everything that it started, and deletes FOLDER. If the engine wrote `keep` last, FOLDER stays. A crash of the
engine also closes standard input, so a server never outlives its engine.

The server gets its own session and writes its log to the script's standard output. The first line on standard
error is the server's process id, or 0 and the reason if the server can't be started. The exit code is the
server's, or 128 + its signal. The script imports only the standard library because nothing else is available
with `-I -S`.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading

__all__ = ["GRACE_S", "KEEP"]

GRACE_S = 20.0
"""A server that still runs this long after SIGTERM is killed. It then leaves shared memory behind."""
KEEP = b"keep"
"""The engine writes this to standard input if it will start another server in the folder."""
_PR_SET_PDEATHSIG = 1
"""An option of Linux's `prctl`: the signal that a process gets when its parent dies."""


def _main() -> None:
    """Runs the server until it ends by itself or its engine ends."""
    folder = sys.argv[1]
    argv = sys.argv[2:]
    try:
        server = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except OSError as err:
        sys.stderr.write(f"0 {err.strerror}\n")
        sys.exit(127)
    sys.stderr.write(f"{server.pid}\n")
    sys.stderr.flush()
    is_left = threading.Event()
    stopper = threading.Thread(target=_stop_at_end, args=(server, folder, is_left), daemon=True)
    stopper.start()
    code = server.wait()
    _kill_session(server.pid)  # the workers of a crashed server would keep its memory
    if is_left.is_set():
        stopper.join()  # the folder has to be gone before this process ends
    # sys.exit could hang: the stopper may still block on standard input, whose lock the interpreter needs to
    # shut down.
    os._exit(code if code >= 0 else 128 - code)


def _stop_at_end(server: "subprocess.Popen[bytes]", folder: str, is_left: threading.Event) -> None:
    """Waits for the end of standard input, then ends the server and cleans up."""
    last_words = sys.stdin.buffer.read()
    is_left.set()
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    _kill_session(server.pid)
    if last_words != KEEP:
        shutil.rmtree(folder, ignore_errors=True)


def _kill_session(pid: int) -> None:
    """Kills the server and what it started. The server leads the process group of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    """Asks the kernel to kill the server when this process dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _main()
