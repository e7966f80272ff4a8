"""The ranks of one trainer: rank 0 is the trainer's process, and it starts a process for each other rank.

    rank 0 --commands, one JSON line each, over a socket pair--> rank k
           <--an answer per command, or why it failed-----------
    all ranks: torch's collectives, over loopback, in the same order

An add-on derives a group from `RankGroup` whose ranks are on several machines.

Only rank 0 speaks for the trainer: it attaches, publishes and commits. The others do the same work at the
same time, each on its own slice of the batch. Each rank writes a range of a version's bytes during the next
step.

The ranks live and die together. A rank that loses rank 0 ends at once. If a rank fails, dies, or stays
stopped, rank 0 kills all ranks and raises an error that names the rank. Its own collectives then fail with
gloo, but with NCCL they never return. Therefore, a separate thread makes them, and is left behind. The
supervisor restarts rank 0, which continues from the last checkpoint.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import msgspec

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError, Error, ServiceError, TrainingError
from astraflow.processes.fork_server import SERVICE_COMMAND, ChildProcess
from astraflow.processes.process_state import LOOK_S, MAX_STOPPED_LOOKS, STOPPED, state_of
from astraflow.processes.rank_process import identity, join_ranks
from astraflow.processes.visible_gpus import gpu_variables
from astraflow.protocols import MACHINE_LOST, Learner, SampleRulesProvider, StepResult, Write
from astraflow.service.client import ServiceClient
from astraflow.service.memory import MemoryRecord
from astraflow.service.restarts import end_text
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.ranks import ProcessRanks, is_lost_contact
from astraflow.types import Batch, SampleRules, Session, SessionRequest
from astraflow.types.host_tensors import HostTensor
from astraflow.user_input.own_code import ending_forks
from astraflow.weights.ranges import RangeJob, VersionWriter, WrittenRange

__all__ = ["Rank", "RankGroup", "RankProgram", "RankedLearner", "RankedLink", "RankedRanges"]

_ResultT = TypeVar("_ResultT")

_START_S = 180.0
"""Minimum time that ranks have to start, even if the timeout is shorter: on a busy machine, imports take a
minute."""
_SETTLE_S = 2.0
"""Time after a failed collective within which the rank that caused the failure is known. Also the time after
a rank's failure in which rank 0's own work may end, because its own error may say more."""
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
    num_stopped: int = 0
    """Number of looks in a row that found it stopped."""

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

    Example: `group.together(lambda _: learner.train_step(batch), "train")`.
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
        self._numbers = itertools.count()
        self._told_s = time.monotonic()
        """Time of the newest command."""
        self._closing = threading.Event()
        self._memory = MemoryRecord()
        self._memory.look(0.0)
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        for target in (self._watch, self._do_work):
            threading.Thread(target=target, name="ranks", daemon=True).start()

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
        self._check_identities(self.wait(answers, max(self.timeout_s, _START_S)), mine)
        return self.guard(partial(join_ranks, 0, **group, listener=self.listener))

    def start_others(self, program: RankProgram) -> None:
        """Starts all ranks but 0, which are on this machine here."""
        for number in range(1, self.train.local_ranks):
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
            if self._closing.is_set():
                raise _closed()
            self._told_s = time.monotonic()
            number = next(self._numbers)
            line = json.dumps({"id": number, "do": command, **arguments}).encode() + b"\n"
            for rank in self._ranks:
                rank.pending[number] = Future()
                with contextlib.suppress(OSError):  # the rank is gone, which its listener thread notices
                    rank.link.sendall(line)
            return [rank.pending[number] for rank in self._ranks]

    def wait(self, answers: "Iterable[Future[Any]]", timeout_s: float = 0.0) -> list[Any]:
        """The answers of all ranks, each within `timeout_s`, by default the group's. Raises: ServiceError
        that names the rank that fails or is late."""
        try:
            return [answer.result(timeout_s or self.timeout_s) for answer in answers]
        except FutureTimeoutError as err:
            raise self._fail() from err

    def together(
        self, work: "Callable[[list[Future[Any]]], _ResultT]", command: str, **arguments: Any
    ) -> _ResultT:
        """Has the other ranks do what `work`, which gets their answers, does here. Raises: as `guard`."""
        return self.guard(partial(work, self.tell(command, **arguments)))

    def guard(self, work: Callable[[], _ResultT]) -> _ResultT:
        """Does work that contains collectives. Returns: what it returns.

        Raises: ServiceError or TrainingError that names the culprit as soon as a rank fails, even if the work
        waits for that rank forever; the work's own error.
        """
        own: Future[Any] = Future()
        self._work.put((own, work))
        wait_for((own, self.failure), return_when=FIRST_COMPLETED)
        if wait_for((own,), timeout=_SETTLE_S).not_done:
            raise self._fail()
        error = own.exception()
        if error is not None and is_lost_contact(error):
            wait_for((self.failure,), timeout=_SETTLE_S)
            raise self._fail(f"rank 0: {error}") from error
        result = own.result()
        if self.failure.done():  # the work may have gone on with only a part of a result
            self.failure.result()
        return result

    def close(self) -> None:
        """Ends all ranks. Those that don't end by themselves within a few seconds are killed.

        Threads that wait for answers get a ServiceError at once. This process can't end before they do.
        """
        with self._lock:
            self._closing.set()
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

    def _do_work(self) -> None:
        """Does the work of `guard`, always in one thread, which may never return from it."""
        while True:
            own, work = self._work.get()
            try:
                with ending_forks():  # the loss may be the user's
                    own.set_result(work())
            except BaseException as err:  # noqa: BLE001 - raised again by `guard`
                own.set_exception(err)

    def _watch(self) -> None:
        """Notices ranks that stay stopped, and ranks that ended but left their link open to a fork."""
        while not (self._closing.wait(LOOK_S) or self.failure.done()):
            for rank in self._ranks:
                rank.num_stopped = rank.num_stopped + 1 if rank.is_stopped else 0
                if rank.num_stopped >= MAX_STOPPED_LOOKS or rank.process.poll() is not None:
                    self._fail()

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
        if not self._closing.is_set():
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
            if self._closing.is_set():
                return _closed()
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
            code = cast("int", lost[0].process.poll())
            advice = "lower train.token_budget, or use fewer services"
            is_machine = code == MACHINE_LOST
            end = "was lost with its machine" if is_machine else end_text(code, self._memory, advice)
            return ServiceError(f"rank {lost[0].number} of {self.world} ({lost[0].place}) {end}")
        if stopped:
            rank = stopped[0]
            return ServiceError(
                f"rank {rank.number} of {self.world} ({rank.place}) is {STOPPED}, and the others wait for it"
            )
        errors = [own_error, *(f"rank {r.number}: {r.error}" for r in self._ranks if r.error)]
        texts = "; ".join(filter(None, errors)) or "none"
        if any(errors) and time.monotonic() - self._told_s < self.timeout_s:  # none can have been late
            return ServiceError(f"the ranks of the trainer can't go on together: {texts}")
        return ServiceError(
            "the ranks of the trainer lost each other. If a pass takes longer than "
            f"{self.timeout_s:g} s, raise supervision.rank_timeout_s. Their errors: {texts}"
        )


def _closed() -> Error:
    return ServiceError("the trainer is ending, and its ranks take no more commands")


class RankedLink(DataflowClient):
    """Rank 0's link: takes its slice of a batch, and has the other ranks take theirs."""

    def __init__(self, client: ServiceClient, group: RankGroup) -> None:
        super().__init__(client)
        self._group = group
        self._failure = asyncio.wrap_future(group.failure)
        """Wrapped once: the group's future keeps every wrapper as long as it lives."""

    async def attach(self, policy: str, request: SessionRequest) -> Session:
        """Attaches once, for all ranks."""
        return await super().attach(policy, msgspec.structs.replace(request, num_ranks=self._group.world))

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
        own = await super().batch(policy, step, epoch=epoch, rank=0, world=self._group.train.data_ranks)
        if own is None:
            return None
        answers = self._group.tell("take", step=step, epoch=epoch)
        have_theirs = await asyncio.to_thread(self._group.wait, answers)
        return own if all(have_theirs) else None


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
        return self._group.together(lambda _: self._inner.train_step(batch), "train")

    def export(self) -> Iterable[HostTensor]:
        """Rank 0's part of a version. Every other rank keeps its own until it is published."""
        return self._group.together(lambda _: self._inner.export(), "export")

    def save(self, folder: Path) -> Write:
        """Copies the state on all ranks. The returned function writes rank 0's part, and waits until the
        others have written theirs."""

        def save(answers: "list[Future[Any]]") -> Write:
            write_own = self._inner.save(folder)

            def write() -> None:
                if write_own is not None:
                    write_own()
                self._group.wait(answers)

            return write

        return self._group.together(save, "save", folder=str(folder))

    def load(self, folder: Path) -> None:
        """Each rank loads its own part."""

        def load(answers: "list[Future[Any]]") -> None:
            self._inner.load(folder)
            self._group.wait(answers)

        self._group.together(load, "load", folder=str(folder))


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
