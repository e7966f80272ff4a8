"""Scorers of reasoning-gym that run answers as Python, in the sandbox."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from astraflow.addons.reasoning_gym.config import ReasoningGymConfig
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.errors import ConfigError, RolloutError
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.config import SourceReward, TasksConfig
from astraflow.tasks.rewards import make_reward
from astraflow.tasks.sources import make_source
from astraflow.types import Task

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),  # the pool lives in the module's loop
]

CONFIG = ReasoningGymConfig(dataset="string_insertion", size=5)
TASKS = TasksConfig(sources={"s": CONFIG}, reward=SourceReward(), score_timeout_s=90.0)
"""The deadline includes starting a box and importing the library, which can take many seconds on a busy
machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[ScoringPool]:
    """One pool for all tests, because its boxes take seconds to start. A broken box is replaced."""
    try:
        async with Sandbox():
            pass
    except ConfigError as err:
        pytest.skip(str(err))
    made = ScoringPool(TASKS)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def test_code_in_a_completion_cannot_reach_the_file_system(pool: ScoringPool, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    task = make_source(CONFIG, name="s").task(0)
    attack = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    assert await pool.score(task, attack) < 0.1
    assert not trace.exists()
    assert await pool.score(task, task.answer) == 1.0
    # The same text outside of the box does what it says.
    allowed = TASKS.model_copy(update={"reward": SourceReward(allow=("string_insertion",))})
    make_reward(allowed)(task, attack)
    assert trace.exists()


async def test_an_answer_that_crashes_its_scorer_scores_zero(pool: ScoringPool) -> None:
    task = make_source(CONFIG, name="s").task(1)
    assert await pool.score(task, "__import__('os').abort()") == 0.0
    assert await pool.score(task, "__import__('os').fork()") == 0.0


async def test_a_task_that_this_machine_generates_differently_is_an_error(pool: ScoringPool) -> None:
    task = make_source(CONFIG, name="s").task(0)
    altered = Task(id=task.id, source="s", prompt="another", answer=task.answer, spec=task.spec)
    with pytest.raises(RolloutError, match="same version of reasoning-gym"):
        await pool.score(altered, task.answer)
