"""The program of a box that runs shell commands.

Its source is sent to the box, so it imports only the standard library. It restores the files, runs one
command after the other, and prints the results and, on request, all files. After each command, it ends all
processes that the command left.
"""

import base64
import contextlib
import io
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from typing import Any

__all__: list[str] = []

_ROOT = "/tmp"
_SHELLS = ("/bin/bash", "/bin/sh")
_CHUNK = 65_536
_LATE = 124
"""Exit code of a command that was ended because its time was over, as in timeout(1)."""
_UNSTARTABLE = 126
"""Exit code of a command that could not be started, as in shells."""


def _main() -> None:
    os.unlink("main.py")
    given = sys.stdin.buffer
    head = json.loads(given.read(int.from_bytes(given.read(8), "big")))
    _unpack(given.read(head["size"]))
    os.chmod(_ROOT, 0o700)
    for name in head["folders"]:
        if not os.path.lexists(f"{_ROOT}/{name}"):
            os.mkdir(f"{_ROOT}/{name}", 0o755)
    results = [_run(step, given.read(step["size"]), head["max_output"]) for step in head["steps"]]
    state, problem = _packed(head["max_state"]) if head["max_state"] else (b"", "")
    json.dump({"results": results, "state": _text(state), "problem": problem}, sys.stdout)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unpack(archive: bytes) -> None:
    if archive:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            # The archive may hold any link, but a link reaches no further than the box does.
            tar.extraction_filter = lambda member, _: member
            tar.extractall(_ROOT)


def _packed(most: int) -> tuple[bytes, str]:
    """Returns all files, and the reason why they cannot be kept; empty if they can."""
    sink = io.BytesIO()
    total = 0

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal total
        total += entry.size
        if total > most:
            raise OSError(f"the files have more than {most} bytes")
        return entry if entry.isfile() or entry.isdir() or entry.issym() or entry.islnk() else None

    os.chmod(_ROOT, 0o700)
    try:
        with tarfile.open(fileobj=sink, mode="w") as tar:
            tar.add(_ROOT, arcname=".", filter=kept)
    except RecursionError:
        return b"", "the folders are too deep"
    except OSError as error:
        return b"", error.strerror or str(error)
    return sink.getvalue(), ""


def _run(step: Mapping[str, Any], files: bytes, max_output: int) -> dict[str, Any]:
    for path in step["cleared"]:
        _clear(path)
    _unpack(files)
    shell = next(path for path in _SHELLS if os.path.exists(path))
    try:
        process = subprocess.Popen(
            [shell, "-c", step["command"]],
            cwd=step["folder"],
            env=step["env"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # the folder may be gone, and a command may hold a zero byte
        code = _UNSTARTABLE
        is_late = False
        outputs = [b"", f"{error}\n".encode(errors="replace")]
    else:
        is_late, outputs = _watch(process, time.monotonic() + step["timeout_s"], max_output)
        code = _LATE if is_late else process.wait()
    return {
        "code": code,
        "is_late": is_late,
        "stdout": _text(outputs[0]),
        "stderr": _text(outputs[1]),
        "found": {path: _read(path, max_output) for path in step["reads"]},
    }


def _clear(path: str) -> None:
    """Makes an empty folder. Its old content is moved aside, because parts of it may not be deletable."""
    place = _ROOT
    names = path.strip("/").split("/")
    for depth, name in enumerate(names, start=1):
        os.chmod(place, 0o700)
        place += f"/{name}"
        is_folder = os.path.isdir(place) and not os.path.islink(place)
        if os.path.lexists(place) and (depth == len(names) or not is_folder):
            aside = f"{place}.aside"
            while os.path.lexists(aside):
                aside += "_"
            os.rename(place, aside)
        if not os.path.lexists(place):
            os.mkdir(place)


def _watch(process: "subprocess.Popen[bytes]", until_s: float, most: int) -> tuple[bool, list[bytes]]:
    """Reads the outputs until the command ends or is late, then ends everything that it started.

    Returns whether it is late, and the outputs.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    sinks = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    end_fd = os.pidfd_open(process.pid)
    poll = select.poll()
    for fd in (end_fd, *sinks):
        poll.register(fd, select.POLLIN)
    is_running = True
    while is_running and (left_s := until_s - time.monotonic()) > 0:
        ready = {fd for fd, _ in poll.poll(left_s * 1000 + 1)}
        for fd in ready & sinks.keys():
            if not _take(fd, sinks[fd], most):
                poll.unregister(fd)
        is_running = end_fd not in ready
    # This is the first process of its namespace, so -1 means all other processes in it.
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    for fd, sink in sinks.items():
        while _take(fd, sink, most):
            pass
    os.close(end_fd)
    return is_running, [bytes(sink) for sink in sinks.values()]


def _take(fd: int, sink: bytearray, most: int) -> bool:
    """Reads what is available, and keeps what fits. Returns False at the end of the output."""
    chunk = os.read(fd, _CHUNK)
    sink += chunk[: most - len(sink)]
    return bool(chunk)


def _read(path: str, most: int) -> str | None:
    """Returns the beginning of a file; None if there is no regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        return _text(file.read(most)) if stat.S_ISREG(os.fstat(fd).st_mode) else None


if __name__ == "__main__":
    _main()
