"""The keeper of an agent program or a host: it starts the program and kills what the program leaves behind.

The rollout service starts it in an interpreter without installed packages, so it uses only the standard
library and the modules of this package:

    python -I -S -c "...; main()" SPECIFICATION CONTROL_FD STATUS_FD

An agent program runs in a box, which consists of its own user and mount namespaces. In it, the program has
no capabilities, the folders that the specification names are empty or read-only, and the program cannot look
into any process outside. From Linux 6.12 on, it cannot send signals to such a process either. The box shares
process ids and the network with the machine. A program that must not see anything of the machine runs in the
sandbox instead (`sandboxed_program.py`).

When the program ends, or when the other end of CONTROL_FD closes, everything that the program started is
killed. This includes orphans in other sessions, because orphans become children of this process. The keeper
then writes one JSON object to STATUS_FD. `code` is the exit code. `box` says why there was no box, `start`
says why the program could not be started; both are absent if all went well.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time

from astraflow.addons.sandbox.inside import kernel

__all__ = ["LIMIT_S", "main"]

LIMIT_S = 10.0
"""A process that still runs this long after SIGKILL hangs in the kernel, so the keeper stops waiting."""

_PAUSE_S = 0.005
"""Pause between two searches for remaining processes."""

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "dri", "kfd")
"""Devices other than NVIDIA's GPUs that root's programs see in /dev. Disks and memory are not among them."""


class _Specification:
    """The rollout service's request, decoded from SPECIFICATION."""

    def __init__(
        self,
        *,
        argv: list[str],
        is_boxed: bool,
        hidden: list[str],
        own: list[str],
        read_only: list[str],
    ) -> None:
        """`hidden`: paths that are empty in the box. `own`: folders below them that the program may see."""
        self.argv = argv
        self.is_boxed = is_boxed
        self.hidden = hidden
        self.own = own
        self.read_only = read_only


def main() -> None:
    """Runs the program until it ends or the service closes CONTROL_FD, then reports how it ended."""
    spec = _Specification(**json.loads(sys.argv[1]))
    control = int(sys.argv[2])
    status = int(sys.argv[3])
    os.set_inheritable(control, False)
    os.set_inheritable(status, False)
    if sys.platform == "linux":
        # Orphans of the program become children of this process, which can then find and kill them.
        kernel.adopt_orphans()
    is_walled = kernel.keep_signals_in()
    problem_read, problem_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(problem_read)
        _become(spec, problem_write)
    os.close(problem_write)
    # Ends without a problem once the program has started, because `exec` closes the pipe's other end.
    problem = _read_all(problem_read)
    threading.Thread(target=_kill_when_let_go, args=(control, pid, is_walled), daemon=True).start()
    code = _wait_for(pid)
    _kill_all(pid, is_walled=is_walled)
    os.write(status, json.dumps({"code": code, **(json.loads(problem) if problem else {})}).encode())
    os._exit(0)


def _wait_for(pid: int) -> int:
    """Waits for the program and reaps orphans. Returns the exit code, or minus the signal that ended it."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _kill_when_let_go(control: int, pid: int, is_walled: bool) -> None:
    """Kills everything once the service closes its end of CONTROL_FD or dies, which closes it too."""
    _read_all(control)
    _kill_all(pid, is_walled=is_walled)


def _kill_all(pid: int, *, is_walled: bool) -> None:
    """Kills everything that the program started. Returns when all of it is gone, or after `LIMIT_S`."""
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if is_walled:
            # -1 means everything that this process may signal, which here is only what it started. The kernel
            # sends all of these signals at once, so not even a chain of forks escapes.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)
        left = _descendants()
        for found in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(found, signal.SIGKILL)
        if threading.current_thread() is threading.main_thread():
            # In the other thread, reaping would take the program's exit status away from `_wait_for`.
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
    found = set[int]()
    news = {os.getpid()}
    while news:
        news = {pid for pid, parent in parents.items() if parent in news} - found
        found |= news
    return list(found)


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


# --- in the child process, before it becomes the program --------------------------------------------


def _become(spec: _Specification, problem_write: int) -> None:
    """Enters the box and becomes the program. A problem is written to the pipe and ends the process."""
    kind = "box"
    try:
        os.setsid()
        if sys.platform == "linux":
            kernel.die_with_parent()
        if spec.is_boxed:
            _enter_box(spec)
        kernel.keep_signals_in()
        kind = "start"
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, which the program would inherit
        os.execvp(spec.argv[0], spec.argv)
    except Exception as err:  # noqa: BLE001 - reported to the service; this process must end here
        reason = str(err)
        if isinstance(err, OSError) and (kind == "start" or err.filename is None):
            reason = err.strerror  # without the error number; the service names the file of a failed start
        os.write(problem_write, json.dumps({kind: reason or type(err).__name__}).encode())
        os._exit(127)


def _enter_box(spec: _Specification) -> None:
    """Puts this process into the box.

    Raises: OSError that names what this machine does not allow.
    """
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no namespaces")
    _enter_namespaces()
    # Opened now, because a file opened before would belong to the mounts outside, and one opened later would
    # be hidden.
    own = [os.open(path, os.O_PATH) for path in spec.own]
    if os.geteuid() == 0:
        _mount_devices()
    elif os.path.isdir("/dev/shm"):
        _mount_empty("/dev/shm", "mode=1777")
    _hide(spec.hidden)
    for fd, path in zip(own, spec.own, strict=True):
        os.makedirs(path, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{fd}", path, flags=kernel.MS_BIND)
        os.close(fd)
    for path in ("/proc/sys", "/sys", *spec.read_only):
        if os.path.isdir(path):
            kernel.mount(path, path, flags=kernel.MS_BIND | kernel.MS_REC)
            kernel.set_read_only(path)
    os.chdir(os.getcwd())  # the mounts above may cover the current folder
    kernel.drop_bounding_rights()
    kernel.give_up_rights()


def _enter_namespaces() -> None:
    """Enters new user and mount namespaces."""
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # root in a namespace may not be allowed to drop groups
            os.setgroups([])
    kernel.enter_user_namespace(
        kernel.CLONE_NEWNS, user=os.geteuid(), group=os.getegid(), what="user and mount namespaces"
    )
    # Forbid further namespaces: in a new one, the program would regain capabilities.
    with open("/proc/sys/user/max_user_namespaces", "wb") as file:
        file.write(b"0")
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)


def _mount_devices() -> None:
    """Mounts a /dev that holds only `_DEVICES` and GPUs.

    In the box, root can still open files that belong to root, and a disk's device is such a file.
    """
    names = [name for name in os.listdir("/dev") if name in _DEVICES or name.startswith("nvidia")]
    kept = {name: os.open(f"/dev/{name}", os.O_PATH) for name in names}
    kernel.mount("tmpfs", "/dev", kind="tmpfs", flags=kernel.MS_NOSUID, options="mode=755")
    for name, fd in kept.items():
        kernel.bind_opened(fd, f"/dev/{name}")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.mkdir("/dev/shm")
    _mount_empty("/dev/shm", "mode=1777")


def _hide(paths: list[str]) -> None:
    for path in paths:
        if os.path.isdir(path):
            _mount_empty(path, "mode=700")
        elif os.path.exists(path):
            kernel.mount("/dev/null", path, flags=kernel.MS_BIND)


def _mount_empty(path: str, options: str) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", path, kind="tmpfs", flags=flags, options=options)
