"""The main function of a trainer's ranks above 0: each does the work of rank 0 on its own slice of the batch.

    reader (thread)      rank 0's commands -> queue; when rank 0 closes the socket, the process ends at once
    main                 one command after another, in order, so that collectives match those of rank 0
    writer (thread)      writes this rank's part of a checkpoint while main continues
    publisher (thread)   writes this rank's range of a version, on a command of rank 0, while main continues
    leader (thread)      ends the process when rank 0 is gone, and rank 0 when it stays stopped

A rank that fails reports its error to rank 0, which then ends all ranks. `rank_group` is the other side.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import Error, ServiceError
from astraflow.processes.process_state import LOOK_S, MAX_STOPPED_LOOKS, STOPPED, state_of
from astraflow.recipe.access import own_ca_file, own_token
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import fingerprints
from astraflow.service.client import ServiceClient
from astraflow.service.process import log_as, settle_memory
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.ranks import ProcessRanks, is_lost_contact
from astraflow.types import Batch
from astraflow.types.host_tensors import HostTensor
from astraflow.user_input.own_code import ending_forks
from astraflow.weights.ranges import RangeJob, RangeWriter

__all__ = ["identity", "join_ranks", "run_rank"]

_log = logging.getLogger(__name__)
_LEADER_GRACE_S = 4.0
"""Time that a failed rank gives rank 0 to end it. If rank 0 doesn't, it is stopped or hangs, and the rank
kills it, so that the supervisor restarts all ranks."""
_CONCURRENT = ("write_delta", "write_full", "end_version")
"""Commands that the publisher thread carries out while main continues."""


def identity(run_dir: Path) -> dict[str, str]:
    """The recipe, code and library versions, which must be equal on all ranks of a trainer."""
    import torch
    import transformers

    digests = fingerprints(RunFolder(run_dir).load_recipe())
    return {
        "recipe": digests.recipe,
        "code": digests.code,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def join_ranks(
    rank: int, *, world: int, meeting: str, timeout_s: float, listener: socket.socket | None = None
) -> ProcessRanks:
    """Joins torch's process group, over loopback unless the environment names another interface.

    `listener`: rank 0's, if the ranks meet at an address: torch itself would listen on all interfaces.
    Raises: RuntimeError if a rank doesn't join in time.
    """
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    place = urlsplit(meeting)
    store = None
    if place.scheme == "tcp":
        fd = None if listener is None else listener.detach()
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - torch has no other place for it
            place.hostname or "", place.port or 0, world, rank == 0, timeout, master_listen_fd=fd
        )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=None if store else meeting,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    return ProcessRanks()


def run_rank(run_dir: Path, *, policy: str, url: str, rank: int, link: int) -> None:
    """Carries out rank 0's commands until rank 0 is gone. Never returns. `link`: file descriptor of the
    socket to rank 0."""
    log_as(f"trainer-{policy} rank {rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C for all ranks
    process = _RankProcess(run_dir, policy=policy, url=url, rank=rank, channel=socket.socket(fileno=link))
    try:
        process.run()
    except (Exception, SystemExit) as err:  # noqa: BLE001 - whatever it is, rank 0 must know it
        process.fail(err)


class _RankProcess:
    """One rank. `run` ends only by an exception; when rank 0 closes the socket, the whole process ends."""

    def __init__(self, run_dir: Path, *, policy: str, url: str, rank: int, channel: socket.socket) -> None:
        self._leader = os.getppid()
        self._run_dir = run_dir
        self._recipe = RunFolder(run_dir).load_recipe()
        self._policy = policy
        self._url = url
        self._rank = rank
        self._channel = channel
        self._sending = threading.Lock()
        self._commands: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")
        self._versions: _Versions  # once the ranks have joined, because then their number is known
        self._batch: Batch | None = None

    def run(self) -> None:
        """Joins the other ranks, then carries out rank 0's commands. Raises: what a command raises."""
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        if self._channel.family == socket.AF_UNIX:  # rank 0 is the parent, on this machine
            threading.Thread(target=self._watch_leader, name="leader", daemon=True).start()
        joining = self._commands.get()
        self._send(id=joining["id"], value=identity(self._run_dir))
        # Ranks keep their numbers if machines are missing, but torch counts those that are there.
        ranks = join_ranks(joining["numbers"].index(self._rank), **joining["group"])
        writer = RangeWriter(delta=self._recipe.weights.delta, rank=ranks.rank, world=ranks.world)
        self._versions = _Versions(writer)
        config = self._recipe.policies[self._policy]
        train_config = config.train.with_nodes(ranks.world // config.train.local_ranks)
        learner = make_learner(train_config, model_dir=config.model_dir, seed=self._recipe.seed, ranks=ranks)
        token = joining["token"] or own_token(self._recipe, RunFolder(self._run_dir), "trainer")
        client = ServiceClient(self._url, token=token, ca_file=own_ca_file(self._recipe))
        link = DataflowClient(client)
        settle_memory()
        with asyncio.Runner() as runner:

            def take(command: dict[str, Any]) -> bool:
                # Ranks that hold parts of one model copy work on the same slice of a batch.
                slice_idx = ranks.rank // train_config.num_model_ranks
                place = {"rank": slice_idx, "world": train_config.data_ranks}
                taken = link.batch(self._policy, command["step"], epoch=command["epoch"], **place)
                self._batch = runner.run(taken)
                return self._batch is not None

            def train(_: dict[str, Any]) -> None:
                if self._batch is None:
                    raise ServiceError(f"rank {self._rank} cannot train a step: it has no slice of the batch")
                learner.train_step(self._batch)

            actions: dict[str, Callable[[dict[str, Any]], Any]] = {
                "take": take,
                "train": train,
                "export": lambda _: self._versions.exported.put(learner.export()),
                "load": lambda command: learner.load(Path(command["folder"])),
            }
            while True:
                command = self._commands.get()
                if command["do"] == "save":
                    write = learner.save(Path(command["folder"])) or (lambda: None)
                    self._writer.submit(self._answer, int(command["id"]), write)
                    continue
                with ending_forks():  # the loss may be the user's
                    value = actions[command["do"]](command)
                self._send(id=command["id"], value=value)

    def fail(self, err: Exception | SystemExit) -> None:
        """Reports the error to rank 0, which ends all ranks. If rank 0 doesn't, kills it."""
        _log.error("failed: %s", err, exc_info=None if isinstance(err, Error) else err)
        text = str(err) if isinstance(err, Error) else f"{type(err).__name__}: {err}"
        self._send(error=text, is_own=not (isinstance(err, ServiceError) or is_lost_contact(err)))
        time.sleep(_LEADER_GRACE_S)
        if os.getppid() == self._leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._leader, signal.SIGKILL)
        os._exit(1)

    def _send(self, **message: Any) -> None:
        """Sends a message to rank 0, unless it is gone."""
        with self._sending, contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        try:
            with self._channel.makefile("rb") as lines, contextlib.suppress(OSError):
                for line in lines:
                    command = json.loads(line)
                    if command["do"] in _CONCURRENT:
                        write = partial(self._versions.do, command)
                        self._publisher.submit(self._answer, int(command["id"]), write)
                    else:
                        self._commands.put(command)
        finally:  # perhaps after a part of a command
            os._exit(0)  # rank 0 is gone, so all further work would be in vain

    def _watch_leader(self) -> None:
        """Ends this process when rank 0 is gone, even if a fork of rank 0 still holds the link. Fails if rank
        0 stays stopped, since collectives may wait for it forever."""
        num_stopped = 0
        while num_stopped < MAX_STOPPED_LOOKS:
            time.sleep(LOOK_S)
            if os.getppid() != self._leader:
                os._exit(0)
            num_stopped = num_stopped + 1 if state_of(self._leader) == "stopped" else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._leader, signal.SIGCONT)  # it can then say itself why it ends
        self.fail(ServiceError(f"rank 0 (process {self._leader}) was {STOPPED}; the others waited for it"))

    def _answer(self, number: int, work: Callable[[], Any]) -> None:
        """Does the work of a command, and answers the command with the result."""
        try:
            value = work()
        except Exception as err:  # noqa: BLE001 - whatever it is, rank 0 must know it
            self.fail(err)
        else:
            self._send(id=number, value=value)


class _Versions:
    """Holds this rank's range of each version, from the export until rank 0 has published the version."""

    def __init__(self, writer: RangeWriter) -> None:
        self.exported: SimpleQueue[Iterable[HostTensor]] = SimpleQueue()
        """Exported versions, in the order in which rank 0 publishes them."""
        self._writer = writer
        self._tensors: Sequence[HostTensor] = ()
        """This rank's tensors of the version that is being published."""

    def do(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """Does a command of `_CONCURRENT`. Returns: the written range. Raises: WeightsError, OSError."""
        if command["do"] == "end_version":
            self._tensors = ()
            return None
        if not self._tensors:
            # Waits if rank 0 is ahead, because its own export ended earlier.
            self._tensors = tuple(self.exported.get())
        job = RangeJob(**command["job"])
        if command["do"] == "write_delta":
            (written,) = self._writer.write_delta(job, self._tensors, int(command["base"]))
        else:
            (written,) = self._writer.write_full(job, self._tensors, is_copied=bool(command["is_copied"]))
        return asdict(written)
