import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from astraflow.config import Use
from astraflow.errors import ConfigError, LateScoreError, RolloutError
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.config import ExactReward, JsonlSourceConfig, RewardConfig, TasksConfig
from drivers.rollout_fakes import make_task

REWARDS = """
import json
import os
import time

class OddError(Exception):
    def __init__(self, a, b):
        super().__init__(a)

def leave_a_child(path):
    # in a session of its own, with a parent that is gone
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            while True:
                time.sleep(60)
        os._exit(0)
    while not os.path.exists(path) or not os.path.getsize(path):
        pass

def moody(task, text):
    if text == "hang":
        while True:
            pass
    if text == "die":
        os._exit(7)
    if text == "exit":
        raise SystemExit(0)
    if text == "interrupt":
        raise KeyboardInterrupt
    if text == "environment":
        return float("ASTRAFLOW_TOKEN" in os.environ)
    if text.startswith(("leave ", "fork and die ")):
        leave_a_child(text.split()[-1])
        if "die" in text:
            os._exit(7)
        while True:
            pass
    if text == "odd":
        raise OddError(1, 2)
    if text == "bug":
        return json.loads(text)
    if text == "nan":
        return float("nan")
    if text == "word":
        return "good"
    if text == "torch":
        import sys
        return float("torch" in sys.modules)
    return float(text == task.answer)
"""


def make_tasks(reward: RewardConfig, *, timeout_s: float = 5.0) -> TasksConfig:
    return TasksConfig(
        sources={"sums": JsonlSourceConfig(path="sums.jsonl")}, reward=reward, score_timeout_s=timeout_s
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ScoringPool]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "moody_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    pool = ScoringPool(make_tasks(Use(use="moody_rewards:moody"), timeout_s=0.5), num_workers=1)
    await pool.start()
    yield pool
    await pool.close()
    sys.path.remove(str(folder))


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_reward_of_the_users_own_runs_in_a_worker_without_torch(pool: ScoringPool) -> None:
    assert await pool.score(make_task(), "5") == 1.0
    assert await pool.score(make_task(), "torch") == 0.0


async def test_a_reward_that_loops_for_ever_is_ended_and_the_pool_works_on(pool: ScoringPool) -> None:
    hanging, waiting = await asyncio.gather(
        pool.score(make_task(idx=3), "hang"), pool.score(make_task(), "5"), return_exceptions=True
    )
    assert isinstance(hanging, LateScoreError)
    assert hanging.is_retryable  # the machine may have been busy
    assert "sums/3" in str(hanging)
    assert "score_timeout_s" in str(hanging)
    assert waiting == 1.0


async def test_a_scorer_that_dies_fails_one_call_and_is_replaced(pool: ScoringPool) -> None:
    with pytest.raises(RolloutError, match="sums/0: the scoring process died") as failure:
        await pool.score(make_task(), "die")
    assert failure.value.is_retryable
    assert await pool.score(make_task(), "5") == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("odd", "OddError"),
        ("nan", "returned nan"),
        ("word", "'good'"),
        ("exit", "the reward raised SystemExit: 0"),
        ("interrupt", "the reward raised KeyboardInterrupt"),
    ],
)
async def test_a_reward_that_raises_or_returns_no_number_is_named(
    pool: ScoringPool, text: str, message: str
) -> None:
    with pytest.raises(RolloutError, match=message) as failure:
        await pool.score(make_task(), text)
    assert not failure.value.is_retryable


async def test_a_reward_that_raises_is_told_by_the_users_own_line(pool: ScoringPool) -> None:
    with pytest.raises(RolloutError) as failure:
        await pool.score(make_task(), "bug")
    number = REWARDS.splitlines().index("        return json.loads(text)") + 1
    assert str(failure.value).startswith("task sums/0: the reward raised JSONDecodeError: Expecting value:")
    assert str(failure.value).endswith(f"moody_rewards.py, line {number}, in moody: return json.loads(text))")


@pytest.mark.parametrize(
    ("text", "message"), [("leave", "score_timeout_s"), ("fork and die", "process died")]
)
async def test_what_a_reward_started_ends_with_its_process(
    pool: ScoringPool, tmp_path: Path, text: str, message: str
) -> None:
    trace = tmp_path / "pid"
    async with asyncio.timeout(50):
        error = ""
        # On a busy machine the pool's half second may end before the reward has got so far.
        while message not in error or not trace.exists() or not trace.read_text():
            with pytest.raises(RolloutError) as failure:
                await pool.score(make_task(), f"{text} {trace}")
            error = str(failure.value)
        while is_running(int(trace.read_text())):  # noqa: ASYNC110 - nobody tells of a stranger's end
            await asyncio.sleep(0.01)
    assert await pool.score(make_task(), "5") == 1.0


async def test_a_reward_sees_no_token_of_the_service(
    pool: ScoringPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "secret")
    for text in ("die", "hang"):  # a worker that starts now inherits the token
        with pytest.raises(RolloutError):
            await pool.score(make_task(), text)
    assert await pool.score(make_task(), "environment") == 0.0


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


async def test_an_episode_cancelled_while_scoring_leaves_the_worker_alone(pool: ScoringPool) -> None:
    call = asyncio.create_task(pool.score(make_task(), "5"))
    await asyncio.sleep(0)
    call.cancel()
    assert await pool.score(make_task(), "5") == 1.0


async def test_a_reward_that_cannot_be_built_is_a_config_error_at_the_start() -> None:
    pool = ScoringPool(make_tasks(Use(use="no_such_module:reward")))
    with pytest.raises(ConfigError, match="no_such_module"):
        await pool.start()
    await pool.close()


async def test_a_comparison_needs_no_process() -> None:
    pool = ScoringPool(make_tasks(ExactReward()))
    await pool.start()
    assert await pool.score(make_task(), " 5\n") == 1.0
    await pool.close()


async def test_a_format_that_backtracks_for_ever_blocks_nobody_and_fails_its_episode() -> None:
    tasks = make_tasks(ExactReward(), timeout_s=0.5)
    pool = ScoringPool(tasks.model_copy(update={"format": "(a|a)*b", "format_weight": 0.5}))
    await pool.start()
    loop = asyncio.get_running_loop()
    call = asyncio.create_task(pool.score(make_task(), "a" * 40))
    longest_s, last_s = 0.0, loop.time()
    while not call.done():
        await asyncio.sleep(0.01)
        longest_s, last_s = max(longest_s, loop.time() - last_s), loop.time()
    with pytest.raises(LateScoreError, match=r"took longer than tasks.score_timeout_s = 0.5"):
        await call
    assert longest_s < 0.5
    assert await pool.score(make_task(), "5") == 0.5
    await pool.close()


# --- async rewards --------------------------------------------------------------------------------

JUDGES = """
import asyncio

meeting = asyncio.Barrier(8)
client = []  # what belongs to the event loop of the first call

async def judged(task, text):
    if not client:
        client.append(asyncio.get_running_loop())
    if text == "meet":
        await meeting.wait()
    if text == "late":
        await asyncio.Event().wait()
    if text == "hang":
        while True:
            pass
    if text == "leave":
        raise SystemExit(3)
    if text == "cancel":
        raise asyncio.CancelledError
    if text == "bug":
        return client["score"]
    return float(client[0] is asyncio.get_running_loop())
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judges(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ScoringPool]:
    folder = tmp_path_factory.mktemp("judges")
    (folder / "judges.py").write_text(JUDGES)
    sys.path.insert(0, str(folder))
    pool = ScoringPool(make_tasks(Use(use="judges:judged"), timeout_s=2.0), num_workers=1)
    await pool.start()
    yield pool
    await pool.close()
    sys.path.remove(str(folder))


async def test_calls_of_an_async_reward_run_at_the_same_time_in_one_process(judges: ScoringPool) -> None:
    calls = [judges.score(make_task(idx=idx), "meet") for idx in range(8)]
    assert await asyncio.gather(*calls) == [1.0] * 8
    assert await judges.score(make_task(), "again") == 1.0  # on the same event loop


async def test_an_async_call_over_its_deadline_fails_alone(judges: ScoringPool) -> None:
    late, well = await asyncio.gather(
        judges.score(make_task(idx=3), "late"), judges.score(make_task(), "5"), return_exceptions=True
    )
    assert isinstance(late, LateScoreError)
    assert "sums/3: " in str(late)
    assert "score_timeout_s = 2.0" in str(late)
    assert late.is_retryable
    assert well == 1.0


async def test_an_async_reward_that_blocks_ends_its_process_and_the_others_are_scored_again(
    judges: ScoringPool,
) -> None:
    texts = ["5", "hang", "6"]
    scores = await asyncio.gather(
        *[judges.score(make_task(idx=idx), text) for idx, text in enumerate(texts)], return_exceptions=True
    )
    assert isinstance(scores[1], LateScoreError)
    assert "sums/1: the reward took longer" in str(scores[1])
    assert (scores[0], scores[2]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leave", "the reward raised SystemExit: 3"),
        ("cancel", "the reward raised CancelledError"),
        ("bug", r"raised TypeError: .*judges\.py, line \d+, in judged: return client\[\"score\"\]"),
    ],
)
async def test_an_async_reward_that_raises_is_told_by_the_users_own_line(
    judges: ScoringPool, text: str, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        await judges.score(make_task(), text)


async def test_an_episode_that_is_cancelled_leaves_the_other_async_calls_alone(judges: ScoringPool) -> None:
    leaving = asyncio.create_task(judges.score(make_task(), "5"))
    staying = asyncio.create_task(judges.score(make_task(), "5"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == 1.0
