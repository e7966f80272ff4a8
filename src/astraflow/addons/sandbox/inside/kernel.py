"""The system calls that make a box, under the kernel's names. The standard library doesn't have them.

Each function raises an OSError that says what could not be done.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

__all__ = [
    "CAP_SYS_ADMIN",
    "CLONE_NEWCGROUP",
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "MNT_DETACH",
    "MS_BIND",
    "MS_NODEV",
    "MS_NOEXEC",
    "MS_NOSUID",
    "MS_PRIVATE",
    "MS_RDONLY",
    "MS_REC",
    "MS_REMOUNT",
    "allow_looking_in",
    "bind_opened",
    "drop_bounding_rights",
    "enter_user_namespace",
    "forbid_new_rights",
    "give_up_rights",
    "keep_right",
    "keep_signals_in",
    "landlock",
    "landlock_version",
    "mount",
    "open_loopback",
    "pivot_root",
    "seccomp",
    "set_read_only",
    "setns",
    "umount",
    "unshare",
]

CAP_SYS_ADMIN = 21
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 1
_MOUNT_ATTR_NOSUID = 2
# The numbers of these calls are the same on all architectures, except `pivot_root`.
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT = 446
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_LANDLOCK_ASKS_VERSION = 1
_LANDLOCK_PATH_BENEATH = 1
_LANDLOCK_ALL_NETWORK = 3
"""The rights to bind (1) and to connect (2) TCP sockets. Landlock has them since version 4."""
_LANDLOCK_ALL_SCOPES = 3
"""The scopes of abstract Unix sockets (1) and of signals (2)."""
_LANDLOCK_WITH_SCOPES = 6
"""The version of Landlock in Linux 6.12."""
_NUM_CAPABILITIES = 64
"""At least as many as any kernel has, because its capability sets have 64 bits."""

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int, *, what: str = "new namespaces") -> None:
    """Moves this process into new namespaces. `what`: the name of these namespaces in an error."""
    _checked(_libc.unshare(flags), what)


def enter_user_namespace(others: int, *, user: int, group: int, what: str = "new namespaces") -> None:
    """Moves this process into a new user namespace, where it has this user and group, and into `others`."""
    numbers = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | others, what=what)
    for path, text in (
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", f"{user} {numbers[0]} 1"),
        ("/proc/self/gid_map", f"{group} {numbers[1]} 1"),
    ):
        # Written as bytes, because this user may not be able to read the module of a text encoding.
        with open(path, "wb") as file:
            file.write(text.encode())


def setns(fd: int, kind: int) -> None:
    """Moves this process, or its later children, into a namespace of the process that `fd` refers to."""
    _checked(_libc.setns(fd, kind), "entering a namespace")


def mount(source: str, target: str, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mounts a file system of type `kind`, or with `MS_BIND`, an existing path."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _checked(result, f"mounting {kind or source} on {target}")


def bind_opened(fd: int, place: str) -> None:
    """Mounts an open file or folder, with all mounts below it, at a place, then closes `fd`.

    The place is created if it doesn't exist. A read-only mount stays read-only at its new place.
    """
    source = f"/proc/self/fd/{fd}"
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    elif not os.path.exists(place):
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, place, flags=MS_BIND | MS_REC)
    os.close(fd)


def umount(target: str, flags: int = 0) -> None:
    """Removes the mount at a path."""
    _checked(_libc.umount2(os.fsencode(target), flags), f"unmounting {target}")


def set_read_only(path: str) -> None:
    """Makes a mount and all mounts below it read-only, and makes them ignore set-user-id bits."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, attributes, len(attributes)
    )
    _checked(result, f"making {path} read-only")


def open_loopback() -> None:
    """Brings up 127.0.0.1 in a new network namespace, which has no other address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def pivot_root(new: str, old: str) -> None:
    """Makes the mount at `new` the root, and mounts the old root at `old`."""
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _checked(_libc.syscall(number, os.fsencode(new), os.fsencode(old)), "changing the root")


def allow_looking_in(*, is_allowed: bool) -> None:
    """Sets whether processes of the same user can trace this process and read its memory.

    If they cannot, the files of this process in /proc belong to root.
    """
    _prctl(_PR_SET_DUMPABLE, int(is_allowed), what="saying who can look into this process")


def forbid_new_rights() -> None:
    """Prevents programs that this process starts from gaining rights by their files, such as set-user-id."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, what="forbidding new rights")


def keep_right(capability: int) -> None:
    """Makes the next program that this process executes keep this capability, and no other."""
    bit = 1 << capability
    _set_capabilities(effective=bit, permitted=bit, inheritable=bit)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, what="keeping a capability")


def drop_bounding_rights() -> None:
    """Prevents programs that this process starts from getting a capability back from their files."""
    for capability in range(_NUM_CAPABILITIES):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for those that the kernel doesn't have


def give_up_rights() -> None:
    """Gives up all capabilities permanently."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, what="giving up capabilities")
    _set_capabilities(effective=0, permitted=0, inheritable=0)
    forbid_new_rights()


def seccomp(instructions: bytes) -> None:
    """Installs a filter of system calls: classic BPF, 8 bytes per instruction."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    result = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0)
    _checked(result, "installing the filter of system calls")


def landlock_version() -> int:
    """Returns the version of Landlock in this kernel; 0 if the kernel has none."""
    return max(0, _libc.syscall(_SYS_LANDLOCK_CREATE, None, 0, _LANDLOCK_ASKS_VERSION))


def landlock(handled: int, allowed: dict[str, int], *, has_network: bool) -> None:
    """Permanently removes this process's rights to files that are in `handled` but not in `allowed`.

    `allowed`: rights by path; they hold for all files below the path. If the kernel supports it, the process
    can then send signals, and connect over abstract Unix sockets, only to itself and the processes that it
    starts. Without `has_network`, it can't use TCP either.
    """
    version = landlock_version()
    network = _LANDLOCK_ALL_NETWORK if version >= 4 and not has_network else 0
    scopes = _LANDLOCK_ALL_SCOPES if version >= _LANDLOCK_WITH_SCOPES else 0
    # Older kernels refuse fields that they don't know unless these are 0.
    attributes = struct.pack("=QQQ", handled, network, scopes)
    rules = _libc.syscall(_SYS_LANDLOCK_CREATE, attributes, len(attributes), 0)
    _checked(min(rules, 0), "making Landlock rules")
    for path, rights in allowed.items():
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights & handled, fd)
        result = _libc.syscall(_SYS_LANDLOCK_ADD_RULE, rules, _LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(fd)
        _checked(result, f"making a Landlock rule for {path}")
    _checked(_libc.syscall(_SYS_LANDLOCK_RESTRICT, rules, 0), "applying Landlock rules")
    os.close(rules)


def keep_signals_in() -> bool:
    """Lets this process, and everything that it starts, send signals only to what it started.

    Returns False if the kernel cannot do that.
    """
    if sys.platform != "linux" or landlock_version() < _LANDLOCK_WITH_SCOPES:
        return False
    try:
        forbid_new_rights()
        landlock(0, {}, has_network=True)
    except OSError:
        return False
    return True


def _set_capabilities(*, effective: int, permitted: int, inheritable: int) -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    low = (effective & 0xFFFFFFFF, permitted & 0xFFFFFFFF, inheritable & 0xFFFFFFFF)
    high = (effective >> 32, permitted >> 32, inheritable >> 32)
    _checked(_libc.capset(header, struct.pack("=6I", *low, *high)), "setting capabilities")


def _prctl(option: int, *values: int, what: str) -> None:
    arguments = (*values, 0, 0, 0, 0)[:4]
    _checked(_libc.prctl(option, *[ctypes.c_ulong(value) for value in arguments]), what)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
