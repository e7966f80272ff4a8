"""What rank 0 of a trainer does about its other ranks, here a process that never answers."""

import contextlib
import json
import socket
import subprocess
import sys
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
