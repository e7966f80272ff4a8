"""What rank 0 of a trainer does about its other ranks, here a process that never answers."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from astraflow.errors import Error, ServiceError, TrainingError
from astraflow.processes.rank_group import Rank, RankedLearner, RankGroup
from astraflow.protocols import StepResult
from astraflow.trainer.config import TrainConfig
from astraflow.types import Batch
from drivers.trainer_builders import make_batch, make_samples
from drivers.trainer_fakes import CountingLearner

_TIMEOUT_S = 30.0


@pytest.fixture
def rank() -> Rank:
    here, there = socket.socketpair()
    with there:
        # It reads until rank 0 closes the link, as a rank does.
        return Rank(1, subprocess.Popen(["cat"], stdin=there, stdout=subprocess.DEVNULL), here)


@pytest.fixture
def group(rank: Rank) -> Iterator[RankGroup]:
    made = RankGroup(TrainConfig(ranks=2), timeout_s=_TIMEOUT_S)
    made.add(rank)
    yield made
    made.close()


@pytest.fixture
def waiting(group: RankGroup) -> "Iterator[Future[list[Any]]]":
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(group.wait, group.tell("write_full"))


def test_a_thread_that_waits_for_an_answer_does_not_outlive_the_group(
    group: RankGroup, waiting: "Future[list[Any]]"
) -> None:
    began_s = time.monotonic()
    group.close()
    with pytest.raises(ServiceError, match="the trainer is ending"):
        waiting.result(_TIMEOUT_S)
    assert time.monotonic() - began_s < _TIMEOUT_S / 2


def test_a_closed_group_takes_no_commands(group: RankGroup) -> None:
    group.close()
    with pytest.raises(ServiceError, match="the trainer is ending"):
        group.tell("write_full")


def test_a_thread_that_waits_for_an_answer_learns_which_rank_died(
    rank: Rank, waiting: "Future[list[Any]]"
) -> None:
    rank.process.kill()
    with pytest.raises(ServiceError, match=r"rank 1 of 2 \(process \d+\) was killed by signal 9"):
        waiting.result(_TIMEOUT_S)


ANSWERING_RANK = """
import json, os, socket, sys

link = socket.socket(fileno=int(sys.argv[1]))
command = json.loads(link.makefile().readline())
for answer in json.loads(sys.argv[2]):
    link.sendall(answer.replace("ID", str(command["id"])).encode())
if sys.argv[3] == "ends":
    os._exit(3)
link.recv(1)
"""


def answering_group(answers: list[str], *, ends: bool = False) -> RankGroup:
    """A group whose rank 1 answers the first command with these lines."""
    here, there = socket.socketpair()
    argv = [sys.executable, "-c", ANSWERING_RANK, str(there.fileno()), json.dumps(answers)]
    with there:
        process = subprocess.Popen([*argv, "ends" if ends else "stays"], pass_fds=(there.fileno(),))
    made = RankGroup(TrainConfig(ranks=2), timeout_s=_TIMEOUT_S)
    made.add(Rank(1, process, here))
    return made


def test_an_answer_to_another_command_or_a_second_answer_is_dropped() -> None:
    other = '{"id": 99, "value": "of another"}\n'
    own = '{"id": ID, "value": "own"}\n'
    again = '{"id": ID, "value": "again"}\n'
    with contextlib.closing(answering_group([other, own, again])) as group:
        assert group.wait(group.tell("take")) == ["own"]
        assert not group.failure.done()


@pytest.mark.parametrize("answer", ["no JSON\n", "[]\n", "{}\n", '{"id": "x", "value": 1}\n', "7\n"])
def test_an_invalid_answer_ends_the_wait_and_names_the_rank(answer: str) -> None:
    with (
        contextlib.closing(answering_group([answer])) as group,
        pytest.raises(ServiceError, match="rank 1: it sent an invalid answer"),
    ):
        group.wait(group.tell("take"))


def test_a_rank_that_dies_in_the_middle_of_an_answer_is_named() -> None:
    began_s = time.monotonic()
    with (
        contextlib.closing(answering_group(['{"id": ID, "val'], ends=True)) as group,
        pytest.raises(ServiceError, match=r"rank 1 of 2 \(process \d+\) ended with exit code 3"),
    ):
        group.wait(group.tell("take"))
    assert time.monotonic() - began_s < _TIMEOUT_S / 2


class WaitingLearner(CountingLearner):
    """Its step waits for a collective of NCCL with a lost rank: it never ends, and raises nothing."""

    def train_step(self, batch: Batch) -> StepResult:
        threading.Event().wait()
        raise AssertionError


NAMED_WITHIN_S = 10.0
"""Leaves a third of the 15 s within which a trainer ends to the end of the process."""
OOM = "cuda:0 is out of memory with microbatches of up to 4096 tokens"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
NCCL = "DistBackendError: NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'"


def check_named(group: RankGroup, kind: type[Error], text: str) -> None:
    """Checks that a step that never ends fails in time with an error that names the culprit."""
    began_s = time.monotonic()
    with pytest.raises(kind, match=text):
        RankedLearner(WaitingLearner(), group).train_step(make_batch(make_samples()))
    assert time.monotonic() - began_s < NAMED_WITHIN_S


@pytest.mark.parametrize(
    ("number", "text", "has_fork"),
    [
        (signal.SIGKILL, "was killed by signal 9", False),
        (signal.SIGKILL, "was killed by signal 9", True),
        (signal.SIGSTOP, "is stopped", False),
    ],
)
def test_a_step_that_waits_forever_for_a_lost_rank_fails_and_names_it(
    number: signal.Signals, text: str, *, has_fork: bool
) -> None:
    here, there = socket.socketpair()
    process = subprocess.Popen(["cat"], stdin=there, stdout=subprocess.DEVNULL)
    if not has_fork:  # which would keep the link open when the rank is gone
        there.close()
    with contextlib.closing(RankGroup(TrainConfig(ranks=2), timeout_s=_TIMEOUT_S)) as group, there:
        group.add(Rank(1, process, here))
        os.kill(process.pid, number)
        check_named(group, ServiceError, rf"rank 1 of 2 \(process {process.pid}\) .*{text}")


@pytest.mark.parametrize(
    ("error", "is_own", "kind"),
    [
        (OOM, True, TrainingError),
        (f"RuntimeError: {CUBLAS}", True, TrainingError),
        (NCCL, False, ServiceError),
    ],
)
def test_a_step_that_waits_forever_fails_with_the_error_of_the_rank_that_failed(
    error: str, kind: type[Error], *, is_own: bool
) -> None:
    answer = json.dumps({"error": error, "is_own": is_own}) + "\n"
    with contextlib.closing(answering_group([answer])) as group:
        check_named(group, kind, rf"rank 1.*: {error[:20]}")
        assert "lost each other" not in str(group.failure.exception())


def test_a_rank_that_is_stopped_for_a_moment_is_not_lost(group: RankGroup, rank: Rank) -> None:
    rank.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    rank.process.send_signal(signal.SIGCONT)
    with pytest.raises(TimeoutError):
        group.failure.result(3.5)


def test_a_result_that_was_computed_without_a_lost_rank_is_not_used(group: RankGroup, rank: Rank) -> None:
    def ends_with_garbage() -> str:  # as after an abort of NCCL's communicator
        rank.process.kill()
        group.failure.exception(_TIMEOUT_S)
        return "garbage"

    with pytest.raises(ServiceError, match="rank 1 of 2"):
        group.guard(ends_with_garbage)


@pytest.mark.parametrize(
    ("error", "is_lost"), [(RuntimeError(CUBLAS), False), (dist.DistBackendError("NCCL error"), True)]
)
def test_only_errors_of_collectives_of_rank_0_count_as_lost_contact(
    group: RankGroup, error: Exception, *, is_lost: bool
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(ServiceError if is_lost else type(error), match=str(error)[:10]):
        group.guard(fail)
    assert group.failure.done() == is_lost
