"""Keeps a server that an engine started: run by the engine's process, as a script, standard library only.

    python -I -S keeper.py FOLDER PROGRAM [ARGUMENT ...]

The server gets a session of its own, and this process's standard output for its log. Standard input is held
open by the engine's process. When it ends, for whatever reason, the server is asked to stop, then killed with
all that it started, and FOLDER is deleted, unless the last word was to keep it. The
first line on standard error is the server's process id; the exit code is the server's (128 + its signal).
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
"""A server that has not ended this long after SIGTERM is killed; it then leaves shared memory behind."""
KEEP = b"keep"
"""Written to standard input by an engine that will start another server in the folder."""
_PR_SET_PDEATHSIG = 1


def _main() -> None:
    """Runs the server until it ends, or the engine does."""
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
    _kill_session(server.pid)
    if is_left.is_set():
        stopper.join()
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
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    """Asks the kernel to kill the server when this process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _main()
