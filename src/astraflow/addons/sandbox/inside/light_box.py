"""A light box around an agent program: its own user and mount namespaces.

In the box, the program has no capabilities, some folders are empty or read-only, and the program cannot look
into any process outside. From Linux 6.12 on, it cannot send signals to such a process either. The box shares
process ids and the network with the machine. A program that must not see anything of the machine runs in the
sandbox instead (`sandboxed_program.py`).

The keeper of the program (`service.keeper`) calls these functions.
"""

import contextlib
import os
import sys

from astraflow.addons.sandbox.inside import kernel
from astraflow.addons.sandbox.inside.kernel import keep_signals_in

__all__ = ["enter", "keep_signals_in"]

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "dri", "kfd")
"""Devices other than NVIDIA's GPUs that root's programs see in /dev. Disks and memory are not among them."""


def enter(*, hidden: list[str], own: list[str], read_only: list[str]) -> None:
    """Puts this process into the box.

    `hidden`: paths that are empty in the box. `own`: folders below them that the program may see.
    Raises: OSError that names what this machine does not allow.
    """
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no namespaces")
    _enter_namespaces()
    # Opened now, because a file opened before would belong to the mounts outside, and one opened later would
    # be hidden.
    opened = [os.open(path, os.O_PATH) for path in own]
    if os.geteuid() == 0:
        _mount_devices()
    elif os.path.isdir("/dev/shm"):
        _mount_empty("/dev/shm", "mode=1777")
    for path in hidden:
        if os.path.isdir(path):
            _mount_empty(path, "mode=700")
        elif os.path.exists(path):
            kernel.mount("/dev/null", path, flags=kernel.MS_BIND)
    for fd, path in zip(opened, own, strict=True):
        os.makedirs(path, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{fd}", path, flags=kernel.MS_BIND)
        os.close(fd)
    for path in ("/proc/sys", "/sys", *read_only):
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
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in names}
    kernel.mount("tmpfs", "/dev", kind="tmpfs", flags=kernel.MS_NOSUID, options="mode=755")
    for name, fd in devices.items():
        kernel.bind_opened(fd, f"/dev/{name}")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.mkdir("/dev/shm")
    _mount_empty("/dev/shm", "mode=1777")


def _mount_empty(path: str, options: str) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", path, kind="tmpfs", flags=flags, options=options)
