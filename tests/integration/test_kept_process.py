"""A program under a keeper, whoever dies first: the service, the keeper, the program, or what it left."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from astraflow.service.keeper import KEEP
from astraflow.service.kept_object import InvalidAnswerError, KeptObject, ObjectLostError
from astraflow.service.kept_process import Care, KeptProcess, OutputLines
from drivers.system_driver import wait_gone

pytestmark = pytest.mark.timeout(120)

LEAVES = "setsid sleep 1000 & echo $! > left; echo $$ > own; "
"""Leaves a process of another session, and notes both ids."""
NO_CARE = Care()


class Counter:
    """An object to keep."""

    def __init__(self, value: int) -> None:
        self.value = value

    def add(self, number: int) -> int:
        """Adds to the value."""
        self.value += number
        return self.value

    def close(self) -> None:
        """Closes its socket, and stays."""
        os.closerange(3, 65_536)
        time.sleep(1000)

    def stop(self) -> None:
        """Stops its process."""
        os.kill(os.getpid(), signal.SIGSTOP)


TARGET = f"{__name__}:Counter"


async def start(folder: Path, script: str, care: Care = NO_CARE) -> KeptProcess:
    """Starts a shell that leaves a process, and returns once both ids are known."""
    process = await KeptProcess.start(["/bin/sh", "-c", LEAVES + script], folder=folder, care=care)
    async with asyncio.timeout(60):
        while not (folder / "own").is_file() or not (folder / "own").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return process


def pids(folder: Path) -> list[int]:
    return [int((folder / name).read_text()) for name in ("own", "left")]


async def test_the_exit_code_is_known_once_all_that_the_program_left_is_gone(tmp_path: Path) -> None:
    process = await start(tmp_path, "exit 7")
    await process.ended.wait()
    assert process.code == 7
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))
    assert await process.end() == 7


async def test_a_killed_program_is_reported_by_its_signal(tmp_path: Path) -> None:
    process = await start(tmp_path, "exec sleep 1000")
    os.kill(process.pid, signal.SIGKILL)
    await process.ended.wait()
    assert process.code == -signal.SIGKILL
    assert wait_gone(pids(tmp_path), timeout_s=10.0) == []


async def test_a_stopped_program_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    process = await start(tmp_path, "exec sleep 1000")
    os.kill(process.pid, signal.SIGSTOP)
    assert await process.end() == -signal.SIGKILL
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


async def test_a_program_dies_with_its_killed_keeper(tmp_path: Path) -> None:
    process = await start(tmp_path, "exec sleep 1000")
    own, left = pids(tmp_path)
    psutil.Process(own).parent().kill()  # pyright: ignore[reportOptionalMemberAccess] - it has one
    await process.ended.wait()
    assert process.code == -signal.SIGKILL
    assert wait_gone([own], timeout_s=10.0) == []
    with contextlib.suppress(ProcessLookupError):  # only a keeper is sure to find it
        os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_program_gets_time_to_end_and_its_folder_goes_unless_it_is_kept(
    tmp_path: Path, *, is_kept: bool
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    script = f"trap 'echo bye > {tmp_path}/last; exit 3' TERM; while :; do sleep 0.05; done"
    process = await start(folder, script, Care(grace_s=60.0, removed=str(folder)))
    assert await process.end(KEEP if is_kept else b"") == 3
    assert (tmp_path / "last").read_text() == "bye\n"
    assert folder.exists() == is_kept


async def test_a_program_that_cannot_be_started_is_named() -> None:
    process = await KeptProcess.start(["/no/such/program"])
    assert (process.pid, process.problems) == (0, {"start": "No such file or directory"})
    assert await process.end() == 127


async def test_output_is_kept_line_by_line_and_its_end_is_not_awaited_for_ever() -> None:
    logged: list[str] = []
    output = OutputLines(logged.append, num_kept=2, max_chars=5)
    with output.writer() as fd:
        program = "printf 'one\\ntwo\\tx\\nabcdefgh\\nrest'"
        process = await KeptProcess.start(["/bin/sh", "-c", program], stdout=fd, stderr=fd)
        await process.ended.wait()
    await output.until_end(20.0)
    assert logged == ["one", "two x", "abcde", "rest"]
    assert list(output.last) == ["abcde", "rest"]
    with output.writer():  # as if a process held it open
        await output.until_end(0.01)


HOST = """
import asyncio, sys
from pathlib import Path
from astraflow.service.kept_process import KeptProcess

async def main():
    await KeptProcess.start(["/bin/sh", "-c", sys.argv[2]], folder=Path(sys.argv[1]))
    await asyncio.sleep(1e6)

asyncio.run(main())
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_nothing_outlives_a_killed_service(tmp_path: Path, *, is_stopped: bool) -> None:
    argv = [sys.executable, "-c", HOST, str(tmp_path), LEAVES + "exec sleep 1000"]
    service = subprocess.Popen(argv)
    end_s = time.monotonic() + 60
    while not (tmp_path / "own").is_file() or not (tmp_path / "own").read_text():
        assert time.monotonic() < end_s
        time.sleep(0.02)
    if is_stopped:
        os.kill(pids(tmp_path)[0], signal.SIGSTOP)
    service.kill()
    service.wait()
    assert wait_gone(pids(tmp_path), timeout_s=20.0) == []


async def test_a_kept_object_stays_the_same_between_calls() -> None:
    counter = await KeptObject.start(TARGET, 5)
    assert [await counter.call("add", 2), await counter.call("add", 3)] == [7, 10]
    await counter.end()


async def test_a_kept_object_that_is_lost_says_how() -> None:
    counter = await KeptObject.start(TARGET, 5)
    with pytest.raises(ObjectLostError, match="ended with exit code 1") as lost:
        await counter.call("no_such_method")
    assert not isinstance(lost.value, InvalidAnswerError)
    await counter.end()


async def test_a_kept_object_that_closes_its_socket_is_noticed_at_once() -> None:
    counter = await KeptObject.start(TARGET, 5)
    with pytest.raises(ObjectLostError, match="closed its socket"):
        await counter.call("close")
    await counter.end()


async def test_a_stopped_object_is_ended_by_a_caller_that_gives_up() -> None:
    counter = await KeptObject.start(TARGET, 5)
    assert await counter.call("add", 1) == 6
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await counter.call("stop")
    await counter.end()


async def test_a_kept_object_that_is_forgotten_ends() -> None:
    others = psutil.Process().children(recursive=True)
    counter = await KeptObject.start(TARGET, 5)
    assert await counter.call("add", 1) == 6
    own = [child for child in psutil.Process().children(recursive=True) if child not in others]
    assert len(own) == 2
    del counter
    gc.collect()
    async with asyncio.timeout(20):
        while any(process.is_running() for process in own):  # noqa: ASYNC110 - nobody tells of its end
            await asyncio.sleep(0.02)
