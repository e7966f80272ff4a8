"""The agent of one of a trainer's machines, which starts the ranks there.

    wait for rank 0's invitation in the run folder -> call rank 0 -> start a process per rank, each with its
    own link to rank 0 -> tell rank 0 how they are, until it is gone -> kill them, and wait again

The agent runs until it is stopped: it can't tell a trainer that has ended from one that restarts. But if a
launcher has started it, and it doesn't see what the launcher writes, its run folder is a copy, and it ends.
"""

import asyncio
import contextlib
import logging
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from astraflow.addons.cluster.node_links import (
    Caller,
    Invitation,
    RankKill,
    RankState,
    address_toward,
    choose_interface,
    connect,
    invitation_path,
    needed_alike,
)
from astraflow.errors import ConfigError, ServiceError
from astraflow.processes.process_state import state_of
from astraflow.processes.rank_group import RankProgram
from astraflow.recipe.recipe import PolicyConfig
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.process import PARENT_FD_VARIABLE, launcher_pipe
from astraflow.trainer.backend_config import torch_settings
from astraflow.user_input.mistakes import hint

__all__ = ["Agent"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Time between two looks for an invitation, or at the ranks."""
_STOP_GRACE_S = 4.0
"""Time for rank 0 to end first when the whole run stops."""
_REPEAT_S = 60.0
"""Time between two log lines about a rank 0 that can't be called."""
_STALE_AFTER_S = 90.0
"""The launcher writes `run.json` every few seconds. Network file systems may show old files for 60 s."""


_Ranks: TypeAlias = "dict[int, subprocess.Popen[bytes]]"
"""Number of a rank -> its process."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Example: `await Agent(run_dir, "actor", url, node=1).run(stop)`."""

    run_dir: Path
    policy: str
    url: str
    """Base URL of the dataflow."""
    node: int
    """Number of this machine among the trainer's machines, from 1."""
    stale_after_s: float = _STALE_AFTER_S
    """Time without a change in the folder after which it is a copy."""

    async def run(self, stop: asyncio.Event) -> int:
        """Holds this machine's ranks until `stop`. Raises: ConfigError if this machine lacks the run folder
        or the model, has only a copy of the folder, or isn't one of the trainer's."""
        self._check()
        path = invitation_path(self.run_dir, self.policy)
        loop = asyncio.get_running_loop()
        next_line_s = loop.time() + _REPEAT_S
        sharing = _Sharing(self.run_dir, self.stale_after_s)
        while not stop.is_set():
            try:
                sharing.check(loop.time())
                invitation = msgspec.json.decode(path.read_bytes(), type=Invitation)
                control, ranks = await asyncio.to_thread(self._join, invitation)
                await _hold(control, ranks, stop)
            except (OSError, msgspec.DecodeError, ServiceError) as err:
                if loop.time() >= next_line_s:
                    _log.warning("still waiting for rank 0: %s", _describe(err, path))
                    next_line_s = loop.time() + _REPEAT_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await stop.wait()
        return 0

    def _check(self) -> PolicyConfig:
        """Returns the policy's settings, which a resumed run may have changed. Raises: ConfigError."""
        host = socket.gethostname()
        folder = RunFolder(self.run_dir)
        if not folder.recipe.is_file():
            raise ConfigError(
                f"{host} has no run folder {self.run_dir}; all machines of a trainer must find it at the "
                "same path, on a file system that they share"
            )
        trained = folder.load_recipe().trained
        if self.policy not in trained:
            raise ConfigError(f"--policy {self.policy}: no trained policy{hint(self.policy, list(trained))}")
        policy = trained[self.policy]
        if not policy.model_dir.is_dir():
            raise ConfigError(
                f"{host} has no model {policy.model_dir}; all machines of a trainer must find it at the same "
                "path, so name an absolute one"
            )
        if not 0 < self.node < policy.train.nodes:
            raise ConfigError(f"--node {self.node}: the trainer has nodes 0 to {policy.train.nodes - 1}")
        return policy

    def _join(self, invitation: Invitation) -> tuple[socket.socket, _Ranks]:
        """Calls rank 0, and starts the ranks. Raises: OSError or ServiceError if rank 0 can't be called;
        ConfigError if there are too few GPUs."""
        policy = self._check()
        train = policy.train
        settings = torch_settings(train.backend)
        assert settings is not None, "other backends have one rank"
        choose_interface(address_toward(invitation.host))
        program = RankProgram(self.run_dir, self.policy, self.url, settings.device)
        host = socket.gethostname()
        ranks: _Ranks = {}
        control = connect(invitation, Caller(self.node, 0, host, needed_alike(policy.model_dir)))
        try:
            for place in range(train.local_ranks):
                number = self.node * train.local_ranks + place
                with connect(invitation, Caller(self.node, number, host)) as link:
                    ranks[number] = program.start(number, link, place=place)
        except BaseException:
            control.close()
            _kill(ranks)
            raise
        _log.info("ranks %s have joined rank 0 at %s", ", ".join(map(str, ranks)), invitation.host)
        return control, ranks


class _Sharing:
    """Checks that this machine sees what the launcher writes into the run folder."""

    def __init__(self, run_dir: Path, stale_after_s: float) -> None:
        self._record = RunFolder(run_dir).record
        self._stale_after_s = stale_after_s
        self._is_launched = launcher_pipe(PARENT_FD_VARIABLE) is not None
        self._seen: bytes | None = None
        self._changed_s = 0.0

    def check(self, now_s: float) -> None:
        """Call it again and again while rank 0 is missing. Raises: ConfigError if the folder is only a copy.

        Nothing is known about an agent that was started by hand: there may be no launcher.
        """
        content = self._record.read_bytes() if self._record.is_file() else b""
        if content != self._seen:
            self._seen = content
            self._changed_s = now_s
        elif self._is_launched and now_s - self._changed_s >= self._stale_after_s:
            raise ConfigError(
                f"{socket.gethostname()} has only a copy of the run folder: {self._record} has not changed "
                f"for {self._stale_after_s:.0f} s, and the launcher writes it every few seconds; mount the "
                "launcher's folder at this path"
            )


def _describe(err: Exception, invitation: Path) -> str:
    """Says why rank 0 can't be called."""
    if isinstance(err, FileNotFoundError):
        return f"no {invitation}; if rank 0 runs, its machine does not share the folder with this one"
    return str(err)


async def _hold(control: socket.socket, ranks: _Ranks, stop: asyncio.Event) -> None:
    """Holds the ranks until rank 0 is gone, or until `stop`."""
    reader, writer = await asyncio.open_connection(sock=control)
    lost = asyncio.create_task(_obey(reader, ranks))
    stopping = asyncio.create_task(stop.wait())
    try:
        while not lost.done() and not stopping.done():
            states = [
                RankState(number, rank.pid, rank.poll(), state_of(rank.pid) == "stopped")
                for number, rank in ranks.items()
            ]
            writer.write(msgspec.json.encode(states) + b"\n")
            await asyncio.wait({lost, stopping}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({lost}, timeout=_STOP_GRACE_S)
    finally:
        lost.cancel()
        stopping.cancel()
        writer.close()
        await asyncio.to_thread(_kill, ranks)


async def _obey(reader: asyncio.StreamReader, ranks: _Ranks) -> None:
    """Kills the ranks that rank 0 names, until rank 0 is gone, or says something else."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        while line := await reader.readline():
            ranks[msgspec.json.decode(line, type=RankKill).rank].kill()


def _kill(ranks: _Ranks) -> None:
    for rank in ranks.values():
        rank.kill()
    for rank in ranks.values():
        rank.wait()
