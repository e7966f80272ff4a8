"""The ranks of a trainer on several machines, from the view of rank 0.

    rank 0 --commands--> rank k      as on one machine, but over TCP
    rank 0 --kill k----> agent       ends a rank on the agent's machine
           <--states----             process ids, exit codes, and whether they are stopped; twice per second

Rank 0 waits until the agents of all machines and their ranks have called. When a link to an agent is lost, so
are its ranks: the trainer then ends as if a rank had died, and waits again after its restart. Torch's ranks
find each other through a TCPStore of rank 0, and their collectives use the network interface on the route
between the machines.
"""

import contextlib
import logging
import socket
import subprocess
import threading
import time
from pathlib import Path
from queue import Empty
from urllib.parse import urlsplit

import msgspec

from astraflow.addons.cluster.node_links import (
    Caller,
    Door,
    RankKill,
    RankState,
    address_toward,
    choose_interface,
    invitation_path,
    needed_alike,
)
from astraflow.errors import ConfigError, ServiceError
from astraflow.processes.rank_group import Rank, RankGroup, RankProgram
from astraflow.protocols import MACHINE_LOST
from astraflow.recipe.run_folder import RunFolder
from astraflow.trainer.ranks import ProcessRanks

__all__ = ["NodeGroup"]

_log = logging.getLogger(__name__)

_REMIND_S = 30.0
"""Time between two log lines about missing machines."""
_LOOK_S = 1.0


class _RemoteProcess:
    """The process of a rank on another machine: what a group needs of `subprocess.Popen`."""

    def __init__(self, number: int, node: "_Node") -> None:
        self.pid = 0
        self.is_stopped = False
        self._number = number
        self._node = node
        self._code: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        """Returns the exit code, `MACHINE_LOST` if there is none; None while the process runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises: TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """Has the agent kill the process."""
        self._node.kill(self._number)

    def note(self, state: RankState) -> None:
        """Takes over what the agent says."""
        self.pid = state.pid
        self.is_stopped = state.is_stopped
        if state.code is not None:
            self.note_end(state.code)

    def note_end(self, code: int) -> None:
        """Records the end, unless it is known."""
        if not self._ended.is_set():
            self._code = code
            self._ended.set()


class _RemoteRank(Rank):
    """A rank on another machine."""

    def __init__(self, number: int, node: "_Node", link: socket.socket) -> None:
        self.remote = _RemoteProcess(number, node)
        self._host = node.host
        super().__init__(number, self.remote, link)

    @property
    def place(self) -> str:
        """Its process and machine, in words."""
        return f"process {self.remote.pid} on {self._host}"

    @property
    def is_stopped(self) -> bool:
        """Whether its agent found its process stopped."""
        return self.remote.is_stopped


class _Node:
    """Another machine: the link to its agent, and its ranks."""

    def __init__(self, caller: Caller, link: socket.socket) -> None:
        self.host = caller.host
        self.ranks: dict[int, _RemoteRank] = {}
        self._link = link
        self._sending = threading.Lock()

    def add(self, number: int, link: socket.socket) -> None:
        """Takes in a rank that has called."""
        self.ranks[number] = _RemoteRank(number, self, link)

    def listen(self) -> None:
        """Starts to take what the agent says."""
        threading.Thread(target=self._listen, name=f"node-{self.host}", daemon=True).start()

    def kill(self, number: int) -> None:
        """Has the agent kill a rank, unless the agent is gone."""
        with self._sending, contextlib.suppress(OSError):
            self._link.sendall(msgspec.json.encode(RankKill(number)) + b"\n")

    def close(self) -> None:
        """Closes all links. The agent then ends its ranks."""
        for link in (self._link, *(rank.link for rank in self.ranks.values())):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _listen(self) -> None:
        decoder = msgspec.json.Decoder(list[RankState])
        with self._link.makefile("rb") as lines, contextlib.suppress(OSError, msgspec.DecodeError):
            for line in lines:
                for state in decoder.decode(line):
                    self.ranks[state.rank].remote.note(state)
        for rank in self.ranks.values():
            rank.remote.note_end(MACHINE_LOST)


class NodeGroup(RankGroup):
    """A `RankGroup` whose ranks are on several machines."""

    def __init__(self, world: int, *, timeout_s: float) -> None:
        super().__init__(world, timeout_s=timeout_s)
        self._nodes: dict[int, _Node] = {}
        self._has: dict[str, str] = {}
        """What this machine has, which the others must have, too."""

    def start(self, run_dir: Path, *, policy: str, url: str, token: str, device: str) -> ProcessRanks:
        """As in the base class. All ranks read the token from the shared run folder, because the links to
        other machines aren't encrypted."""
        del token
        return super().start(run_dir, policy=policy, url=url, token="", device=device)

    def close(self) -> None:
        """Ends all ranks."""
        super().close()
        for node in self._nodes.values():
            node.close()

    def start_others(self, program: RankProgram) -> None:
        """Starts the ranks of this machine, and waits for those of the others.

        Raises: ServiceError that names the missing machines after `supervision.node_timeout_s`; ConfigError
        that names a machine with other files or another driver.
        """
        recipe = RunFolder(program.run_dir).load_recipe()
        num_local = recipe.policies[program.policy].train.local_ranks
        self._has = needed_alike(recipe.policies[program.policy].model_dir)
        host = address_toward(urlsplit(program.url).hostname or "")
        choose_interface(host)
        self.meeting = f"tcp://{_in_url(host)}:{_free_port(host)}"
        self.start_local(program, num_local)
        path = invitation_path(program.run_dir, program.policy)
        door = Door(host)
        try:
            door.publish(path)
            self._admit(door, num_local, recipe.supervision.node_timeout_s, program.policy)
        finally:
            door.close()
            path.unlink(missing_ok=True)
        for node in self._nodes.values():
            node.listen()
            for rank in node.ranks.values():
                self.add(rank)

    def _admit(self, door: Door, num_local: int, patience_s: float, policy: str) -> None:
        """Waits until all machines are complete."""
        wanted = set(range(num_local, self.world))
        began_s = time.monotonic()
        reminded_s = began_s
        while missing := wanted - {number for node in self._nodes.values() for number in node.ranks}:
            if self.failure.done():
                self.failure.result()
            with contextlib.suppress(Empty):
                self._take(*door.admitted.get(timeout=_LOOK_S), num_local)
            now_s = time.monotonic()
            if now_s - reminded_s < _REMIND_S and now_s - began_s < patience_s:
                continue
            reminded_s = now_s
            absent = ", ".join(f"node-{policy}-{node}" for node in sorted({n // num_local for n in missing}))
            waited = f"{now_s - began_s:.0f} s for the trainer's other machines; missing: {absent}"
            if now_s - began_s >= patience_s:
                raise ServiceError(
                    f"waited {waited}. Their logs say why; they must reach {door.invitation.host} and share "
                    "the run folder. To wait longer, raise supervision.node_timeout_s"
                )
            _log.warning("waiting %s", waited)

    def _take(self, caller: Caller, link: socket.socket, num_local: int) -> None:
        """Takes a caller. An agent that calls again has lost its ranks. Raises: ConfigError."""
        node = self._nodes.get(caller.node)
        if caller.rank == 0 and 0 < caller.node < self.world // num_local:
            if node is not None:
                node.close()
            self._nodes[caller.node] = _Node(caller, link)
            if unlike := [name for name, value in self._has.items() if caller.has.get(name) != value]:
                raise ConfigError(
                    f"node {caller.node} ({caller.host}) differs from node 0 in {' and '.join(unlike)}; all "
                    "machines of a trainer need the same"
                )
            _log.info("node %d is %s", caller.node, caller.host)
        elif node is not None and caller.rank // num_local == caller.node:
            node.add(caller.rank, link)
        else:
            link.close()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.bind((host, 0))
        return int(trial.getsockname()[1])
