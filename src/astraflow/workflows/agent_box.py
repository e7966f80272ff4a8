"""The keeper of one agent program: it starts the program in a box and kills what the program leaves behind.

The rollout service runs this file as a script, so it uses only the standard library:

    python -I -S agent_box.py SPECIFICATION CONTROL_FD STATUS_FD

The box consists of user and mount namespaces of its own. In it, the program has no capability, the folders
that the specification names are empty or read-only, and the program cannot look into any process outside.
From Linux 6.12 on, it cannot send a signal to one either. Process ids stay the machine's, and so does the
network, unless the specification names the gateway's port. Then the program has a network of its own, in
which only that port of loopback is open, and this process passes on what is sent to it:

    program --(its loopback)--> keeper --(the machine's loopback)--> gateway

When the program ends, or when the other end of CONTROL_FD closes, everything that the program started is
killed. This includes orphans in other sessions, because orphans become children of this process. The keeper
then writes one JSON object to STATUS_FD. `code` is the exit code. `box` says why there was no box, `start`
says why the program could not be started; both are absent if all went well.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import threading
import time

__all__ = ["LIMIT_S"]

LIMIT_S = 10.0
"""A process that still runs this long after SIGKILL hangs in the kernel, and is no longer waited for."""

_PAUSE_S = 0.005
"""Pause between two searches for processes that are left."""

# The kernel's constants under the kernel's names; Python 3.11's standard library does not have them.
_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS = 0x20000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
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
"""The version of Landlock in Linux 6.12."""
_LANDLOCK_SCOPES = 3
"""Abstract Unix sockets (1) and signals (2)."""
_NUM_CAPABILITIES = 64
"""More than any kernel has: capability sets have 64 bits."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "dri", "kfd")
"""Devices that root's programs see in /dev, besides NVIDIA's GPUs. Disks and memory are not among them."""

_MAX_CONNECTIONS = 128
"""Connections to the gateway at the same time; further ones wait."""
_CHUNK = 65_536
_LOOPBACK = "127.0.0.1"

_libc = ctypes.CDLL(None, use_errno=True)


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
        gateway: int = 0,
    ) -> None:
        """`hidden`: paths that are empty in the box. `own`: folders below them that the program may see.
        `gateway`: the only port that the program can reach; 0: it has the machine's network."""
        self.argv = argv
        self.is_boxed = is_boxed
        self.hidden = hidden
        self.own = own
        self.read_only = read_only
        self.gateway = gateway


def _main() -> None:
    """Runs the program until it ends or the service closes CONTROL_FD, then reports how it ended."""
    spec = _Specification(**json.loads(sys.argv[1]))
    control = int(sys.argv[2])
    status = int(sys.argv[3])
    os.set_inheritable(control, False)
    os.set_inheritable(status, False)
    if sys.platform == "linux":
        # Orphans of the program become children of this process, which can then find and kill them.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    is_walled = _keep_signals_in()
    problem_read, problem_write = os.pipe()
    from_box, to_keeper = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.close(problem_read)
        _become(spec, problem_write, to_keeper)
    os.close(problem_write)
    to_keeper.close()
    # Ends without a problem once the program has started, because `exec` closes the pipe's other end.
    problem = _read_all(problem_read)
    threading.Thread(target=_serve_gateway, args=(from_box, spec.gateway), daemon=True).start()
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
    """Kills everything once the service closes its end of CONTROL_FD, as its death also does."""
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
    """All processes below this one, except zombies. Returns an empty list where there is no /proc."""
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
    """The parent of a process; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name comes first, in parentheses, and may itself contain parentheses and blanks.
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state in (b"Z", b"X") else int(parent)


def _read_all(fd: int) -> bytes:
    parts: list[bytes] = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts)


# --- the way to the gateway -------------------------------------------------------------------------


def _serve_gateway(from_box: socket.socket, port: int) -> None:
    """Passes on what the program sends to the listening socket that came out of the box, if one did."""
    _, fds, _, _ = socket.recv_fds(from_box, 1, 1)
    if not fds:
        return  # the program has the machine's network, or there is no box
    free = threading.Semaphore(_MAX_CONNECTIONS)
    with socket.socket(fileno=fds[0]) as listener:
        while True:
            free.acquire()
            connection, _ = listener.accept()
            threading.Thread(target=_pass_on, args=(connection, port, free), daemon=True).start()


def _pass_on(inside: socket.socket, port: int, free: threading.Semaphore) -> None:
    """Joins a connection of the program with one to the gateway until both are over."""
    with contextlib.suppress(OSError), inside, socket.create_connection((_LOOPBACK, port)) as outside:
        back = threading.Thread(target=_copy, args=(outside, inside), daemon=True)
        back.start()
        _copy(inside, outside)
        back.join()
    free.release()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copies until the source ends or the sink is gone. Then neither is used in this direction any more."""
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            sink.sendall(chunk)
    for connection, direction in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            connection.shutdown(direction)


# --- in the child process, before it becomes the program --------------------------------------------


def _become(spec: _Specification, problem_write: int, to_keeper: socket.socket) -> None:
    """Enters the box and becomes the program. A problem is written to the pipe and ends the process."""
    kind = "box"
    try:
        os.setsid()
        if sys.platform == "linux":
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if spec.is_boxed:
            _enter_box(spec, to_keeper)
        _keep_signals_in()
        kind = "start"
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, which the program would inherit
        os.execvp(spec.argv[0], spec.argv)
    except Exception as err:  # noqa: BLE001 - reported to the service; this process must end here
        reason = err.strerror if isinstance(err, OSError) and kind == "start" else str(err)
        os.write(problem_write, json.dumps({kind: reason or type(err).__name__}).encode())
        os._exit(127)


def _enter_box(spec: _Specification, to_keeper: socket.socket) -> None:
    """Puts this process into the box.

    Raises: OSError that names what this machine does not allow.
    """
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no namespaces")
    _enter_namespaces(_CLONE_NEWNET if spec.gateway else 0)
    if spec.gateway:
        _open_gateway(spec.gateway, to_keeper)
    # Opened now, because a file opened before would belong to the mounts outside, and one opened later would
    # be hidden.
    own = [os.open(path, os.O_PATH) for path in spec.own]
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
    os.chdir(os.getcwd())  # the mounts above may cover the current folder
    _give_up_rights()


def _enter_namespaces(others: int) -> None:
    """Enters new user and mount namespaces, and `others`."""
    uid = os.geteuid()
    gid = os.getegid()
    if uid == 0:
        with contextlib.suppress(PermissionError):  # root in a namespace may not be allowed to drop groups
            os.setgroups([])
    kinds = "user, mount and network namespaces" if others else "user and mount namespaces"
    _checked(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS | others), kinds)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _write("/proc/sys/user/max_user_namespaces", "0")  # in a further namespace it would have rights again
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)


def _open_gateway(port: int, to_keeper: socket.socket) -> None:
    """Opens the only port of the new network, and hands its socket to the keeper, which stays outside."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    with socket.create_server((_LOOPBACK, port), backlog=_MAX_CONNECTIONS) as listener:
        socket.send_fds(to_keeper, [b"."], [listener.fileno()])


def _mount_devices() -> None:
    """Mounts a /dev that holds only `_DEVICES` and GPUs.

    In the box, root can still open files that belong to root, and a disk's device is such a file.
    """
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
    """Gives up all capabilities, so that no program that is started here can get one back."""
    for capability in range(_NUM_CAPABILITIES):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the call, for this process
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "giving up capabilities")
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _keep_signals_in() -> bool:
    """From now on, this process and everything that it starts can send signals only to what it started.

    Returns False where the kernel cannot do that.
    """
    if sys.platform != "linux":
        return False
    # With these arguments, the call only returns the kernel's version of Landlock.
    if _libc.syscall(_SYS_LANDLOCK_CREATE, None, 0, 1) < _LANDLOCK_ABI_WITH_SCOPES:
        return False
    rights = (ctypes.c_uint64 * 3)(0, 0, _LANDLOCK_SCOPES)  # files, network, scopes
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
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)  # set, clear, propagation, namespace
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
