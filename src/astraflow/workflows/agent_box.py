"""Keeps one agent program: run by the rollout service's process, as a script, standard library only.

    python -I -S agent_box.py SPECIFICATION CONTROL_FD STATUS_FD

The program runs in a box: user and mount namespaces of its own, in which it has no capability, the folders of
the specification are empty or read-only, and no process outside may be looked into; from Linux 6.12 on, none
may be sent a signal either. Process ids and the network stay those of the machine. When the program ends, or
the other end of CONTROL_FD closes, everything that the program started is killed: orphans are children of
this process, whatever session they are in. Then one JSON `Status` goes to STATUS_FD.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time

__all__ = ["LIMIT_S"]

LIMIT_S = 10.0
"""What has not ended this long after SIGKILL hangs in the kernel."""

_PAUSE_S = 0.005

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS = 0x20000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE = 444
_SYS_LANDLOCK_RESTRICT = 446
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 1
_LANDLOCK_ABI_WITH_SCOPES = 6
_LANDLOCK_SCOPES = 3
_NUM_CAPABILITIES = 64
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "dri", "kfd")
"""What a program of root's sees in /dev, besides NVIDIA's GPUs: no disks and no memory."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Specification:
    """What the rollout service asks for."""

    def __init__(
        self, *, argv: list[str], is_boxed: bool, hidden: list[str], own: list[str], read_only: list[str]
    ) -> None:
        """`hidden`: paths that are empty in the box; `own`: folders below them that are there nonetheless."""
        self.argv = argv
        self.is_boxed = is_boxed
        self.hidden = hidden
        self.own = own
        self.read_only = read_only


def _main() -> None:
    """Runs the program until it ends or the service lets go, and tells how it went."""
    spec = _Specification(**json.loads(sys.argv[1]))
    control = int(sys.argv[2])
    status = int(sys.argv[3])
    os.set_inheritable(control, False)
    os.set_inheritable(status, False)
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    is_walled = _keep_signals_in()
    told, teller = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _become(spec, teller)
    os.close(teller)
    problem = _read_all(told)
    threading.Thread(target=_kill_when_let_go, args=(control, pid, is_walled), daemon=True).start()
    code = _wait_for(pid)
    _kill_all(pid, is_walled=is_walled)
    os.write(status, json.dumps({"code": code, **(json.loads(problem) if problem else {})}).encode())
    os._exit(0)


def _wait_for(pid: int) -> int:
    """Waits for the program, and reaps orphans. Returns its exit code, or minus its signal."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _kill_when_let_go(control: int, pid: int, is_walled: bool) -> None:
    _read_all(control)
    _kill_all(pid, is_walled=is_walled)


def _kill_all(pid: int, *, is_walled: bool) -> None:
    """Kills everything that the program started; returns when it is gone."""
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if is_walled:
            # Everything that this process may signal, which is what it started: not even a chain of forks
            # escapes, since the kernel sends all of these signals at once.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)
        left = _descendants()
        for found in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(found, signal.SIGKILL)
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
        if not left:
            return
        time.sleep(_PAUSE_S)


def _descendants() -> list[int]:
    """Processes below this one, zombies aside. Empty where there is no /proc."""
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
    """The parent of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state in (b"Z", b"X") else int(parent)


def _read_all(fd: int) -> bytes:
    parts: list[bytes] = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts)


# --- in the program's process, before it is one ---------------------------------------------------


def _become(spec: _Specification, teller: int) -> None:
    """Enters the box and becomes the program. What goes wrong is told, and ends the process."""
    kind = "box"
    try:
        os.setsid()
        if sys.platform == "linux":
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if spec.is_boxed:
            _enter_box(spec)
        _keep_signals_in()
        kind = "start"
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(spec.argv[0], spec.argv)
    except Exception as err:  # noqa: BLE001 - told to the service; this process must end here
        reason = err.strerror if isinstance(err, OSError) and kind == "start" else str(err)
        os.write(teller, json.dumps({kind: reason or type(err).__name__}).encode())
        os._exit(127)


def _enter_box(spec: _Specification) -> None:
    """Raises: OSError naming what this machine does not allow."""
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no namespaces")
    _enter_namespaces()
    own = [os.open(path, os.O_PATH) for path in spec.own]  # what is opened before belongs to other mounts
    if os.geteuid() == 0:
        _mount_devices()
    elif os.path.isdir("/dev/shm"):
        _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    _hide(spec.hidden)
    for fd, path in zip(own, spec.own, strict=True):
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", path, "", _MS_BIND)
        os.close(fd)
    for path in ("/proc/sys", "/sys", *spec.read_only):
        if os.path.isdir(path):
            _mount(path, path, "", _MS_BIND | _MS_REC)
            _set_read_only(path)
    os.chdir(os.getcwd())  # the mounts above may lie over the folder that it was in
    _give_up_rights()


def _enter_namespaces() -> None:
    uid = os.geteuid()
    gid = os.getegid()
    if uid == 0:
        with contextlib.suppress(PermissionError):  # root of another namespace has no groups to give up
            os.setgroups([])
    _checked(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "user and mount namespaces")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _write("/proc/sys/user/max_user_namespaces", "0")  # none within, where it would have rights again
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)


def _mount_devices() -> None:
    """A /dev of its own. Files of root's stay root's in the box, and a disk is such a file."""
    names = [name for name in os.listdir("/dev") if name in _DEVICES or name.startswith("nvidia")]
    kept = {name: os.open(f"/dev/{name}", os.O_PATH) for name in names}
    _mount("tmpfs", "/dev", "tmpfs", _MS_NOSUID, "mode=755")
    for name, fd in kept.items():
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.mkdir(f"/dev/{name}")
        else:
            os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{fd}", f"/dev/{name}", "", _MS_BIND | _MS_REC)
        os.close(fd)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.mkdir("/dev/shm")
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")


def _hide(paths: list[str]) -> None:
    for path in paths:
        if os.path.isdir(path):
            _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=700")
        elif os.path.exists(path):
            _mount("/dev/null", path, "", _MS_BIND)


def _give_up_rights() -> None:
    """No capability, and none to be had by another program."""
    for capability in range(_NUM_CAPABILITIES):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "giving up capabilities")
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _keep_signals_in() -> bool:
    """From now on this process, and what it starts, may send signals to nothing that it did not start.

    Returns: False where the kernel cannot do that.
    """
    if sys.platform != "linux":
        return False
    if _libc.syscall(_SYS_LANDLOCK_CREATE, None, 0, 1) < _LANDLOCK_ABI_WITH_SCOPES:
        return False
    rights = (ctypes.c_uint64 * 3)(0, 0, _LANDLOCK_SCOPES)
    rules = _libc.syscall(_SYS_LANDLOCK_CREATE, rights, ctypes.sizeof(rights), 0)
    if rules < 0:
        return False
    is_ready = _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    is_kept = is_ready and _libc.syscall(_SYS_LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return is_kept


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), options.encode()
    )
    _checked(result, f"mounting {kind or source} on {target}")


def _set_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes)
    )
    _checked(result, f"making {path} read-only")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    _main()
