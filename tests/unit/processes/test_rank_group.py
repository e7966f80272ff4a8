"""What rank 0 of a trainer does about its other ranks, here a process that never answers."""

import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from astraflow.errors import ServiceError
from astraflow.processes.rank_group import Rank, RankGroup
from astraflow.trainer.config import TrainConfig

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
