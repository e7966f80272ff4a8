"""Code of the user that forks, and whose fork returns: each call still gets its own answer, once."""

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest

from astraflow.config import Use
from astraflow.errors import RolloutError
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.config import JsonlSourceConfig, TasksConfig
from astraflow.types import Task
from drivers.system_driver import wait_gone

pytestmark = pytest.mark.timeout(120)

HEAD = """
import asyncio
import ctypes
import multiprocessing
import os
import sys
import threading
import time
import pickle
from astraflow.service.frames import Frame, pack


def own(text):
    return len(text) / 100


def write_to_sockets(data):
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), data)


"""
FORKS = {
    "returns": """
def reward(task, text):
    os.fork()
    return own(text)
""",
    "returns first": """
def reward(task, text):
    pid = os.fork()
    if pid == 0:
        return -1.0
    os.waitpid(pid, 0)
    return own(text)
""",
    "returns late": """
def reward(task, text):
    if os.fork() == 0:
        time.sleep(0.3)
        return -1.0
    return own(text)
""",
    "raises": """
def reward(task, text):
    if os.fork() == 0:
        raise ValueError("in the fork")
    time.sleep(0.05)
    return own(text)
""",
    "exits": """
def reward(task, text):
    if os.fork() == 0:
        sys.exit(0)
    time.sleep(0.05)
    return own(text)
""",
    "forks again": """
def reward(task, text):
    os.fork()
    os.fork()
    return own(text)
""",
    "forks without Python": """
def reward(task, text):
    ctypes.CDLL(None).fork()
    return own(text)
""",
    "is async": """
async def reward(task, text):
    await asyncio.sleep(0)
    if os.fork() == 0:
        await asyncio.sleep(0.01)
        return -1.0
    await asyncio.sleep(0.05)
    return own(text)
""",
    "is a class": """
os.fork()


class reward:
    def __init__(self):
        os.fork()

    def __call__(self, task, text):
        os.fork()
        return own(text)
""",
    "closes its stderr": """
def reward(task, text):
    if os.fork() == 0:
        os.closerange(0, 3)
    return own(text)
""",
    "has a thread that forks": """
def reward(task, text):
    thread = threading.Thread(target=os.fork)
    thread.start()
    thread.join()
    return own(text)
""",
    "uses multiprocessing": """
def reward(task, text):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(own, (text,))
""",
    "leaves a process that holds the pipe": """
def reward(task, text):
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return own(text)
""",
    "answers for another call": """
def reward(task, text):
    write_to_sockets(pack(Frame("answer", 99, pickle.dumps([-1.0]))))
    return own(text)
""",
    "prints": """
def reward(task, text):
    print("[1, 2]", flush=True)
    os.write(1, b"0.25")
    return own(text)
""",
}


def make_pool(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, form: type[Use] = Use) -> ScoringPool:
    (folder / "forking.py").write_text(HEAD + code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("OF_TEST", str(folder))
    sources = {"s": JsonlSourceConfig(path="x")}
    return ScoringPool(TasksConfig(sources=sources, reward=form(use="forking:reward"), score_timeout_s=20.0))


def scoring_processes(folder: Path) -> list[psutil.Process]:
    """All processes that were started with the folder in their environment."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_tracker = "resource_tracker" in " ".join(process.cmdline())  # ends with the tests
            if not is_tracker and process.environ().get("OF_TEST") == str(folder):
                found.append(process)
    return found


async def score_text(pool: ScoringPool, length: int) -> float:
    return await pool.score(Task(id=f"s/{length}", source="s", prompt="p", answer="1"), "x" * length)


@pytest.mark.parametrize("how", FORKS)
async def test_each_text_gets_its_own_score_from_a_reward_that_forks(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(tmp_path, monkeypatch, FORKS[how])
    try:
        await pool.start()
        one_by_one = [await score_text(pool, length) for length in range(8)]
        at_once = await asyncio.gather(*[score_text(pool, length) for length in range(8, 12)])
        assert scoring_processes(tmp_path)
    finally:
        await pool.close()
    assert [*one_by_one, *at_once] == [length / 100 for length in range(12)]
    assert wait_gone([process.pid for process in scoring_processes(tmp_path)], timeout_s=20.0) == []


BAD_ANSWERS = {
    "no frame": 'write_to_sockets(b"hello")',
    "no pickle": 'write_to_sockets(pack(Frame("answer", 5, b"hello")))',
    "a frame without an end": 'write_to_sockets(b"\\0\\0\\0\\x50x"); os._exit(3)',
    "an end": "os._exit(3)",
    "an end as if all were well": "os._exit(0)",
    "a closed pipe": "os.closerange(3, 65_536)",
}


@pytest.mark.parametrize("how", BAD_ANSWERS)
async def test_an_invalid_answer_of_a_reward_costs_its_call_alone(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
def reward(task, text):
    if len(text) == 3:
        {BAD_ANSWERS[how]}
    return own(text)
"""
    pool = make_pool(tmp_path, monkeypatch, code)
    outcomes: list[float | str] = []
    try:
        await pool.start()
        for length in range(6):
            try:
                outcomes.append(await score_text(pool, length))
            except RolloutError as err:
                outcomes.append("lost" if err.is_retryable and "died" in str(err) else str(err))
    finally:
        await pool.close()
    assert outcomes == [0.0, 0.01, 0.02, "lost", 0.04, 0.05]
