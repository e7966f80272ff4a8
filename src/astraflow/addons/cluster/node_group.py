"""The ranks of a trainer on several machines, from the view of rank 0.

    rank 0 --commands--> rank k      as on one machine, but over TCP
    rank 0 --kill k----> agent       ends a rank on the agent's machine
           <--states----             process ids, exit codes, and whether they are stopped; twice per second

Rank 0 waits until the agents of all machines and their ranks have called. When a link to an agent is lost, so
are its ranks: the trainer then ends as if a rank had died, and waits again after its restart. If it has a
checkpoint, and each machine has whole copies of the weights, it waits `_BACK_S` and goes on with the machines
that are there. A late machine is admitted, and holds its ranks ready. After the next checkpoint, the trainer
ends, so that it starts again with all machines.

Torch's ranks find each other through a TCPStore of rank 0, and their collectives use the network interface on
the route between the machines. Both listen at that interface's address only, but they admit whoever reaches
it: torch has no authentication.
"""

import contextlib
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty
from typing import Any
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
    listen_at,
    needed_alike,
)
from astraflow.errors import ConfigError, ServiceError
from astraflow.processes.rank_group import Rank, RankGroup, RankProgram
from astraflow.protocols import MACHINE_LOST
from astraflow.recipe.run_folder import RunFolder
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.ranks import ProcessRanks

__all__ = ["NodeGroup"]

_log = logging.getLogger(__name__)

_REMIND_S = 30.0
"""Time between two log lines about missing machines."""
_LOOK_S = 1.0
_BACK_S = 120.0
"""Longest time that a trainer with a checkpoint waits for a lost machine, if it can go on without it."""


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
        self.back_at = -1
        """Step of the newest checkpoint when this machine, which was late, was complete; -1: it isn't."""
        self._link = link
        self._sending = threading.Lock()

    @property
    def is_lost(self) -> bool:
        """Whether a rank has ended, or the link to the agent was lost."""
        return any(rank.remote.poll() is not None for rank in self.ranks.values())

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
        with self._link.makefile("rb") as lines, contextlib.suppress(OSError, ValueError, KeyError):
            for line in lines:
                for state in decoder.decode(line):
                    self.ranks[state.rank].remote.note(state)
        for rank in self.ranks.values():
            rank.remote.note_end(MACHINE_LOST)


class NodeGroup(RankGroup):
    """A `RankGroup` whose ranks are on several machines."""

    def __init__(self, train: TrainConfig, *, timeout_s: float) -> None:
        super().__init__(train, timeout_s=timeout_s)
        self._all = range(1, train.nodes)
        """Numbers of the other machines."""
        self._num_local = train.local_ranks
        self._nodes: dict[int, _Node] = {}
        self._late: dict[int, _Node] = {}
        """Machines that were missing when the ranks joined. Only the thread that admits them changes it."""
        self._checkpoints = Path()
        """Folder of the checkpoints."""
        self._invitation = contextlib.ExitStack()
        """Withdraws the invitation."""
        self._has: dict[str, str] = {}
        """What this machine has, which the others must have, too."""

    def start(self, run_dir: Path, *, policy: str, url: str, token: str, device: str) -> ProcessRanks:
        """As in the base class. All ranks read the token from the shared run folder, because the links to
        other machines aren't encrypted."""
        del token
        return super().start(run_dir, policy=policy, url=url, token="", device=device)

    def close(self) -> None:
        """Ends all ranks. Agents kill those that don't end by themselves, as soon as the link is closed."""
        self._closing.set()
        self._invitation.close()
        for node in (*self._nodes.values(), *self._late.values()):
            node.close()
        super().close()

    def tell(self, command: str, **arguments: Any) -> "list[Future[Any]]":
        """As in the base class. Raises: ServiceError, too, if the trainer should start again with a machine
        that is back."""
        if command == "take":
            for number, node in tuple(self._late.items()):
                if 0 <= node.back_at < self._num_done() and not node.is_lost:
                    raise ServiceError(
                        f"node {number} ({node.host}) is back, so the trainer starts again with it"
                    )
        return super().tell(command, **arguments)

    def start_others(self, program: RankProgram) -> None:
        """Starts the ranks of this machine, and waits for those of the others.

        Raises: ServiceError that names the missing machines after `supervision.node_timeout_s`; ConfigError
        that names a machine with other files or another driver.
        """
        folder = RunFolder(program.run_dir)
        recipe = folder.load_recipe()
        self._checkpoints = folder.checkpoints / program.policy
        self._has = needed_alike(recipe.policies[program.policy].model_dir)
        host = address_toward(urlsplit(program.url).hostname or "")
        choose_interface(host)
        self.listener = listen_at(host)
        url_host = f"[{host}]" if ":" in host else host
        self.meeting = f"tcp://{url_host}:{self.listener.getsockname()[1]}"
        super().start_others(program)
        door = Door(host)
        self._invitation.callback(door.close)
        invitation = invitation_path(program.run_dir, program.policy)
        self._invitation.callback(invitation.unlink, missing_ok=True)
        door.publish(invitation)
        self._admit(door, recipe.supervision.node_timeout_s, program.policy)
        if self._missing():
            threading.Thread(target=self._await_late, args=(door,), name="late", daemon=True).start()
        else:
            self._invitation.close()
        for _, node in sorted(self._nodes.items()):
            node.listen()
            for _, rank in sorted(node.ranks.items()):
                self.add(rank)

    def _num_done(self) -> int:
        """Number of steps in the newest checkpoint; -1 if there is none."""
        names = (path.name.removeprefix("step-") for path in self._checkpoints.glob("step-*"))
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def _missing(self) -> list[int]:
        """Numbers of the machines that aren't complete."""
        here = (number for number, node in self._nodes.items() if len(node.ranks) == self._num_local)
        return sorted(set(self._all).difference(here))

    def _admit(self, door: Door, patience_s: float, policy: str) -> None:
        """Waits until all machines are complete, or until those that are there should go on."""
        train = self.train
        has_copies = not (train.shard.replicate % train.nodes or train.local_ranks % train.num_model_ranks)
        can_go_on = has_copies and self._num_done() >= 0  # each machine has whole copies of the weights
        began_s = reminded_s = time.monotonic()
        while missing := self._missing():
            if self.failure.done():
                self.failure.result()
            with contextlib.suppress(Empty):
                self._take(*door.admitted.get(timeout=_LOOK_S), self._nodes)
            now_s = time.monotonic()
            names = ", ".join(f"node-{policy}-{number}" for number in missing)
            waited = f"{now_s - began_s:.0f} s for the trainer's other machines; missing: {names}"
            if can_go_on and now_s - began_s >= min(patience_s, _BACK_S):
                self._go_on_without(missing)
                _log.warning(
                    "waited %s. It goes on with %d of %d machines (%d ranks)",
                    waited,
                    self.train.nodes,
                    1 + len(self._all),
                    self.world,
                )
                return
            if now_s - began_s >= patience_s:
                raise ServiceError(
                    f"waited {waited}. Their logs say why; they must reach {door.invitation.host} and share "
                    "the run folder. To wait longer, raise supervision.node_timeout_s"
                )
            if now_s - reminded_s >= _REMIND_S:
                reminded_s = now_s
                _log.warning("waiting %s", waited)

    def _go_on_without(self, missing: Sequence[int]) -> None:
        """Leaves out machines, which may come back."""
        for number in missing:
            if (node := self._nodes.pop(number, None)) is not None:
                node.close()
        self.train = self.train.with_nodes(1 + len(self._nodes))

    def _await_late(self, door: Door) -> None:
        """Admits machines that were missing, until this group is closed."""
        while not self._closing.is_set():
            with contextlib.suppress(Empty):
                self._take_late(*door.admitted.get(timeout=_LOOK_S))

    def _take_late(self, caller: Caller, link: socket.socket) -> None:
        if caller.node in self._nodes:
            link.close()
            return
        try:
            node = self._take(caller, link, self._late)
        except ConfigError as err:
            _log.warning("%s", err)
            self._late.pop(caller.node).close()
            return
        if node is not None and len(node.ranks) == self._num_local:
            node.listen()
            node.back_at = max(0, self._num_done())
            _log.info("node %d (%s) is back, and joins after the next checkpoint", caller.node, node.host)

    def _take(self, caller: Caller, link: socket.socket, nodes: "dict[int, _Node]") -> "_Node | None":
        """Takes a caller. An agent that calls again has lost its ranks. Returns: its machine, unless the
        caller is turned away. Raises: ConfigError."""
        node = nodes.get(caller.node)
        if caller.rank == 0 and caller.node in self._all:
            if node is not None:
                node.close()
            node = nodes[caller.node] = _Node(caller, link)
            if unlike := [name for name, value in self._has.items() if caller.has.get(name) != value]:
                raise ConfigError(
                    f"node {caller.node} ({caller.host}) differs from node 0 in {' and '.join(unlike)}; all "
                    "machines of a trainer need the same"
                )
            _log.info("node %d is %s", caller.node, caller.host)
        elif node is not None and caller.rank // self._num_local == caller.node:
            node.add(caller.rank, link)
        else:
            link.close()
            return None
        return node
