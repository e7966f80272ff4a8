"""The main function of a trainer's further ranks: each does what rank 0 does, on its own slice of the batch.

    reader (thread)      commands of rank 0 -> queue; when rank 0 hangs up, the process ends at once
    main                 command after command, in order, so that collectives match those of rank 0
    writer (thread)      writes this rank's part of a checkpoint while main goes on
    publisher (thread)   writes this rank's range of a version, when rank 0 says so, while main goes on

A rank that fails tells rank 0 why, which then ends all of them. See `rank_group` for the other side.
"""

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import Error, ServiceError
from astraflow.protocols import Write
from astraflow.recipe.access import own_ca_file
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import fingerprints
from astraflow.service.client import ServiceClient
from astraflow.service.process import STACKS_SIGNAL, settle_memory
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.ranks import ProcessRanks, is_lost_contact
from astraflow.types import Batch
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.ranges import RangeJob, RangeWriter, WrittenRange

__all__ = ["identity", "join_ranks", "run_rank"]

_log = logging.getLogger(__name__)
_LEADER_GRACE_S = 4.0
"""A rank that has failed gives rank 0 this long to end it. A rank 0 that does not is stopped, and is killed:
its supervisor must start all ranks again."""
_BESIDE = ("write_delta", "write_full", "end_version")
"""Commands that are done beside the others."""


def identity(run_dir: Path) -> dict[str, str]:
    """What all ranks of a trainer must have in common."""
    import torch
    import transformers

    digests = fingerprints(RunFolder(run_dir).load_recipe())
    return {
        "recipe": digests.recipe,
        "code": digests.code,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def join_ranks(rank: int, *, world: int, store: str, timeout_s: float) -> ProcessRanks:
    """Makes torch's process group, over loopback. Raises: RuntimeError if a rank does not come in time."""
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=cast("Any", dist).FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    return ProcessRanks()


def run_rank(run_dir: Path, *, policy: str, url: str, rank: int, link: int) -> None:
    """Does what rank 0 says until it hangs up; never returns. `link`: descriptor of the socket to it."""
    name = f"trainer-{policy} rank {rank}"
    logging.basicConfig(
        level=os.environ.get("ASTRAFLOW_LOG", "INFO"),
        format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s",
        stream=sys.stderr,
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for rank 0 to answer
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    process = _RankProcess(run_dir, policy=policy, url=url, rank=rank, channel=socket.socket(fileno=link))
    try:
        process.run()
    except Exception as err:  # noqa: BLE001 - whatever it is, rank 0 must know it
        process.fail(err)


class _RankProcess:
    """One rank. `run` returns only by an exception; when rank 0 hangs up, the process ends."""

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
        world = self._recipe.policies[policy].train.ranks
        self._versions = _Versions(RangeWriter(delta=self._recipe.weights.delta, rank=rank, world=world))
        self._batch: Batch | None = None

    def run(self) -> None:
        """Joins the others, then does command after command. Raises: whatever a command fails with."""
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        joining = self._commands.get()
        self._say(id=joining["id"], value=identity(self._run_dir))
        world = int(joining["world"])
        ranks = join_ranks(self._rank, world=world, store=joining["store"], timeout_s=joining["timeout_s"])
        config = self._recipe.policies[self._policy]
        together = config.train.shard.num_model_ranks  # so many ranks get the same slice of a batch
        learner = make_learner(config.train, model_dir=config.model_dir, seed=self._recipe.seed, ranks=ranks)
        client = ServiceClient(self._url, token=joining["token"], ca_file=own_ca_file(self._recipe))
        link = DataflowClient(client)
        settle_memory()
        with asyncio.Runner() as runner:

            def take(command: dict[str, Any]) -> bool:
                place = {"rank": self._rank // together, "world": world // together}
                taken = link.batch(self._policy, command["step"], epoch=command["epoch"], **place)
                self._batch = runner.run(taken)
                return self._batch is not None

            def train(_: dict[str, Any]) -> None:
                if self._batch is None:
                    raise ServiceError(f"rank {self._rank} is to train a step without a slice of its batch")
                learner.train_step(self._batch)

            def export(_: dict[str, Any]) -> None:
                self._versions.exported.put(learner.export())

            def load(command: dict[str, Any]) -> None:
                learner.load(Path(command["folder"]))

            actions: dict[str, Callable[[dict[str, Any]], Any]] = {
                "take": take,
                "train": train,
                "export": export,
                "load": load,
            }
            while True:
                command = self._commands.get()
                if command["do"] == "save":
                    write = learner.save(Path(command["folder"]))
                    self._writer.submit(self._write, int(command["id"]), write)
                else:
                    self._say(id=command["id"], value=actions[command["do"]](command))

    def fail(self, err: Exception) -> None:
        """Tells rank 0, which ends all ranks. Ends rank 0 if it does not."""
        _log.error("failed: %s", err, exc_info=None if isinstance(err, Error) else err)
        text = str(err) if isinstance(err, Error) else f"{type(err).__name__}: {err}"
        self._say(error=text, is_own=not is_lost_contact(err))
        time.sleep(_LEADER_GRACE_S)
        if os.getppid() == self._leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._leader, signal.SIGKILL)
        os._exit(1)

    def _say(self, **message: Any) -> None:
        """Tells rank 0; one that is gone does not hear it."""
        with self._sending, contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        with self._channel.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                command = json.loads(line)
                if command["do"] in _BESIDE:
                    self._publisher.submit(self._publish, command)
                else:
                    self._commands.put(command)
        os._exit(0)  # rank 0 is gone, and nothing that is done from here on is of use

    def _publish(self, command: dict[str, Any]) -> None:
        try:
            written = self._versions.do(command)
        except Exception as err:  # noqa: BLE001 - whatever it is, rank 0 must know it
            self.fail(err)
            return
        self._say(id=command["id"], value=written)

    def _write(self, number: int, write: Write | None) -> None:
        try:
            if write is not None:
                write()
        except Exception as err:  # noqa: BLE001 - whatever it is, rank 0 must know it
            self.fail(err)
        self._say(id=number, value=None)


class _Versions:
    """This rank's range of each version, from its export until rank 0 has published it."""

    def __init__(self, writer: RangeWriter) -> None:
        self.exported: SimpleQueue[Iterable[HostTensor]] = SimpleQueue()
        """In the order in which rank 0 publishes them."""
        self._writer = writer
        self._tensors: Sequence[HostTensor] = ()
        """Of the version that is being published."""

    def do(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """Does a command of `_BESIDE`. Returns: what was written. Raises: WeightsError; OSError."""
        if command["do"] == "end_version":
            self._tensors = ()
            return None
        if not self._tensors:
            self._tensors = tuple(self.exported.get())  # rank 0 may be ahead: its export ended earlier
        job = RangeJob(**command["job"])
        written: list[WrittenRange]
        if command["do"] == "write_delta":
            written = self._writer.write_delta(job, self._tensors, int(command["base"]))
        else:
            written = self._writer.write_full(job, self._tensors, is_copied=bool(command["is_copied"]))
        return asdict(written[0])
