"""Starts the rollout services of a run on hosts that ssh reaches, and its other processes on this machine.

    start -> reserves room on a host -> ssh starts `host_main` there -> it starts the process -> a handle
             follows it

Each process has its own ssh connection. When the connection ends, the process ends, and the other way around.
ssh takes care of keys, addresses and encryption. There is no scheduler, so the launcher keeps track of what
each host has left. Only movable processes (`room.is_movable`) run on hosts. Their files come from the
launcher, and everything else over HTTP.
"""

import asyncio
import ipaddress
import logging
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import astraflow
from astraflow.addons.cluster.config import SshLauncherConfig
from astraflow.addons.cluster.host_frames import Hello
from astraflow.addons.cluster.host_link import HostLink, LinkLostError
from astraflow.addons.cluster.piped_process import PipedProcesses, receive_hello
from astraflow.addons.cluster.room import Room, contents_of, is_movable, log_long_wait, missing_room
from astraflow.errors import ConfigError
from astraflow.processes.fork_server import claim_server
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import Needs, ProcessHandle, ProcessSpec
from astraflow.service.loopback import is_loopback

__all__ = ["HostBook", "HostEntry", "SshLauncher", "remedy_for", "ssh_command"]

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 3.0
"""Time between two attempts to start a process."""
_MIN_DISK_BYTES = 100e6
"""Free space that a host needs for temporary files."""
_MAX_SKEW_S = 60.0
"""Difference of the clocks above which a warning is logged. It only matters to people who compare logs."""
_NO_PROGRAM = (126, 127)
"""Exit codes of a shell that can't run a program, or doesn't find it."""
_SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ClearAllForwardings=yes")


class HostEntry:
    """The room that one host has left, and the number of failed attempts in a row to reach it."""

    def __init__(self, name: str, room: Room) -> None:
        self.name = name
        self.whole = room
        self.left = room
        self.num_failures = 0
        self._free_gpus = list(range(int(room.gpus)))

    def take(self, needs: Needs) -> tuple[int, ...]:
        """Reserves room for a process. Returns: the numbers of its GPUs."""
        self._change(needs, -1)
        count = int(-(-needs.gpus // 1))
        taken = tuple(self._free_gpus[:count])
        del self._free_gpus[:count]
        return taken

    def give_back(self, needs: Needs, gpus: Sequence[int]) -> None:
        """Ends a reservation."""
        self._change(needs, 1)
        self._free_gpus = sorted([*self._free_gpus, *gpus])

    def _change(self, needs: Needs, sign: int) -> None:
        self.left = Room(
            self.left.cpus + sign * needs.cpus,
            self.left.gpus + sign * -(-needs.gpus // 1),
            self.left.memory_bytes + sign * needs.memory_bytes,
        )


class HostBook:
    """Chooses the host of the next process: the one with the fewest failures, then the most CPUs left.

    Example: `host, gpus = await book.take(needs)`; later `book.give_back(host, needs, gpus)`.
    """

    def __init__(self, entries: Sequence[HostEntry]) -> None:
        self._entries = tuple(entries)
        self._changed = asyncio.Event()

    @property
    def rooms(self) -> list[Room]:
        """The room of each host when nothing runs on it."""
        return [entry.whole for entry in self._entries]

    async def take(self, needs: Needs) -> tuple[HostEntry, tuple[int, ...]]:
        """Waits for a host with room, and reserves it. Returns: the host, and the numbers of the GPUs."""
        while not (fitting := [entry for entry in self._entries if entry.left.holds(needs)]):
            self._changed.clear()
            await self._changed.wait()
        host = min(fitting, key=lambda entry: (entry.num_failures, -entry.left.cpus))
        return host, host.take(needs)

    def give_back(self, host: HostEntry, needs: Needs, gpus: Sequence[int]) -> None:
        """Ends the reservation of a process that has ended or was never started."""
        host.give_back(needs, gpus)
        self._changed.set()


class SshLauncher:
    """Implements `Launcher` and `MultiMachineLauncher`. The constructor asks all hosts what they have, and
    blocks.

    Example: `SshLauncher(SshLauncherConfig(hosts=("gpu-1", "gpu-2")))`.
    """

    def __init__(self, config: SshLauncherConfig) -> None:
        """Raises: ConfigError that lists all unusable hosts, with the remedies."""
        if len(set(config.hosts)) < len(config.hosts):
            raise ConfigError(
                "launcher.hosts names a host twice; one entry holds as many services as it has room for"
            )
        self._config = config
        # In another thread, because this thread may have a running event loop, which allows no second one.
        with ThreadPoolExecutor(1) as pool:
            hellos = pool.submit(asyncio.run, _ask_all(config)).result()
        self._host = _own_address(config, hellos)
        rooms = {name: Room(hello.cpus, hello.gpus, hello.memory_bytes) for name, hello in hellos.items()}
        self._book = HostBook([HostEntry(name, room) for name, room in rooms.items()])
        self._local = LocalLauncher(claim_server())
        self._processes = PipedProcesses()

    @property
    def host(self) -> str:
        """The address at which the hosts call this machine."""
        return self._host

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process, as soon as a host has room for it.

        Raises: ConfigError if the process is too large for every host, or if no attempt can succeed.
        """
        if not is_movable(spec):
            return await self._local.start(spec)
        if spec.needs.labels:
            raise ConfigError(
                "cluster.rollout.labels: the hosts of the launcher ssh have no labels; leave them out, and "
                "those of cluster.pool.kinds"
            )
        missing = missing_room(
            spec.needs, self._book.rooms, cluster="launcher.hosts", remedy="add a host to launcher.hosts"
        )
        if missing:
            raise ConfigError(f"{spec.name}: {missing}")
        files = await asyncio.to_thread(contents_of, spec)
        with log_long_wait(spec):
            while True:
                host, gpus = await self._book.take(spec.needs)
                try:
                    return await self._start_on(host, gpus, spec, files)
                except LinkLostError as err:
                    host.num_failures += 1
                    _log.warning("%s cannot start on %s: %s", spec.name, host.name, err)
                await asyncio.sleep(_ASK_AGAIN_S)

    def close(self) -> None:
        """Closes all links. The hosts then end their processes."""
        self._processes.close()
        self._local.close()

    async def _start_on(
        self, host: HostEntry, gpus: Sequence[int], spec: ProcessSpec, files: Mapping[Path, bytes]
    ) -> ProcessHandle:
        """Starts a process on a host. If that fails, nothing of it is left there. Raises: LinkLostError."""

        def give_back() -> None:
            self._book.give_back(host, spec.needs, gpus)

        try:
            link = await HostLink.open(ssh_command(self._config, host.name))
            env = {**spec.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
            process = await self._processes.start(
                link, replace(spec, env=env), files, machine=host.name, on_end=give_back
            )
        except BaseException:
            give_back()
            raise
        host.num_failures = 0
        return process


def ssh_command(config: SshLauncherConfig, host: str) -> list[str]:
    """Makes the command that starts the host program. Other users could read secrets in a command, so it
    doesn't contain any."""
    python = config.python
    # The remote shell expands a leading ~ only if it isn't quoted.
    quoted = f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
    remote = f"exec {quoted} -P -m astraflow.addons.cluster.host_main"
    return ["ssh", *config.options, *_SSH_OPTIONS, "--", host, remote]


def remedy_for(text: str, code: int | None, host: str) -> str:
    """Says what to do about a host for which `ssh` printed this text and ended with this code."""
    if code in _NO_PROGRAM:
        return "set launcher.python to its Python"
    known = {
        "Permission denied": f"`ssh {host} true` must work without a prompt: add your key there",
        "Host key verification failed": f"connect once by hand, `ssh {host} true`, to accept its key",
        "Could not resolve hostname": "is the name right? See launcher.hosts and ~/.ssh/config",
        "No module named": f"pip install 'astraflow[quickstart]=={astraflow.__version__}' there, or set "
        "launcher.python to another Python",
        "python -h": "AstraFlow needs Python 3.11 or newer there; set launcher.python to one",
    }
    remedies = [remedy for part, remedy in known.items() if part in text]
    return remedies[0] if remedies else f"does `ssh {host} true` work? If not, remove it from launcher.hosts"


async def _ask_all(config: SshLauncherConfig) -> dict[str, Hello]:
    """Asks all hosts what they have. Raises: ConfigError that lists all unusable hosts."""
    answers = await asyncio.gather(*(_ask(config, host) for host in config.hosts))
    hellos = dict(zip(config.hosts, answers, strict=True))
    problems = [answer for answer in answers if isinstance(answer, str)]
    if problems:
        raise ConfigError("launcher.hosts: " + "; ".join(problems))
    return {name: hello for name, hello in hellos.items() if isinstance(hello, Hello)}


async def _ask(config: SshLauncherConfig, host: str) -> Hello | str:
    """Asks a host what it has. Returns: a text if the host can't be used."""
    try:
        link = await HostLink.open(ssh_command(config, host))
    except OSError as err:
        return f"{host}: this machine has no ssh ({err.strerror}); install OpenSSH's client"
    try:
        hello = await receive_hello(link)
    except LinkLostError as err:
        return f"{host}: {err}; {remedy_for(str(err), err.code, host)}"
    finally:
        link.close()
        await link.finish()
    return _find_problem(host, hello) or hello


def _find_problem(host: str, hello: Hello) -> str:
    """Explains why a host that has answered can't be used; empty if it can.

    Logs a warning if the host's clock is off.
    """
    skew_s = hello.now_s - time.time()
    if abs(skew_s) > _MAX_SKEW_S:
        _log.warning(
            "the clock of %s is %+.0f s from this machine's, and so are the times in its logs", host, skew_s
        )
    if hello.version != astraflow.__version__:
        return (
            f"{host}: it has astraflow {hello.version}, and this machine has {astraflow.__version__}; "
            "install the same version there"
        )
    if hello.free_disk_bytes < _MIN_DISK_BYTES:
        return (
            f"{host}: its disk is full ({hello.free_disk_bytes / 1e6:.0f} MB left for temporary files); free "
            "some space"
        )
    return ""


def _own_address(config: SshLauncherConfig, hellos: Mapping[str, Hello]) -> str:
    """Returns the address at which all hosts can call this machine.

    Raises: ConfigError if `auto` doesn't find it.
    """
    if config.address != "auto":
        return config.address
    callers = {hello.caller for hello in hellos.values()}
    remedy = "set launcher.address to an address of this machine that all hosts can reach"
    if len(callers) != 1:
        addresses = ", ".join(f"{name}: {hello.caller or 'unknown'}" for name, hello in hellos.items())
        raise ConfigError(
            f"launcher.address = 'auto': hosts see this machine at several addresses ({addresses}); {remedy}"
        )
    address = callers.pop()
    if not address or is_loopback(address):
        raise ConfigError(
            f"launcher.address = 'auto': the hosts see this machine at {address or 'no address'}, which "
            f"other machines cannot reach; {remedy}"
        )
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family) as trial:
        try:
            trial.bind((address, 0))
        except OSError as err:
            raise ConfigError(
                f"launcher.address = 'auto': the hosts see this machine at {address}, which is not one of "
                f"its own addresses ({err.strerror}), perhaps because of NAT; {remedy}"
            ) from err
    return address
