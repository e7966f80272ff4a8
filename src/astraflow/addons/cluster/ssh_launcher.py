"""Starts the rollout services of a run on hosts that ssh reaches, and its other processes here.

    start -> takes room on a host -> ssh starts `host_main` there -> it starts the process -> a handle
             follows it

One connection of ssh per process: its end is that of the process, on whichever side it began. ssh also does
what a launcher should not: keys, addresses, encryption. There is no scheduler, so the launcher keeps the
book of what each host has left. Only processes that are near nobody, listen nowhere and must find nothing
again run on hosts: they get what they read from the launcher, and everything else over HTTP.
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
from astraflow.addons.cluster.piped_process import PipedProcesses, asked
from astraflow.addons.cluster.room import Room, contents_of, is_movable, missing_room, naming_wait
from astraflow.errors import ConfigError
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import Needs, ProcessHandle, ProcessSpec
from astraflow.service.server import is_loopback

__all__ = ["HostBook", "HostEntry", "SshLauncher", "remedy_for", "ssh_command"]

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 3.0
"""Time before a process that has found no host looks again."""
_LEAST_DISK_BYTES = 100e6
_MOST_SKEW_S = 60.0
"""Clocks that are further apart are named: nothing depends on them but people who compare logs."""
_SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ClearAllForwardings=yes")


class HostEntry:
    """One host in the book: what it has left, and how often in a row it was not reached."""

    def __init__(self, name: str, room: Room) -> None:
        self.name = name
        self.whole = room
        self.left = room
        self.num_failures = 0
        self._free_gpus = list(range(int(room.gpus)))

    def take(self, needs: Needs) -> tuple[int, ...]:
        """Reserves room for a process; returns the numbers of its GPUs."""
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
    """Which host gets the next process: one that answers, and of these the one with the most CPUs left.

    Example: `host, gpus = await book.take(needs)`; later `book.give_back(host, needs, gpus)`.
    """

    def __init__(self, entries: Sequence[HostEntry]) -> None:
        self._entries = tuple(entries)
        self._changed = asyncio.Event()

    @property
    def rooms(self) -> list[Room]:
        """What each host has when nothing runs on it."""
        return [entry.whole for entry in self._entries]

    async def take(self, needs: Needs) -> tuple[HostEntry, tuple[int, ...]]:
        """Waits for a host with room, and reserves it."""
        while not (fitting := [entry for entry in self._entries if entry.left.holds(needs)]):
            self._changed.clear()
            await self._changed.wait()
        host = min(fitting, key=lambda entry: (entry.num_failures, -entry.left.cpus))
        return host, host.take(needs)

    def give_back(self, host: HostEntry, needs: Needs, gpus: Sequence[int]) -> None:
        """A process has ended, or was never started."""
        host.give_back(needs, gpus)
        self._changed.set()


class SshLauncher:
    """Implements `Launcher` and `MultiMachineLauncher`. Asks every host what it has when it is made, and
    blocks for that.

    Example: `SshLauncher(SshLauncherConfig(hosts=("gpu-1", "gpu-2")))`.
    """

    def __init__(self, config: SshLauncherConfig) -> None:
        """Raises: ConfigError that names every host which cannot be used, and what to do."""
        if len(set(config.hosts)) < len(config.hosts):
            raise ConfigError(
                "launcher.hosts names a host twice; one entry holds as many services as it has room for"
            )
        self._config = config
        # Of this thread, the event loop may run already, which this blocks for a moment.
        with ThreadPoolExecutor(1) as pool:
            hellos = pool.submit(asyncio.run, _ask_all(config)).result()
        self._host = _own_address(config, hellos)
        rooms = {name: Room(hello.cpus, hello.gpus, hello.memory_bytes) for name, hello in hellos.items()}
        self._book = HostBook([HostEntry(name, room) for name, room in rooms.items()])
        self._local = LocalLauncher()
        self._processes = PipedProcesses()

    @property
    def host(self) -> str:
        """This machine's address, as the hosts call it."""
        return self._host

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process, if need be once a host has room.

        Raises: ConfigError if no host can have room for it, or one refuses it for good.
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
        with naming_wait(spec):
            while True:
                host, gpus = await self._book.take(spec.needs)
                try:
                    return await self._start_on(host, gpus, spec, files)
                except LinkLostError as err:
                    host.num_failures += 1
                    _log.warning("%s cannot start on %s: %s", spec.name, host.name, err)
                await asyncio.sleep(_ASK_AGAIN_S)

    def close(self) -> None:
        """Closes every link; hosts end the processes whose launcher is gone."""
        self._processes.close()
        self._local.close()

    async def _start_on(
        self, host: HostEntry, gpus: Sequence[int], spec: ProcessSpec, files: Mapping[Path, bytes]
    ) -> ProcessHandle:
        """Starts a process on a host, where nothing is left of it if that fails. Raises: LinkLostError."""

        def give_back() -> None:
            self._book.give_back(host, spec.needs, gpus)

        try:
            link = await HostLink.open(ssh_command(self._config, host.name))
            process = await self._processes.start(
                link, _seeing(spec, gpus), files, machine=host.name, on_end=give_back
            )
        except BaseException:
            give_back()
            raise
        host.num_failures = 0
        return process


def ssh_command(config: SshLauncherConfig, host: str) -> list[str]:
    """The command that starts a host program. Secrets never travel on it."""
    python = config.python
    # The shell there replaces a leading ~ only where it is not quoted.
    quoted = f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
    remote = f"exec {quoted} -P -m astraflow.addons.cluster.host_main"
    return ["ssh", *config.options, *_SSH_OPTIONS, "--", host, remote]


def remedy_for(text: str, host: str) -> str:
    """What to do about a host that answered a call with this text."""
    known = {
        "Permission denied": f"`ssh {host} true` must work without a question: add your key there",
        "Host key verification failed": f"connect once by hand, `ssh {host} true`, to accept its key",
        "Could not resolve hostname": "is the name right? See launcher.hosts and ~/.ssh/config",
        "No module named": f"pip install 'astraflow[quickstart]=={astraflow.__version__}' there, or name "
        "another Python by launcher.python",
        "not found": "name its Python by launcher.python",
        "No such file": "name its Python by launcher.python",
        "python -h": "AstraFlow needs Python 3.11 or newer there; name one by launcher.python",
    }
    found = [remedy for sign, remedy in known.items() if sign in text]
    return found[0] if found else f"does `ssh {host} true` work? Otherwise, take it out of launcher.hosts"


def _seeing(spec: ProcessSpec, gpus: Sequence[int]) -> ProcessSpec:
    """The process with the GPUs that it got, and no others."""
    return replace(spec, env={**spec.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))})


async def _ask_all(config: SshLauncherConfig) -> dict[str, Hello]:
    """What each host has. Raises: ConfigError that names all that cannot be used."""
    answers = await asyncio.gather(*(_ask(config, host) for host in config.hosts))
    hellos = dict(zip(config.hosts, answers, strict=True))
    problems = [answer for answer in answers if isinstance(answer, str)]
    if problems:
        raise ConfigError("launcher.hosts: " + "; ".join(problems))
    return {name: hello for name, hello in hellos.items() if isinstance(hello, Hello)}


async def _ask(config: SshLauncherConfig, host: str) -> Hello | str:
    """What a host has, or why it cannot be used."""
    try:
        link = await HostLink.open(ssh_command(config, host))
    except OSError as err:
        return f"{host}: this machine has no ssh ({err.strerror}); install OpenSSH's client"
    try:
        hello = await asked(link)
    except LinkLostError as err:
        return f"{host}: {err}; {remedy_for(str(err), host)}"
    finally:
        link.close()
        await link.ended()
    return _problem_of(host, hello) or hello


def _problem_of(host: str, hello: Hello) -> str:
    """Why a host that has answered cannot be used; empty if it can."""
    skew_s = hello.now_s - time.time()
    if abs(skew_s) > _MOST_SKEW_S:
        _log.warning(
            "the clock of %s is %+.0f s from this machine's; so are the times in its logs", host, skew_s
        )
    if hello.version != astraflow.__version__:
        return (
            f"{host}: it has astraflow {hello.version}, and this machine has {astraflow.__version__}; "
            "install the same version there"
        )
    if hello.free_disk_bytes < _LEAST_DISK_BYTES:
        return (
            f"{host}: its disk is full ({hello.free_disk_bytes / 1e6:.0f} MB left for temporary files); free "
            "some"
        )
    return ""


def _own_address(config: SshLauncherConfig, hellos: Mapping[str, Hello]) -> str:
    """Where this machine listens for its hosts. Raises: ConfigError if that is not one address of its own."""
    if config.address != "auto":
        return config.address
    callers = {hello.caller for hello in hellos.values()}
    remedy = "set launcher.address to an address of this machine that all hosts reach"
    if len(callers) != 1:
        seen = ", ".join(f"{name}: {hello.caller or 'unknown'}" for name, hello in hellos.items())
        raise ConfigError(
            f"launcher.address = 'auto': hosts see this machine at several addresses ({seen}); {remedy}"
        )
    address = callers.pop()
    if not address or is_loopback(address):
        raise ConfigError(
            f"launcher.address = 'auto': the hosts see this machine at {address or 'no address'}, which "
            f"other machines do not reach; {remedy}"
        )
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family) as trial:
        try:
            trial.bind((address, 0))
        except OSError as err:
            raise ConfigError(
                f"launcher.address = 'auto': the hosts see this machine at {address}, which is not its own "
                f"({err.strerror}), perhaps because of NAT; {remedy}"
            ) from err
    return address
