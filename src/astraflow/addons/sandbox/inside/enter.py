"""Makes a box around this process and becomes its zygote. The service starts it with a `Plan` as JSON.

If this process is root, it first becomes a user that owns nothing and that nobody else uses. The kernel
limits root's processes less than those of other users, and a program that broke out of the box would be root.
The new user may not be allowed to reach the interpreter's files at their usual paths, so they are first
mounted where it can reach them.
"""

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from typing import NoReturn

from astraflow.addons.sandbox.inside import kernel, program
from astraflow.addons.sandbox.inside.memory import open_processes
from astraflow.service.process_ties import die_with_parent

__all__ = ["Plan", "boot_code", "main"]

_OUTER_IDS = (2_000_000_000, 65_534)
"""Users that root can become; the first possible one is used. No system assigns the first one to anybody. The
second one is `nobody`, for containers that have few user ids."""
_INNER_ID = 1000
"""User and group in the box. They have no meaning outside."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": program.FOLDER,
}
"""Links in a box for agent programs. Files in /dev/shm count toward the size limit of /tmp."""
_STAGE = "/tmp"
"""A folder that every system has. It can be covered here because nothing below it is opened afterwards."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The box that the service asks for."""

    bwrap: str
    """Path of bubblewrap. If empty, this process makes the box itself."""
    python: str
    """The interpreter of the box."""
    visible: list[list[str]]
    """Source and target of each visible file or folder. All of them are read-only."""
    covered: list[str]
    """Folders that are empty in the box."""
    preloaded: list[str]
    """Modules that the zygote imports before the first program."""
    paths: list[str]
    """Additional folders of the box from which programs can import."""
    control: int
    """The socket to the service."""
    gateway: int
    """The only port that is open in the box; 0 for none. A box with a port is for an agent program and has
    /proc."""
    channel: int
    """The socket over which the zygote sends that port's socket to the service."""
    folders: list[str]
    """Names of folders in the root that are links to folders of the same name in the program's own folder."""


def boot_code(folder: str, module: str, call: str) -> str:
    """Returns code for `python -c` that imports a module of this package from `folder` and calls `main`."""
    return f"import sys; sys.path.insert(0, {folder!r}); from {module} import main; main({call})"


def main() -> None:
    """Makes the box and becomes its zygote or, without bubblewrap, the keeper that waits for the zygote."""
    plan = Plan(**json.loads(sys.argv[1]))
    visible = [(source, target) for source, target in plan.visible]
    bwrap = plan.bwrap
    if os.geteuid() == 0:
        staged = _staged([*visible, (bwrap, "")] if bwrap else visible)
        bwrap = staged.pop()[0] if bwrap else ""
        visible = staged
        _become_nobody()
    die_with_parent()
    if bwrap:
        os.execv(bwrap, [bwrap, *_bwrap_options(plan, visible), "--", *_zygote(plan)])
    _enter_namespaces(plan, visible)


def _zygote(plan: Plan) -> list[str]:
    processes = -1 if plan.gateway else open_processes()
    code = boot_code(
        program.BOX_FOLDER,
        "astraflow.addons.sandbox.inside.zygote",
        f"{plan.control}, {plan.preloaded!r}, {plan.gateway}, {plan.channel}, {processes}",
    )
    code = f"import sys; sys.path += {plan.paths!r}; {code}" if plan.paths else code
    # Programs may print and read integers of any length, because their CPU time is limited anyway.
    options = ("-I", "-S", "-X", "utf8", "-X", "int_max_str_digits=0")
    return [plan.python, *options, "-c", code]


# --- as root --------------------------------------------------------------------------------------


def _staged(visible: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Mounts each source at a path that every user can reach. Only this process sees these mounts."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except PermissionError:
        return visible  # in a container without this right, root can do no more than other users
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    # Opened before the mount, which hides sources below `_STAGE`.
    opened = [(os.open(source, os.O_PATH), target) for source, target in visible]
    kernel.mount("tmpfs", _STAGE, kind="tmpfs", flags=kernel.MS_NOSUID, options="mode=755")
    staged: list[tuple[str, str]] = []
    for number, (fd, target) in enumerate(opened):
        place = f"{_STAGE}/{number}"
        kernel.bind_opened(fd, place)
        staged.append((place, target))
    return staged


def _become_nobody() -> None:
    for number in _OUTER_IDS:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
            kernel.allow_looking_in(is_allowed=True)  # the change made /proc/self unreadable
            return


# --- bubblewrap -----------------------------------------------------------------------------------


def _bwrap_options(plan: Plan, visible: list[tuple[str, str]]) -> list[str]:
    options = [
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--clearenv",
        *("--uid", str(_INNER_ID)),
        *("--gid", str(_INNER_ID)),
        *("--hostname", "box"),
        # The zygote needs this to give each program its own namespaces. The program has no capability.
        *("--cap-add", "CAP_SYS_ADMIN"),
    ]
    for source, target in visible:
        options += ["--ro-bind", source, target]
    for device in _DEVICES:
        options += ["--dev-bind", device, device]
    if plan.gateway:
        options += ["--proc", "/proc"]
        for place, target in _LINKS.items():
            options += ["--symlink", target, place]
    for name in plan.folders:
        options += ["--symlink", f"{program.FOLDER}/{name}", f"/{name}"]
    for folder in plan.covered:
        options += ["--tmpfs", folder, "--remount-ro", folder]
    return [*options, "--dir", program.FOLDER, "--remount-ro", "/", "--chdir", "/"]


# --- by this process itself -----------------------------------------------------------------------


def _enter_namespaces(plan: Plan, visible: list[tuple[str, str]]) -> NoReturn:
    """Makes the same box as bubblewrap, but by system calls. This process stays as its keeper."""
    kernel.enter_user_namespace(
        kernel.CLONE_NEWNS
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWCGROUP,
        user=_INNER_ID,
        group=_INNER_ID,
    )
    if plan.gateway:
        kernel.open_loopback()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        os.setsid()
        argv = _zygote(plan)  # it opens /proc, so it comes before the root changes
        _change_root(plan, visible)
        kernel.keep_right(kernel.CAP_SYS_ADMIN)
        kernel.forbid_new_rights()
        os.execve(argv[0], argv, {})
    os.close(plan.control)
    os.close(plan.channel)
    _, status = os.waitpid(pid, 0)
    os._exit(abs(os.waitstatus_to_exitcode(status)))


def _change_root(plan: Plan, visible: list[tuple[str, str]]) -> None:
    """Makes a root folder that holds only the visible files and folders."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    visible = [*visible, *((device, device) for device in _DEVICES)]
    # Opened before the mount, which hides sources below `_STAGE`.
    opened = [(os.open(source, os.O_PATH), target) for source, target in visible]
    kernel.mount("tmpfs", _STAGE, kind="tmpfs", flags=kernel.MS_NOSUID, options="mode=755")
    for fd, target in opened:
        kernel.bind_opened(fd, _STAGE + target)
        kernel.set_read_only(_STAGE + target)
    for folder in plan.covered:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_RDONLY
        kernel.mount("tmpfs", _STAGE + folder, kind="tmpfs", flags=flags)
    if plan.gateway:
        _add_processes()
    for name in plan.folders:
        os.symlink(f"{program.FOLDER}/{name}", f"{_STAGE}/{name}")
    os.makedirs(_STAGE + program.FOLDER, exist_ok=True)
    os.chdir(_STAGE)
    kernel.pivot_root(".", ".")  # the old root is now mounted over the new one
    kernel.umount(".", kernel.MNT_DETACH)
    os.chdir("/")
    kernel.mount("none", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)


def _add_processes() -> None:
    """Adds a /proc with the box's own processes. The kernel allows it only while the old /proc is mounted."""
    os.mkdir(f"{_STAGE}/proc")
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", f"{_STAGE}/proc", kind="proc", flags=flags)
    for place, target in _LINKS.items():
        os.symlink(target, _STAGE + place)
