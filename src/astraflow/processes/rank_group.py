"""The ranks of one trainer: rank 0 is the trainer's process, and it starts a process for each other rank.

    rank 0 --commands, one JSON line each, over a socket pair--> rank k
           <--an answer per command, or why it failed-----------
    all ranks: torch's collectives, over loopback, in the same order

An add-on derives a group from `RankGroup` whose ranks are on several machines.

Only rank 0 speaks for the trainer: it attaches, publishes and commits. The others do the same work at the
same time, each on its own slice of the batch. Each rank writes a range of a version's bytes during the next
step.

The ranks live and die together. A rank that loses rank 0 ends at once. If a rank fails, dies or is stopped,
the collectives of the others fail, at the latest after a timeout. Rank 0 then raises an error that names the
rank, and kills all ranks. The supervisor restarts rank 0, which continues from the last checkpoint.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from astraflow.errors import ConfigError, Error, ServiceError, TrainingError
from astraflow.processes.fork_server import SERVICE_COMMAND, ChildProcess
from astraflow.processes.process_state import STOPPED, state_of
from astraflow.processes.rank_process import identity, join_ranks
from astraflow.processes.visible_gpus import gpu_variables
from astraflow.protocols import MACHINE_LOST, Learner, SampleRulesProvider, StepResult, Write
from astraflow.service.memory import MemoryRecord
from astraflow.service.restarts import end_text
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.loop import TrainerLink
from astraflow.trainer.ranks import ProcessRanks, is_lost_contact
from astraflow.types import (
    Batch,
    Commit,
    Publication,
    PublicationReply,
    Release,
    SampleRules,
    Session,
    SessionRequest,
    StepFailure,
)
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.ranges import RangeJob, VersionWriter, WrittenRange

__all__ = ["Rank", "RankGroup", "RankProgram", "RankedLearner", "RankedLink", "RankedRanges"]

_START_S = 180.0
"""Minimum time that ranks have to start, even if the timeout is shorter: on a busy machine, imports take a
minute."""
_SETTLE_S = 2.0
"""Time after a failed collective within which the rank that caused the failure is known."""
_END_S = 3.0
"""Time for a rank to end by itself after rank 0 has closed the socket."""


@dataclass(slots=True)
class Rank:
    """A rank other than 0."""

    number: int
    process: ChildProcess
    link: socket.socket
    pending: dict[int, "Future[Any]"] = field(default_factory=dict[int, "Future[Any]"])
    """Number of a command -> its future answer."""
    error: str = ""
    """The error that the rank reported; empty if it reported none."""
    is_own_error: bool = False
    """Whether the rank's own work failed. Otherwise, it lost contact to another rank."""

    @property
    def place(self) -> str:
        """Its process, in words."""
        return f"process {self.process.pid}"

    @property
    def is_stopped(self) -> bool:
        """Whether its process was stopped, e.g. by SIGSTOP."""
        return state_of(self.process.pid) == "stopped"


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Starts the ranks of a policy's trainer on one machine."""

    run_dir: Path
    policy: str
    url: str
    device: str
    """Device of the machine's first rank."""

    def start(self, number: int, link: socket.socket, *, place: int) -> "subprocess.Popen[bytes]":
        """Starts a rank, which inherits its link to rank 0. `place`: its number on this machine."""
        names = (str(self.run_dir), "--policy", self.policy, "--url", self.url, "--rank", str(number))
        return subprocess.Popen(
            (*SERVICE_COMMAND, "rank", *names, "--link", str(link.fileno())),
            env={**os.environ, **gpu_variables(self.device, place)},
            stdin=subprocess.DEVNULL,
            pass_fds=(link.fileno(),),
        )


class RankGroup:
    """Ranks 1 to `world - 1` of a trainer. Owns their processes; `close` ends them.

    Example: `with group.together("train"): learner.train_step(batch)`.
    """

    def __init__(self, train: TrainConfig, *, timeout_s: float) -> None:
        self.train = train
        """The settings of the trainer. A group on fewer machines than configured has other ones."""
        self.timeout_s = timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="astraflow-ranks-"))
        """A private folder, through which torch's ranks find each other."""
        self.meeting = f"file://{self.folder / 'store'}"
        """Where they do: an `init_method` of torch."""
        self.listener: socket.socket | None = None
        """The socket on which rank 0 listens there, if they meet at an address."""
        self.failure: Future[None] = Future()
        """Has an exception as soon as a rank is lost."""
        self._ranks: list[Rank] = []
        self._lock = threading.Lock()
        self._num_commands = 0
        self._is_closing = False
        self._memory = MemoryRecord()
        self._memory.look(0.0)

    @property
    def world(self) -> int:
        """Number of ranks, with rank 0."""
        return self.train.ranks

    def start(self, run_dir: Path, *, policy: str, url: str, token: str, device: str) -> ProcessRanks:
        """Starts the ranks of a policy's trainer, and joins their process group as rank 0.

        `device`: the first rank's. Afterwards, this process sees only this one of its GPUs.
        Raises: ConfigError if a rank has other code or settings than rank 0, or if there are too few GPUs;
        ServiceError if one is lost.
        """
        own_variables = gpu_variables(device, 0)
        self.start_others(RankProgram(run_dir, policy, url, device))
        os.environ.update(own_variables)
        group: dict[str, Any] = {"world": self.world, "meeting": self.meeting, "timeout_s": self.timeout_s}
        # The token goes over the socket, because other users of the machine can read command lines.
        numbers = [0, *(rank.number for rank in self._ranks)]
        answers = self.tell("join", token=token, numbers=numbers, group=group)
        mine = identity(run_dir)
        self._await_start(answers)
        self._check_identities(self.wait(answers), mine)
        with self._naming_culprit():
            return join_ranks(0, **group, listener=self.listener)

    def start_others(self, program: RankProgram) -> None:
        """Starts all ranks but 0, which are on this machine here."""
        self.start_local(program, self.world)

    def start_local(self, program: RankProgram, num_local: int) -> None:
        """Starts the ranks of this machine."""
        for number in range(1, num_local):
            here, there = socket.socketpair()
            with there:
                self.add(Rank(number, program.start(number, there, place=number), here))

    def add(self, rank: Rank) -> None:
        """Takes in a rank whose process was started."""
        self._ranks.append(rank)
        threading.Thread(target=self._listen, args=(rank,), name=f"rank-{rank.number}", daemon=True).start()

    def tell(self, command: str, **arguments: Any) -> "list[Future[Any]]":
        """Sends a command to all other ranks. Returns: their future answers.

        Raises: ServiceError if a rank is lost, or if the group is closed.
        """
        with self._lock:
            if self.failure.done():
                self.failure.result()
            if self._is_closing:
                raise _closed()
            self._num_commands += 1
            number = self._num_commands
            line = json.dumps({"id": number, "do": command, **arguments}).encode() + b"\n"
            answers: list[Future[Any]] = []
            for rank in self._ranks:
                answer: Future[Any] = Future()
                rank.pending[number] = answer
                answers.append(answer)
                with contextlib.suppress(OSError):  # the rank is gone, which its listener thread notices
                    rank.link.sendall(line)
            return answers

    def wait(self, answers: "Iterable[Future[Any]]") -> list[Any]:
        """The answers of all ranks. Raises: ServiceError that names the rank that fails or is late."""
        try:
            return [answer.result(self.timeout_s) for answer in answers]
        except FutureTimeoutError as err:
            raise self._fail() from err

    @contextmanager
    def together(self, command: str, **arguments: Any) -> Generator["list[Future[Any]]", None, None]:
        """Has the other ranks do what the block does in this one. Yields: their future answers.

        Raises: ServiceError that names the culprit if a collective in the block fails.
        """
        with self._naming_culprit():
            yield self.tell(command, **arguments)

    def close(self) -> None:
        """Ends all ranks. Those that don't end by themselves within a few seconds are killed.

        Threads that wait for answers get a ServiceError at once. This process can't end before they do.
        """
        with self._lock:
            self._is_closing = True
            self._fail_answers(_closed())
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.link.shutdown(socket.SHUT_RDWR)
        for rank in self._ranks:
            try:
                rank.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.link.close()
        if self.listener is not None:
            self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- parts ---

    def _await_start(self, answers: "list[Future[Any]]") -> None:
        """Waits for ranks that are still starting, even beyond the timeout, unless one is stopped."""
        deadline_s = time.monotonic() + _START_S
        while wait_for(answers, timeout=self.timeout_s).not_done and time.monotonic() < deadline_s:
            if any(rank.is_stopped for rank in self._ranks):
                raise self._fail()

    @contextmanager
    def _naming_culprit(self) -> Generator[None, None, None]:
        """Replaces a collective's error, which doesn't say what went wrong, by one that names the culprit."""
        try:
            yield
        except RuntimeError as err:
            if not is_lost_contact(err):
                raise
            wait_for([self.failure], timeout=_SETTLE_S)
            raise self._fail(f"rank 0: {err}") from err

    def _check_identities(self, others: Sequence[Mapping[str, str]], mine: Mapping[str, str]) -> None:
        """Raises: ConfigError that names the rank if a rank has other code or settings than rank 0."""
        for rank, theirs in zip(self._ranks, others, strict=True):
            for what, own in mine.items():
                if theirs.get(what) != own:
                    raise ConfigError(
                        f"rank {rank.number} of {self.world} ({rank.place}) has {what} {theirs.get(what)!r}, "
                        f"rank 0 has {own!r}; all ranks of a trainer need the same"
                    )

    def _listen(self, rank: Rank) -> None:
        """Reads a rank's answers until the socket closes or an answer is invalid. Then the rank is lost."""
        try:
            with rank.link.makefile("rb") as lines, contextlib.suppress(OSError):
                for line in lines:
                    if not line.endswith(b"\n"):
                        break  # it ended in the middle of an answer
                    self._take_answer(rank, json.loads(line))
        except (ValueError, LookupError, TypeError) as err:
            rank.error = f"it sent an invalid answer: {err!r}"
            self._fail()
        if not self._is_closing:
            try:
                rank.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                rank.error = rank.error or "it closed its link, and its end is unknown"
            self._fail()

    def _take_answer(self, rank: Rank, answer: dict[str, Any]) -> None:
        if "error" not in answer:
            with self._lock:
                call = rank.pending.pop(int(answer["id"]), None)
            if call is not None and not call.done():
                call.set_result(answer["value"])
            return
        rank.error = str(answer["error"])
        rank.is_own_error = bool(answer["is_own"])
        # A rank that lost contact to another one may report this before the other one is known to be gone.
        threading.Timer(0.0 if rank.is_own_error else _SETTLE_S / 2, self._fail).start()

    def _fail(self, own_error: str = "") -> Error:
        """Kills all ranks, because those that still compute would wait for the lost one.

        Later calls return the error of the first. `own_error`: how rank 0 noticed. Returns: an error that
        names the culprit.
        """
        with self._lock:
            if self.failure.done():
                return cast("Error", self.failure.exception())
            error = self._find_culprit(own_error)
            self.failure.set_exception(error)
            for rank in self._ranks:
                rank.process.kill()
            self._fail_answers(error)
            return error

    def _fail_answers(self, error: Error) -> None:
        """Gives an error to all who wait for answers. The caller holds the lock."""
        for rank in self._ranks:
            for answer in rank.pending.values():
                answer.set_exception(error)
            rank.pending.clear()

    def _find_culprit(self, own_error: str) -> Error:
        """An error that names the rank with which the failure began, as far as that is known.

        It's a TrainingError if the rank's own work failed, and a ServiceError if its process was lost.
        """
        failed = [r for r in self._ranks if r.is_own_error]
        lost = [r for r in self._ranks if not r.error and r.process.poll() is not None]
        stopped = [r for r in self._ranks if r.is_stopped]
        if failed:
            return TrainingError(f"rank {failed[0].number} of {self.world}: {failed[0].error}")
        if lost:
            return ServiceError(
                f"rank {lost[0].number} of {self.world} {_describe_end(lost[0], self._memory)}"
            )
        if stopped:
            rank = stopped[0]
            return ServiceError(
                f"rank {rank.number} of {self.world} ({rank.place}) is {STOPPED}; the others "
                f"waited {self.timeout_s:g} s for it (supervision.rank_timeout_s)"
            )
        others = [f"rank {r.number}: {r.error}" for r in self._ranks if r.error]
        errors = [own_error, *others] if own_error else others
        return ServiceError(
            "the ranks of the trainer lost each other, and none is stopped or dead. If a pass takes longer "
            f"than {self.timeout_s:g} s, raise supervision.rank_timeout_s. Their errors: "
            f"{'; '.join(errors) or 'none'}"
        )


def _closed() -> Error:
    return ServiceError("the trainer is ending, and its ranks take no more commands")


def _describe_end(rank: Rank, memory: MemoryRecord) -> str:
    code = cast("int", rank.process.poll())
    if code == MACHINE_LOST:
        return f"({rank.place}) was lost with its machine"
    return f"({rank.place}) {end_text(code, memory, 'lower train.token_budget, or use fewer services')}"


class RankedLink:
    """Rank 0's link: takes its slice of a batch, and has the other ranks take theirs. Implements
    `TrainerLink`."""

    def __init__(self, inner: TrainerLink, group: RankGroup) -> None:
        self._inner = inner
        self._group = group
        self._failure = asyncio.wrap_future(group.failure)
        """Wrapped once: the group's future keeps every wrapper as long as it lives."""

    async def attach(self, policy: str, request: SessionRequest) -> Session:
        """Attaches once, for all ranks."""
        return await self._inner.attach(policy, msgspec.structs.replace(request, num_ranks=self._group.world))

    async def batch(
        self, policy: str, step: int, *, epoch: int, rank: int = 0, world: int = 1
    ) -> Batch | None:
        """Rank 0's slice, once all ranks have theirs. Raises: ServiceError if a rank is lost meanwhile."""
        del rank, world
        taking = asyncio.ensure_future(self._take(policy, step, epoch))
        try:
            await asyncio.wait({taking, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return taking.result()
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def _take(self, policy: str, step: int, epoch: int) -> Batch | None:
        own = await self._inner.batch(policy, step, epoch=epoch, rank=0, world=self._group.train.data_ranks)
        if own is None:
            return None
        answers = self._group.tell("take", step=step, epoch=epoch)
        have_theirs = await asyncio.to_thread(self._group.wait, answers)
        return own if all(have_theirs) else None

    async def publish(self, policy: str, publication: Publication) -> PublicationReply:
        return await self._inner.publish(policy, publication)

    async def commit(self, policy: str, commit: Commit) -> None:
        await self._inner.commit(policy, commit)

    async def release(self, policy: str, release: Release) -> None:
        await self._inner.release(policy, release)

    async def step_failed(self, policy: str, failure: StepFailure) -> None:
        await self._inner.step_failed(policy, failure)


class RankedLearner:
    """Rank 0's learner, which has all other ranks do the same. Implements `Learner`."""

    def __init__(self, inner: Learner, group: RankGroup) -> None:
        self._inner = inner
        self._group = group

    @property
    def sample_rules(self) -> SampleRules:
        """The inner learner's rules, or the defaults."""
        return self._inner.sample_rules if isinstance(self._inner, SampleRulesProvider) else SampleRules()

    def train_step(self, batch: Batch) -> StepResult:
        """Each rank trains on the slice that it has taken."""
        with self._group.together("train"):
            return self._inner.train_step(batch)

    def export(self) -> Iterable[HostTensor]:
        """Rank 0's part of a version. Every other rank keeps its own until it is published."""
        with self._group.together("export"):
            return self._inner.export()

    def save(self, folder: Path) -> Write:
        """Copies the state on all ranks. The returned function writes rank 0's part, and waits until the
        others have written theirs."""
        with self._group.together("save", folder=str(folder)) as answers:
            write_own = self._inner.save(folder)

        def write() -> None:
            if write_own is not None:
                write_own()
            self._group.wait(answers)

        return write

    def load(self, folder: Path) -> None:
        """Each rank loads its own part."""
        with self._group.together("load", folder=str(folder)) as answers:
            self._inner.load(folder)
            self._group.wait(answers)


class RankedRanges:
    """Has each rank write its range of a version. Implements `VersionWriter`."""

    def __init__(self, own: VersionWriter, group: RankGroup) -> None:
        self._own = own
        self._group = group

    def write_delta(self, job: RangeJob, tensors: Sequence[HostTensor], base: int) -> list[WrittenRange]:
        """Writes a delta. Returns: the blocks of all ranks. Raises: WeightsError; ServiceError if a rank is
        lost."""
        answers = self._group.tell("write_delta", job=asdict(job), base=base)
        own = self._own.write_delta(job, tensors, base)
        return [*own, *(WrittenRange(**theirs) for theirs in self._group.wait(answers))]

    def write_full(
        self, job: RangeJob, tensors: Sequence[HostTensor], *, is_copied: bool
    ) -> list[WrittenRange]:
        """Writes the full version. Returns: the ranges of all ranks. Raises: as `write_delta`."""
        answers = self._group.tell("write_full", job=asdict(job), is_copied=is_copied)
        own = self._own.write_full(job, tensors, is_copied=is_copied)
        return [*own, *(WrittenRange(**theirs) for theirs in self._group.wait(answers))]

    def end(self) -> None:
        """Has the other ranks drop their parts of the version."""
        self._group.tell("end_version")
