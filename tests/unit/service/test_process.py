"""A service uses only those of its launcher's descriptors that are open pipes."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.service.process import LIFE_FD_VARIABLE, PARENT_FD_VARIABLE, launcher_pipe, settle_memory

_NEVER_OPEN = "99999"
"""A descriptor number that no process here reaches."""

_SERVICE = """
import asyncio, sys
from astraflow.service.process import run_service

async def main(stop):
    await asyncio.sleep(0.05)
    print("stopped" if stop.is_set() else "at work")

sys.exit(run_service(main, name="test"))
"""

_FAILING_SERVICE = """
import asyncio, sys
from astraflow.errors import ServiceError
from astraflow.service import process
from astraflow.service.process import run_service

process._LAST_MOMENT_S = float(sys.argv[1])

async def main(stop):
    asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    raise ServiceError("the model is gone")

sys.exit(run_service(main, name="test"))
"""


def _ended(variables: dict[str, str], *fds: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SERVICE],
        env={**os.environ, **variables},
        pass_fds=fds,
        capture_output=True,
        text=True,
        check=False,
        timeout=15,
    )


@pytest.mark.parametrize("variable", [PARENT_FD_VARIABLE, LIFE_FD_VARIABLE])
@pytest.mark.parametrize("value", [_NEVER_OPEN, "-1", "9" * 30, "seven"])
def test_a_descriptor_that_is_not_open_is_ignored_with_one_log_line(variable: str, value: str) -> None:
    ended = _ended({variable: value})
    assert (ended.returncode, ended.stdout) == (0, "at work\n")
    assert len(ended.stderr.splitlines()) == 1
    assert f"{variable} = {value!r} is not an open pipe" in ended.stderr


@pytest.mark.parametrize("variable", [PARENT_FD_VARIABLE, LIFE_FD_VARIABLE])
def test_a_foreign_file_is_neither_watched_nor_written_to(variable: str, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    with foreign.open("wb") as file:
        ended = _ended({variable: str(file.fileno())}, file.fileno())
    assert (ended.returncode, ended.stdout) == (0, "at work\n")
    assert len(ended.stderr.splitlines()) == 1
    assert foreign.read_bytes() == b""


def test_a_service_stops_when_the_launchers_pipe_is_closed() -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    ended = _ended({PARENT_FD_VARIABLE: str(read_fd)}, read_fd)
    os.close(read_fd)
    assert ended.stdout == "stopped\n"
    assert "the launcher is gone" in ended.stderr


def test_a_service_writes_signs_of_life_to_its_pipe() -> None:
    read_fd, write_fd = os.pipe()
    ended = _ended({LIFE_FD_VARIABLE: str(write_fd)}, write_fd)
    os.close(write_fd)
    assert (ended.stdout, ended.stderr) == ("at work\n", "")
    assert os.read(read_fd, 16).startswith(b".")
    os.close(read_fd)


def test_without_a_launcher_there_is_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_FD_VARIABLE, raising=False)
    assert launcher_pipe(PARENT_FD_VARIABLE) is None


@pytest.mark.parametrize("ends_thread", [True, False])
def test_a_service_that_fails_says_why_and_then_ends_though_a_thread_is_at_work(ends_thread: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FAILING_SERVICE, "60" if ends_thread else "0.5"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as service:
        assert service.stdin is not None
        assert service.stderr is not None
        line = service.stderr.readline()
        if ends_thread:
            assert service.poll() is None
            service.stdin.close()
        assert service.wait(timeout=15) == 1
    assert "test stopped: the model is gone" in line


def test_a_settled_process_collects_garbage_less_often_and_skips_what_is_there() -> None:
    before = gc.get_threshold()
    try:
        settle_memory()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() == (50_000, 10, 10)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
