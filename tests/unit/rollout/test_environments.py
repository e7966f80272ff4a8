"""Environments of a rollout service: nothing that they do stops the service, and nothing of them is left."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import pytest

from astraflow import wire
from astraflow.errors import ConfigError, RolloutError
from astraflow.rollout.environments import Environments
from astraflow.rollout.runner import EpisodeRunner, ProposalSink
from astraflow.tasks.config import EnvironmentConfig
from astraflow.types import Episode, Failure, Message, PushTasks, PushTasksReply
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.environment import environment
from drivers.environment_fakes import MADE, Counting, Lazy, Plain, Waiting, config_of, task_of
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_lease, make_task


@asynccontextmanager
async def opened(configs: Mapping[str, EnvironmentConfig]) -> AsyncGenerator[Environments]:
    environments = Environments(configs)
    try:
        await environments.open()
        yield environments
    finally:
        await environments.close()


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 5)


@pytest.mark.parametrize("kind", [Counting, Lazy])
async def test_it_is_opened_once_played_by_many_and_closed_once(kind: type[Counting]) -> None:
    async with opened({"count": config_of(kind)}) as environments:
        made: Counting = MADE[-1]

        async def play(seed: int) -> list[float]:
            async with environments.episode(task_of("count"), seed=seed) as episode:
                return [(await episode.step(reply)).reward for reply in ("good", "bad", "good")]

        rewards = await asyncio.gather(*(play(seed) for seed in range(4)))
        assert made.calls[0] == "open"
        assert made.calls.count("close") == 0
    assert rewards == [[1.0, 0.0, 1.0]] * 4
    assert sorted(game.seed for game in made.ended) == [0, 1, 2, 3]
    assert [made.calls.count(name) for name in ("open", "reset", "step", "end", "close")] == [1, 4, 12, 4, 1]
    assert made.calls[-1] == "close"


async def test_all_calls_of_an_episode_come_from_one_thread_that_is_not_the_event_loops() -> None:
    async with opened({"count": config_of(Counting)}) as environments:
        async with environments.episode(task_of("count"), seed=0) as episode:
            await episode.step("good")
        (game,) = MADE[-1].games
    assert len(game.threads) == 1
    assert threading.get_ident() not in game.threads


async def test_a_call_that_blocks_holds_up_no_other_episode_and_fails_at_its_deadline() -> None:
    async with opened({"slow": config_of(Waiting, timeout_s=0.05, method="step")}) as environments:
        slow: Waiting = MADE[-1]
        with pytest.raises(RolloutError, match=r"slow: `step` took longer than 0\.05 s") as caught:
            async with environments.episode(task_of("slow"), seed=0) as episode:
                await episode.step("good")
        assert caught.value.is_retryable
        assert slow.ended == []
        slow.gate.set()
        await reached(slow.has_ended)


async def test_an_episode_whose_reset_came_too_late_is_ended_all_the_same() -> None:
    async with opened({"slow": config_of(Waiting, timeout_s=0.05, method="reset")}) as environments:
        slow: Waiting = MADE[-1]
        with pytest.raises(RolloutError, match="`reset` took longer"):
            async with environments.episode(task_of("slow"), seed=0):
                pass
        slow.gate.set()
        await reached(slow.has_ended)
        assert slow.ended == slow.games


async def test_a_cancelled_episode_is_ended_before_its_environment_is_closed() -> None:
    async with opened({"slow": config_of(Waiting, method="step")}) as environments:
        slow: Waiting = MADE[-1]

        async def play() -> None:
            async with environments.episode(task_of("slow"), seed=0) as episode:
                await episode.step("good")

        playing = asyncio.create_task(play())
        await reached(slow.reached)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        slow.gate.set()
    assert slow.calls == ["open", "reset", "step", "end", "close"]


@pytest.mark.parametrize(
    ("fails", "error", "message"),
    [
        ({"reset": "raise"}, ValueError, "a bug of the environment"),
        ({"step": "raise"}, ValueError, "a bug of the environment"),
        ({"step": "retry"}, RolloutError, "the world is down"),
        ({"end": "raise"}, ValueError, "a bug of the environment"),
        ({"step": "exit"}, RolloutError, r"task sums/0: environment count: `step` raised SystemExit: 3"),
        ({"reset": "none"}, RolloutError, "`reset` returned 'nothing.*; expected a state and an Observation"),
        ({"step": "none"}, RolloutError, "`step` returned str; expected an Observation"),
        ({"step": "nan"}, RolloutError, "`step` returned the reward nan; expected a finite number"),
    ],
)
@pytest.mark.parametrize("kind", [Counting, Lazy])
async def test_a_method_that_fails_fails_the_episode(
    kind: type[Counting], fails: dict[str, str], error: type[Exception], message: str
) -> None:
    async with opened({"count": config_of(kind, fails=fails)}) as environments:
        made: Counting = MADE[-1]
        with pytest.raises(error, match=message):
            async with environments.episode(task_of("count"), seed=0) as episode:
                await episode.step("good")
        if "reset" not in fails:
            await reached(made.has_ended)
            assert made.ended == made.games
    assert made.calls[-1] == "close"


@pytest.mark.parametrize(
    ("fails", "is_retryable"),
    [
        ("raise", False),
        ("retry", True),
        ("exit", False),
        ("nan", False),
        ("text", False),
        ("mangled", False),
    ],
)
async def test_a_failure_of_the_environment_is_a_failed_episode_and_no_reward_of_0(
    fails: str, is_retryable: bool
) -> None:
    async with opened({"count": config_of(Counting, fails={"step": fails})}) as environments:
        hosted = {"actor": make_hosted("actor", ScriptedEngine("good"))}
        runner = EpisodeRunner(hosted, environment, exact, environments=environments)
        result = await runner.run(make_lease("1.0.0", task=task_of("count")))
    assert isinstance(result.outcome, Failure)
    assert result.outcome.is_retryable is is_retryable
    assert wire.checked(result) == result


async def test_a_reward_may_be_a_tensor_and_a_text_may_have_half_a_surrogate_pair() -> None:
    async with opened({"count": config_of(Counting, fails={"step": "tensor"})}) as environments:
        runner = EpisodeRunner(
            {"actor": make_hosted("actor", ScriptedEngine("good"))},
            lambda task, policies: environment(task, policies, max_turns=2),
            exact,
            environments=environments,
        )
        episode = await runner.episode(task_of("count"), seed=1)
    assert [turn.reward for turn in episode.trajectories[0].turns] == [0.5, 0.5]
    assert episode.messages[2] == Message(role="user", content="name\ufffd")


async def test_each_turn_has_the_reward_of_its_reply() -> None:
    replies = iter(["good", "bad", "good"])
    engine = ScriptedEngine(lambda _: next(replies))
    async with opened({"count": config_of(Counting)}) as environments:
        runner = EpisodeRunner(
            {"actor": make_hosted("actor", engine)}, environment, exact, environments=environments
        )
        result = await runner.run(make_lease("1.0.0", task=task_of("count"), seed=9))
        (game,) = MADE[-1].games
    assert isinstance(result.outcome, Episode)
    (trajectory,) = result.outcome.trajectories
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.0, 1.0]
    assert [turn.state_key for turn in trajectory.turns] == ["", "left 2", "left 1"]
    assert result.outcome.score == 2.0
    assert [(m.role, m.content) for m in result.outcome.messages] == [
        ("user", "Begin."),
        ("assistant", "good"),
        ("tool", "2 left"),
        ("assistant", "bad"),
        ("tool", "1 left"),
        ("assistant", "good"),
    ]
    assert game.seed == 9
    assert {m.name: m.value for m in result.outcome.metrics}["done"] == 1.0


async def test_an_episode_that_is_not_done_in_time_keeps_the_rewards_that_it_has() -> None:
    async with opened({"count": config_of(Counting)}) as environments:
        runner = EpisodeRunner(
            {"actor": make_hosted("actor", ScriptedEngine("good"))},
            lambda task, policies: environment(task, policies, max_turns=2),
            exact,
            environments=environments,
        )
        episode = await runner.episode(task_of("count"), seed=1)
        (made,) = MADE[-1].ended
    assert episode.score == 2.0
    assert made.left == 1
    assert {m.name: m.value for m in episode.metrics}["done"] == 0.0


async def test_an_episode_continues_after_a_reply_of_one_token() -> None:
    async with opened({"count": config_of(Counting)}) as environments:
        runner = EpisodeRunner(
            {"actor": make_hosted("actor", ScriptedEngine(""))},  # the token that ends a turn, alone
            lambda task, policies: environment(task, policies, max_turns=3),
            exact,
            environments=environments,
        )
        episode = await runner.episode(task_of("count"), seed=1)
    assert [turn.end - turn.start for turn in episode.trajectories[0].turns] == [1, 1, 1]


async def test_an_environment_that_is_done_at_once_is_an_error() -> None:
    async with opened({"count": config_of(Counting)}) as environments:
        runner = EpisodeRunner(
            {"actor": make_hosted("actor", ScriptedEngine())}, environment, exact, environments=environments
        )
        with pytest.raises(RolloutError, match="the environment was done before the first reply"):
            await runner.episode(task_of("count", spec="0"), seed=1)


async def test_tools_of_the_first_observation_are_shown_by_the_template() -> None:
    async with opened({"count": config_of(Counting, shows_tool=True)}) as environments:
        runner = EpisodeRunner(
            {"actor": make_hosted("actor", ScriptedEngine())}, environment, exact, environments=environments
        )
        with pytest.raises(RolloutError, match="its renderer cannot show tools"):
            await runner.episode(task_of("count"), seed=1)


async def test_a_task_without_an_environment_that_can_be_played_says_so() -> None:
    async with opened({"plain": config_of(Plain)}) as environments:
        for task, message in [
            (make_task(), "task sums/0 does not belong to an environment"),
            (task_of("other"), r"belongs to environment 'other'.*\(open here: plain\)"),
            (task_of("plain"), "environment 'plain' lacks `reset`, `step`, or `end`"),
        ]:
            runner = EpisodeRunner(
                {"actor": make_hosted("actor", ScriptedEngine())},
                environment,
                exact,
                environments=environments,
            )
            with pytest.raises(RolloutError, match=message):
                await runner.episode(task, seed=1)


@pytest.mark.parametrize("fails", ["raise", "exit"])
async def test_an_environment_that_does_not_open_is_named_and_those_before_are_closed(fails: str) -> None:
    configs = {"first": config_of(Counting), "second": config_of(Counting, fails={"open": fails})}
    with pytest.raises(ConfigError, match=r"tasks\.environments\.second cannot be opened"):
        async with opened(configs):
            pass
    assert MADE[-2].calls == ["open", "close"]


async def test_closing_survives_an_environment_that_raises() -> None:
    async with opened({"bad": config_of(Counting, fails={"close": "raise"}), "good": config_of(Counting)}):
        bad, good = MADE[-2:]
    assert (bad.calls, good.calls) == (["open", "close"], ["open", "close"])


async def test_a_proposed_task_belongs_to_the_environment_of_its_episode() -> None:
    pushed: list[PushTasks] = []

    async def push(tasks: PushTasks) -> PushTasksReply:
        pushed.append(tasks)
        return PushTasksReply(num_accepted=1, num_known=0)

    async def proposes(task: ScoredTask, policies: Policies) -> Rewards:
        assert task.spec == "3"
        await task.propose("more?", spec="4")
        return await environment(task, policies)

    async with opened({"count": config_of(Counting)}) as environments:
        runner = EpisodeRunner(
            {"actor": make_hosted("actor", ScriptedEngine("good"))},
            proposes,
            exact,
            proposals=ProposalSink(push, 4),
            environments=environments,
        )
        assert isinstance((await runner.run(make_lease("1.0.0", task=task_of("count")))).outcome, Episode)
        async with environments.episode(pushed[0].tasks[0], seed=0) as episode:
            assert not episode.observation.is_done
        assert MADE[-1].games[-1].left == 4
