"""Scoring processes on a slow, busy or broken machine: a right answer gets its score, or fails as late."""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from astraflow.addons.math.config import MathVerifyReward
from astraflow.errors import LateScoreError, RolloutError
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.config import JsonlSourceConfig, TasksConfig, TrlReward
from astraflow.types import Task

TASKS = TasksConfig(
    sources={"s": JsonlSourceConfig(path="x")},
    reward=MathVerifyReward(),
    extract="boxed",
    score_timeout_s=60.0,
)

SLOW_DISK = """
import sys
import time


class SlowDisk:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("sympy", "latex2sympy2", "math_verify")):
            time.sleep(0.012)


sys.meta_path.insert(0, SlowDisk())
"""

ENDLESS_TEXT = """
from latex2sympy2_extended import latex2sympy2

from astraflow.addons.math import scorer

scorer._CPU_S = 0.5
parse = latex2sympy2.latex2sympy


def latex2sympy(text, *args, **kwargs):
    while "98" in text:
        pass
    return parse(text, *args, **kwargs)


latex2sympy2.latex2sympy = latex2sympy
"""


@asynccontextmanager
async def pool_with(site: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScoringPool]:
    """A pool whose processes run `site` when they start."""
    (folder / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    pool = ScoringPool(TASKS)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def right_answers(pool: ScoringPool, num: int) -> list[float]:
    return [await right_answer(pool, factor) for factor in range(2, num + 2)]


async def right_answer(pool: ScoringPool, factor: int) -> float:
    task = Task(id=f"s/{factor}", source="s", prompt="p", answer=rf"\sqrt{{{2 * factor**2}}}")
    return await pool.score(task, rf"\boxed{{{factor}\sqrt2}}")


def scoring_process(folder: Path) -> psutil.Process:
    """The keeper of the only process of the pool whose `sitecustomize.py` is in the folder.

    A pool of an earlier test may still be ending in this process.
    """
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    children = [child for child in running if "service.keeper" in " ".join(child.cmdline())]
    (worker,) = [child for child in children if child.environ().get("PYTHONPATH", "").startswith(str(folder))]
    return worker


@contextmanager
def suppress_retryable() -> Iterator[None]:
    try:
        yield
    except RolloutError as err:
        if not err.is_retryable:
            raise


async def test_right_answers_get_their_score_where_libraries_load_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_with(SLOW_DISK, tmp_path, monkeypatch) as pool:
        assert await right_answers(pool, 5) == [1.0] * 5


async def test_a_comparison_that_takes_too_long_is_late_and_the_next_ones_have_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_with(ENDLESS_TEXT, tmp_path, monkeypatch) as pool:
        assert await right_answers(pool, 1) == [1.0]
        before = scoring_process(tmp_path)
        with pytest.raises(LateScoreError, match=r"s/7: .* more than 0.5 s of CPU time"):
            await right_answer(pool, 7)
        assert await right_answers(pool, 3) == [1.0] * 3
        assert not before.is_running()


async def test_a_scoring_process_that_is_killed_while_nobody_needs_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_with("", tmp_path, monkeypatch) as pool:
        scoring_process(tmp_path).kill()
        scores: list[float] = []
        while not scores:  # a call that met the end of the worker fails, and may be tried again
            with suppress_retryable():
                scores = await right_answers(pool, 2)
        assert scores == [1.0, 1.0]


async def test_a_late_call_of_a_cancelled_episode_leaves_no_error_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_reward.py").write_text(
        "import time\n\n\ndef slow(completions, **columns):\n    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    unread: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context["message"]))
    pool = ScoringPool(
        TASKS.model_copy(update={"reward": TrlReward(use="slow_reward:slow"), "score_timeout_s": 1.0})
    )
    try:
        await pool.start()
        call = asyncio.create_task(
            pool.score(Task(id="s/1", source="s", prompt="p", answer="1"), r"\boxed{1}")
        )
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        with pytest.raises(LateScoreError):  # the next call ends late too, after the first
            await pool.score(Task(id="s/2", source="s", prompt="p", answer="1"), r"\boxed{1}")
    finally:
        await pool.close()
    del call  # its traceback refers to the future of the late call
    gc.collect()
    assert unread == []
