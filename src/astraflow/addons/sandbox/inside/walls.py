"""The restrictions of a process in a box, in addition to the mounts: resource limits and Landlock rules."""

import resource
from collections.abc import Mapping

from astraflow.addons.sandbox.inside import kernel

__all__ = ["limit", "restrict_files"]

_ALWAYS = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0}

# Landlock's rights to files.
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_MAKE_DEVICES_OR_SOCKETS = 1 << 6 | 1 << 9 | 1 << 11
_IOCTL_DEVICE = 1 << 15
_ALL_RIGHTS = ((5, 16), (3, 15), (2, 14), (1, 13))
"""Pairs of a version of Landlock and the number of rights known from that version on."""


def limit(values: Mapping[int, int]) -> None:
    """Permanently sets resource limits of this process. `values`: `resource.RLIMIT_...` -> largest value.

    A limit that is already lower stays, because only root may raise it.
    """
    for kind, value in {**values, **_ALWAYS}.items():
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def restrict_files(folder: str, *, reads_programs: bool, runs_own_files: bool, has_network: bool) -> None:
    """Repeats the restrictions of the mounts with Landlock, if the kernel has it, in case a mount is wrong.

    `folder`: the only folder in which this process and the processes that it starts can write.
    `reads_programs`: whether they can start programs outside this folder. `runs_own_files`: whether they can
    start programs inside it. `has_network`: whether they can use TCP.
    """
    version = kernel.landlock_version()
    if version == 0:
        return
    num_rights = next(num for since, num in _ALL_RIGHTS if version >= since)
    known = (1 << num_rights) - 1
    read = _READ_FILE | _READ_FOLDER | (_EXECUTE if reads_programs else 0)
    own = known & ~(_MAKE_DEVICES_OR_SOCKETS | _IOCTL_DEVICE | (0 if runs_own_files else _EXECUTE))
    allowed = {"/": read, "/dev/null": _READ_FILE | _WRITE_FILE, folder: own}
    kernel.landlock(known, allowed, has_network=has_network)
