"""The times of scoring among an episode's metrics, and how many calls took too long."""

from collections.abc import Awaitable, Callable

import msgspec

from astraflow.errors import LateScoreError, RolloutError, ScorerError
from astraflow.rollout.evaluation import EvalOverrides
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, Failure, Task
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_lease, make_task


def scoring(num_calls: int) -> Callable[[ScoredTask, Policies], Awaitable[Rewards]]:
    """A workflow that scores a completion several times."""

    async def workflow(task: ScoredTask, policies: Policies) -> Rewards:
        chat = policies["actor"].conversation()
        answer = await chat.say(task.prompt)
        for _ in range(num_calls):
            await task.score(answer.text)
        rewards = Rewards()
        rewards.add(chat, 1.0)
        rewards.add_time("own_s", 2.0)
        return rewards

    return workflow


async def times(num_calls: int) -> dict[str, list[tuple[float, str]]]:
    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine())}, scoring(num_calls), exact)
    found: dict[str, list[tuple[float, str]]] = {}
    for item in (await runner.episode(make_task(), seed=1)).metrics:
        found.setdefault(item.name, []).append((item.value, item.reduction))
    return found


async def test_each_call_of_the_reward_has_its_time() -> None:
    found = await times(3)
    seconds = [value for value, _ in found["score_call_s_p50"]]
    assert len(seconds) == 3
    assert {reduction for _, reduction in found["score_call_s_p50"]} == {"p50"}
    assert [(value, "p95") for value in seconds] == found["score_call_s_p95"]
    assert found["score_s"] == [(sum(seconds), "mean")]
    assert found["own_s_p50"] == [(2.0, "p50")]
    assert found["own_s_p95"] == [(2.0, "p95")]


async def test_an_episode_that_scores_nothing_has_no_times() -> None:
    found = await times(0)
    assert found["score_s"] == [(0.0, "mean")]
    assert "score_call_s_p50" not in found


async def test_the_times_of_an_episode_are_bounded() -> None:
    assert len((await times(200))["score_call_s_p95"]) == 64


# --- calls that took too long -----------------------------------------------------------------------


def timeouts(episode: object) -> list[tuple[float, str]]:
    assert isinstance(episode, Episode)
    return [(item.value, item.reduction) for item in episode.metrics if item.name == "score_timeouts"]


async def test_the_next_good_episode_tells_how_many_scores_came_too_late() -> None:
    errors: list[RolloutError] = [LateScoreError("late"), LateScoreError("late"), RolloutError("it raised")]

    async def score(task: Task, text: str) -> float:
        if errors:
            raise errors.pop()
        return await exact(task, text)

    engine = ScriptedEngine()
    engine.slots = {"live": 0}
    runner = EpisodeRunner({"actor": make_hosted("actor", engine)}, scoring(1), score)
    for lease_id in ("a", "b", "c"):
        assert isinstance((await runner.run(make_lease(lease_id))).outcome, Failure)
    assert timeouts((await runner.run(make_lease("d", pinned={"actor": 0}))).outcome) == []
    assert timeouts((await runner.run(make_lease("e"))).outcome) == [(2.0, "sum")]
    assert timeouts((await runner.run(make_lease("f"))).outcome) == [(0.0, "sum")]
    assert runner.num_late_scores == 2


async def test_late_scores_and_scorer_errors_of_all_episodes_are_counted() -> None:
    async def late(task: Task, text: str) -> float:
        raise LateScoreError("late")

    async def broken(task: Task, text: str) -> float:
        raise ScorerError("the library broke")

    evaluation = {"heldout": EvalOverrides(score=broken)}
    engine = ScriptedEngine()
    engine.slots = {"live": 0}
    hosted = {"actor": make_hosted("actor", engine)}
    runner = EpisodeRunner(hosted, scoring(1), late, evaluation=evaluation)
    await runner.run(make_lease("a"))
    assert (runner.num_late_scores, runner.num_scorer_errors) == (1, 0)
    lease = make_lease("b", pinned={"actor": 0})
    failed = (await runner.run(msgspec.structs.replace(lease, eval_set="heldout"))).outcome
    assert isinstance(failed, Failure)
    assert failed.error_class == "ScorerError"
    assert (runner.num_late_scores, runner.num_scorer_errors) == (1, 1)
