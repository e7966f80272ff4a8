import asyncio
import gc
import math
import os
import re
import sys
import weakref
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from astraflow import wire
from astraflow.errors import ConfigError, DeadlineError, Error, RolloutError
from astraflow.protocols import CompletionText, TokenScores
from astraflow.rollout.dialogue import HostedPolicy, generation_seed
from astraflow.rollout.evaluation import EvalOverrides
from astraflow.rollout.runner import EpisodeRunner, classify_failure
from astraflow.types import Episode, Failure, GenerateRequest, Message, Task
from astraflow.wire import array
from astraflow.workflows.conversation import Completion, Policies, Rewards, ScoredTask
from astraflow.workflows.single_turn import single_turn
from drivers.rollout_fakes import (
    STOP,
    CharRenderer,
    ScriptedEngine,
    exact,
    ids_of,
    make_hosted,
    make_lease,
    make_task,
)


async def solve_and_verify(task: ScoredTask, policies: Policies, *, rounds: int = 2) -> Rewards:
    rewards, chat, prompt = Rewards(), policies["solver"].conversation(), task.prompt
    for _ in range(rounds):
        answer = await chat.say(prompt)
        correct = await task.score(answer.text)
        check = await policies["verifier"].chat(f"{task.prompt}\n{answer.text}\nRight?")
        accepts = check.text.startswith("yes")
        rewards.add(check, float(accepts == bool(correct)))
        if accepts:
            break
        prompt = f"A reviewer objects: {check.text}"
    rewards.add(chat, correct)
    return rewards


def text_of(ids: bytes) -> str:
    return "".join(chr(i) if i > 5 else "|" for i in array(ids, "int32").tolist())


async def test_the_agent_pair_makes_token_exact_trajectories_of_both_policies() -> None:
    solver = ScriptedEngine(lambda r: "5" if len(r.token_ids) > 10 else "4")
    verifier = ScriptedEngine(lambda r: "yes" if "\n5\n" in "".join(map(chr, r.token_ids)) else "no")
    runner = EpisodeRunner(
        {"solver": make_hosted("solver", solver), "verifier": make_hosted("verifier", verifier)},
        solve_and_verify,
        exact,
    )
    episode = await runner.episode(make_task(), seed=1)
    chat, first, second = episode.trajectories
    assert [t.policy for t in episode.trajectories] == ["solver", "verifier", "verifier"]
    assert text_of(chat.token_ids) == "|2+3||4||A reviewer objects: no||5|"
    assert [t.reward for t in (chat, first, second)] == [1.0, 1.0, 1.0]
    assert second.turns[0].reward == 1.0
    assert episode.score == 1.0
    # append-only: each request of the solver starts with the last request and what was sampled
    assert solver.requests[1].token_ids[: len(solver.requests[0].token_ids) + 2] == (
        *solver.requests[0].token_ids,
        ord("4"),
        STOP,
    )
    assert [m.content for m in episode.messages[:4]] == ["2+3", "4", "A reviewer objects: no", "5"]


async def test_the_mask_covers_exactly_the_sampled_tokens() -> None:
    engine = ScriptedEngine("5")
    runner = EpisodeRunner({"actor": make_hosted("actor", engine)}, single_turn, exact)
    (trajectory,) = (await runner.episode(make_task(), seed=1)).trajectories
    ids, mask = array(trajectory.token_ids, "int32"), array(trajectory.mask, "uint8").astype(bool)
    assert tuple(ids[~mask].tolist()) == engine.requests[0].token_ids
    assert tuple(ids[mask].tolist()) == (*ids_of("5"), STOP)
    assert trajectory.reward == 1.0


async def three_turns(task: ScoredTask, policies: Policies) -> Rewards:
    rewards, chat = Rewards(), policies["actor"].conversation()
    for text in ("a", "b", "c"):
        rewards.add(await chat.say(text), 1.0)
    return rewards


async def test_stripped_reasoning_forks_and_trains_each_sampled_token_once() -> None:
    engine = ScriptedEngine("<think>hm</think>7")
    hosted = make_hosted("actor", engine, renderer=CharRenderer(strips=True))
    episode = await EpisodeRunner({"actor": hosted}, three_turns, exact).episode(make_task(), seed=1)
    assert [t.is_fork for t in episode.trajectories] == [False, True, True]
    assert [text_of(t.token_ids) for t in episode.trajectories] == [
        "|a||<think>hm</think>7|",
        "|a||7||b||<think>hm</think>7|",
        "|a||7||b||7||c||<think>hm</think>7|",
    ]
    num_sampled = [int(array(t.mask, "uint8").sum()) for t in episode.trajectories]
    assert num_sampled == [len("<think>hm</think>7|")] * 3
    assert [m.value for m in episode.metrics if m.name == "forks"] == [2.0]


async def edited(task: ScoredTask, policies: Policies) -> Rewards:
    chat = policies["actor"].conversation(system="short", role="writer")
    await chat.say("one")
    chat.rewrite((*chat.messages[:1], Message(role="user", content="summary")))
    await chat.say("two")
    rewards = Rewards()
    rewards.add(chat, 0.5)
    return rewards


async def test_a_rewritten_history_is_a_fork_of_the_same_role() -> None:
    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine())}, edited, exact)
    first, fork = (await runner.episode(make_task(), seed=1)).trajectories
    assert (first.is_fork, fork.is_fork) == (False, True)
    assert fork.role == first.role == "writer"
    assert text_of(fork.token_ids) == "|short||summary||two||ok|"


async def test_every_generation_has_its_own_seed_and_the_same_one_again() -> None:
    seeds: list[list[int]] = []
    for _ in range(2):
        engine = ScriptedEngine()
        runner = EpisodeRunner({"actor": make_hosted("actor", engine)}, three_turns, exact)
        await runner.run(make_lease("1", seed=99))
        seeds.append([r.sampling.seed for r in engine.requests])
    assert seeds[0] == seeds[1] == [generation_seed(99, i) for i in range(3)]
    assert len(set(seeds[0])) == 3
    assert generation_seed(99, 0) != generation_seed(100, 0)


async def test_an_eval_lease_generates_with_the_pinned_version_and_temperature() -> None:
    engine = ScriptedEngine()
    engine.slots = {"live": 6, "pinned": 4}
    quarter = EvalOverrides(sampling={"temperature": 0.25})
    runner = EpisodeRunner(
        {"actor": make_hosted("actor", engine)}, single_turn, exact, evaluation={"": quarter}
    )
    result = await runner.run(make_lease("1", pinned={"actor": 4}))
    assert isinstance(result.outcome, Episode)
    assert [(r.version, r.sampling.temperature) for r in engine.requests] == [(4, 0.25)]
    assert result.outcome.trajectories == ()
    assert [m.role for m in result.outcome.messages] == ["user", "assistant"]


async def test_a_frozen_policy_leaves_no_trajectory() -> None:
    frozen = make_hosted("actor", ScriptedEngine("5"), is_trained=False)
    episode = await EpisodeRunner({"actor": frozen}, single_turn, exact).episode(make_task(), seed=1)
    assert episode.trajectories == ()
    assert episode.score == 1.0


async def test_an_overlong_completion_is_truncated_data() -> None:
    engine = ScriptedEngine("x" * 100, max_context=12)
    episode = await EpisodeRunner({"actor": make_hosted("actor", engine)}, three_turns, exact).episode(
        make_task(), seed=1
    )
    (trajectory,) = episode.trajectories
    assert trajectory.finish_reason == "length"
    assert len(trajectory.token_ids) == 12 * 4
    assert len(engine.requests) == 1


async def test_a_prompt_beyond_the_context_is_an_error_that_names_the_setting() -> None:
    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine(max_context=3))}, single_turn, exact)
    with pytest.raises(RolloutError, match="max_context"):
        await runner.episode(make_task(), seed=1)


# --- failures -------------------------------------------------------------------------------------


async def outcome_of(engine: ScriptedEngine, workflow=single_turn, timeout_s: float = 5.0) -> Failure:
    runner = EpisodeRunner({"actor": make_hosted("actor", engine)}, workflow, exact, timeout_s=timeout_s)
    outcome = (await runner.run(make_lease("9"))).outcome
    assert isinstance(outcome, Failure)
    return outcome


async def test_an_engine_failure_is_retryable_and_no_reward() -> None:
    engine = ScriptedEngine()
    engine.error = RolloutError("out of memory")
    failure = await outcome_of(engine)
    assert (failure.error_class, failure.message) == ("RolloutError", "out of memory")
    assert failure.is_retryable


async def test_an_episode_over_its_deadline_fails_and_names_the_setting() -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    failure = await outcome_of(engine, timeout_s=0.01)
    assert (failure.error_class, failure.is_retryable) == ("DeadlineError", True)
    assert "episode_timeout_s" in failure.message


async def no_rewards(task: ScoredTask, policies: Policies) -> None:
    return None


async def other_policy(task: ScoredTask, policies: Policies) -> Rewards:
    await policies["actress"].chat("hello")
    return Rewards()


async def raises(task: ScoredTask, policies: Policies) -> Rewards:
    raise ZeroDivisionError("by zero")


async def infinite(task: ScoredTask, policies: Policies) -> Rewards:
    rewards = Rewards()
    rewards.add(await policies["actor"].chat("hello"), float("inf"))
    return rewards


async def foreign(task: ScoredTask, policies: Policies) -> Rewards:
    rewards = Rewards()
    rewards.add(Completion("actor", "", "stop", 1, 5), 1.0)
    return rewards


async def two_at_once(task: ScoredTask, policies: Policies) -> Rewards:
    chat = policies["actor"].conversation()
    async with asyncio.TaskGroup() as group:
        group.create_task(chat.say("a"))
        group.create_task(chat.say("b"))
    return Rewards()


async def leaves(task: ScoredTask, policies: Policies) -> Rewards:
    raise SystemExit(0)


async def leaves_in_a_thread(task: ScoredTask, policies: Policies) -> Rewards:
    return await asyncio.to_thread(sys.exit)


async def interrupts(task: ScoredTask, policies: Policies) -> Rewards:
    raise KeyboardInterrupt


async def gives_up(task: ScoredTask, policies: Policies) -> Rewards:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("workflow", "error_class", "message"),
    [
        (leaves, "SystemExit", "0"),
        (leaves_in_a_thread, "SystemExit", "SystemExit"),
        (interrupts, "KeyboardInterrupt", "KeyboardInterrupt"),
        (gives_up, "CancelledError", "CancelledError"),
        (no_rewards, "RolloutError", "returned NoneType"),
        (other_policy, "ConfigError", "'actress'; the run has actor"),
        (raises, "ZeroDivisionError", "by zero"),
        (infinite, "RolloutError", "reward is inf"),
        (foreign, "RolloutError", "not of this episode"),
        (two_at_once, "RolloutError", "one `say` at a time"),
    ],
)
async def test_a_mistake_in_a_workflow_is_no_retryable_failure(
    workflow, error_class: str, message: str
) -> None:
    failure = await outcome_of(ScriptedEngine(), workflow)
    assert failure.error_class == error_class
    assert message in failure.message
    assert not failure.is_retryable


def test_failures_are_classified_in_one_place() -> None:
    cases: list[tuple[BaseException, bool]] = [
        (RolloutError("x", is_retryable=False), False),
        (RolloutError("x"), True),
        (DeadlineError("x"), True),
        (ConnectionResetError("x"), True),
        (ConfigError("x"), False),
        (KeyError("x"), False),
        (ExceptionGroup("g", [RolloutError("x"), KeyError("y")]), False),
    ]
    assert [classify_failure(error).is_retryable for error, _ in cases] == [expected for _, expected in cases]


def test_a_failure_names_the_line_of_code_that_raised_its_error() -> None:
    def fail(number: int) -> None:
        if number > 1:
            raise KeyError(number)
        raise RolloutError("the engine is gone")

    places: list[str] = []
    for number in (1, 2, 3):
        try:
            fail(number)
        except (KeyError, RolloutError) as err:
            places.append(classify_failure(err).place)
    module, line = places[0].split(":")
    assert module == __name__
    assert places[1] == places[2] == f"{module}:{int(line) - 1}"
    assert classify_failure(KeyError(1)).place == ""
    assert issubclass(DeadlineError, Error)


async def careless(task: ScoredTask, policies: Policies) -> Rewards:
    return await judged({})


async def judged(reply: dict[str, float]) -> Rewards:
    rewards = Rewards()
    rewards.set_score(reply["score"])
    return rewards


async def test_a_bug_in_a_workflow_is_told_by_its_own_lines_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine())}, careless, exact)
    failure = (await runner.run(make_lease("1"))).outcome
    assert isinstance(failure, Failure)
    assert failure.error_class == "KeyError"
    assert re.fullmatch(
        r"'score' \(.*test_runner\.py, line \d+, in judged: rewards\.set_score\(reply\[\"score\"\]\)\)",
        failure.message,
    )
    assert failure.message in caplog.text
    assert re.search(
        r"called from .*test_runner\.py, line \d+, in careless: return await judged", caplog.text
    )
    assert "Traceback" not in caplog.text


async def test_a_cancelled_episode_has_no_result() -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    runner = EpisodeRunner({"actor": make_hosted("actor", engine)}, single_turn, exact)
    task = asyncio.create_task(runner.run(make_lease("1")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_turn_only(task: ScoredTask, policies: Policies) -> Rewards:
    rewards = Rewards()
    rewards.add(await policies["actor"].chat([Message(role="user", content="hi")]), 0.25)
    rewards.add_metric("length", 2.0)
    return rewards


async def own_score(task: ScoredTask, policies: Policies) -> Rewards:
    rewards = await by_turn_only(task, policies)
    rewards.set_score(0.75)
    return rewards


@pytest.mark.parametrize(("workflow", "score"), [(by_turn_only, 0.25), (own_score, 0.75)])
async def test_the_score_is_the_workflows_or_the_mean_reward(workflow, score: float) -> None:
    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine())}, workflow, exact)
    episode = await runner.episode(make_task(), seed=1)
    assert episode.score == score
    assert ("length", 2.0) in [(m.name, m.value) for m in episode.metrics]


async def forks_and_asks(task: ScoredTask, policies: Policies) -> Rewards:
    chat, checker = policies["actor"].conversation(), policies["actor"].conversation(role="checker")
    for text in ("a", "b", "c"):
        await chat.say(text)
    await checker.say("right?")
    rewards = Rewards()
    rewards.add(chat, 1.0)
    rewards.add(checker, 0.0)
    return rewards


@pytest.mark.parametrize("strips", [False, True])
async def test_a_history_that_forks_moves_no_mean_reward(strips: bool) -> None:
    engine = ScriptedEngine("<think>hm</think>7")
    hosted = make_hosted("actor", engine, renderer=CharRenderer(strips=strips))
    episode = await EpisodeRunner({"actor": hosted}, forks_and_asks, exact).episode(make_task(), seed=1)
    assert len(episode.trajectories) == (4 if strips else 2)
    assert episode.score == 0.5


async def huge_reward(task: ScoredTask, policies: Policies) -> Rewards:
    rewards = Rewards()
    rewards.add(await policies["actor"].chat("hi"), 1e39)
    return rewards


async def huge_score(task: ScoredTask, policies: Policies) -> Rewards:
    rewards = await by_turn_only(task, policies)
    rewards.set_score(1e200)
    return rewards


async def huge_metric(task: ScoredTask, policies: Policies) -> Rewards:
    rewards = await by_turn_only(task, policies)
    rewards.add_metric("flops", 1e18)
    return rewards


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (huge_reward, "reward`; got 1e+39"),
        (huge_score, "`$.score`; got 1e+200"),
        (huge_metric, "got 1e+18"),
    ],
)
async def test_a_number_that_could_end_the_run_is_a_failure_that_names_it(workflow, message: str) -> None:
    failure = await outcome_of(ScriptedEngine(), workflow)
    assert failure.error_class == "BoundError"
    assert message in failure.message
    assert not failure.is_retryable


async def test_concurrent_one_off_chats_are_recorded_apart() -> None:
    async def fan_out(task: ScoredTask, policies: Policies) -> Rewards:
        rewards = Rewards()
        answers = await asyncio.gather(*(policies["actor"].chat(t) for t in ("a", "bb", "ccc")))
        for answer in answers:
            rewards.add(answer, float(len(answer.text)))
        return rewards

    def echo(request: GenerateRequest) -> str:
        return "".join(chr(i) for i in request.token_ids if i > 5)

    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine(echo))}, fan_out, exact)
    episode = await runner.episode(make_task(), seed=1)
    assert [t.reward for t in episode.trajectories] == [1.0, 2.0, 3.0]


async def test_nothing_of_an_ended_episode_waits_for_the_garbage_collector() -> None:
    kept: list[weakref.ref[object]] = []

    async def keeping(task: ScoredTask, policies: Policies) -> Rewards:
        chat = policies["actor"].conversation()
        kept.extend((weakref.ref(policies), weakref.ref(chat)))
        rewards = Rewards()
        rewards.add(chat, await task.score((await chat.say(task.prompt)).text))
        return rewards

    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine("5"))}, keeping, exact)
    gc.disable()
    try:
        await runner.episode(make_task(), seed=1)
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


async def test_scoring_errors_pass_through_a_workflow_as_failures() -> None:
    async def broken(task: Task, text: str) -> float:
        raise RolloutError(f"task {task.id}: too slow", is_retryable=False)

    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine())}, single_turn, broken)
    outcome = (await runner.run(make_lease("1"))).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.error_class, outcome.message) == ("RolloutError", "task sums/0: too slow")
    assert not outcome.is_retryable


# --- streams --------------------------------------------------------------------------------------


class Halving(ScriptedEngine):
    """Scores a token by its id, halved."""

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return np.array(token_ids[1:], np.float32) / 2


class Ranking(Halving):
    """Also knows the most likely tokens in place of a token: its id, and the next one."""

    async def score_top(self, token_ids: Sequence[int], num: int, *, temperature: float = 1.0) -> TokenScores:
        ids = np.array(token_ids[1:], np.int32)[:, None] + np.arange(num, dtype=np.int32)
        return TokenScores(np.array(token_ids[1:], np.float32) / temperature, ids, -ids.astype(np.float32))


class Shouting(CharRenderer):
    """Reads the same tokens as other text: another tokenizer."""

    def parse(self, token_ids: Sequence[int]) -> Message:
        read = super().parse(token_ids)
        return Message(role=read.role, content=read.content.upper())


async def scored_by_teacher(task: ScoredTask, policies: Policies) -> Rewards:
    rewards, chat = Rewards(), policies["actor"].conversation()
    for text in (task.prompt, "again"):
        answer = await chat.say(text)
        rewards.add_stream(answer, "teacher", await policies["teacher"].logprobs(answer))
    rewards.add(chat, 1.0)
    return rewards


def with_teacher(teacher: HostedPolicy) -> EpisodeRunner:
    return EpisodeRunner(
        {"actor": make_hosted("actor", ScriptedEngine("ab")), "teacher": teacher}, scored_by_teacher, exact
    )


async def test_a_workflow_records_what_another_policy_makes_of_each_sampled_token() -> None:
    teacher = make_hosted("teacher", Halving(), is_trained=False)
    (trajectory,) = (await with_teacher(teacher).episode(make_task(), seed=1)).trajectories
    ids, mask = array(trajectory.token_ids, "int32"), array(trajectory.mask, "uint8")
    (stream,) = trajectory.streams
    assert (stream.name, stream.dtype) == ("teacher", "float32")
    assert array(stream.data, "float32").tolist() == (ids / 2 * mask).tolist()
    assert mask.sum() == 6


async def test_a_policy_scores_a_completion_under_another_prompt() -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(Ranking):
        async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
            seen.append(tuple(token_ids))
            return await super().score(token_ids)

    async def with_hints(task: ScoredTask, policies: Policies) -> Rewards:
        rewards, actor = Rewards(), policies["actor"]
        answer = await actor.chat(task.prompt)
        as_text = await actor.logprobs(answer, context="a hint")
        as_messages = await actor.logprobs(answer, context=(Message(role="user", content="a hint"),))
        assert as_text.tolist() == as_messages.tolist() == [ord("a") / 2, ord("b") / 2, STOP / 2]
        top = await actor.scores(answer, 2, context="a hint")
        assert top.top_ids.tolist() == [[ord("a"), ord("b")], [ord("b"), ord("c")], [STOP, STOP + 1]]
        rewards.add_stream(answer, "top", top.top_ids, "int32")
        rewards.add(answer, 1.0)
        return rewards

    hosted = make_hosted("actor", Watching("ab"))
    (trajectory,) = (
        await EpisodeRunner({"actor": hosted}, with_hints, exact).episode(make_task(), seed=1)
    ).trajectories
    hint = CharRenderer().render((Message(role="user", content="a hint"),))
    assert seen == [(*hint, *ids_of("ab"), STOP)] * 2
    (stream,) = trajectory.streams  # the trajectory itself keeps the prompt that was sampled from
    assert (stream.width, text_of(trajectory.token_ids)) == (2, "|2+3||ab|")
    assert array(stream.data, "int32").tolist()[-6:] == [
        ord("a"),
        ord("b"),
        ord("b"),
        ord("c"),
        STOP,
        STOP + 1,
    ]


async def test_an_engine_without_the_most_likely_tokens_is_named() -> None:
    async def ranked(task: ScoredTask, policies: Policies) -> Rewards:
        await policies["actor"].scores(await policies["actor"].chat(task.prompt), 2)
        return Rewards()

    runner = EpisodeRunner({"actor": make_hosted("actor", Halving("ab"))}, ranked, exact)
    with pytest.raises(
        RolloutError, match="policy actor: its engine scores the given tokens only, at temperature 1"
    ):
        await runner.episode(make_task(), seed=1)


async def test_policies_of_different_tokenizers_do_not_score_each_other() -> None:
    teacher = make_hosted("teacher", Halving(), renderer=Shouting(), is_trained=False)
    with pytest.raises(RolloutError, match=r"teacher reads .* as 'AB' instead of .* same tokenizer"):
        await with_teacher(teacher).episode(make_task(), seed=1)


async def test_a_policy_does_not_score_more_than_its_context_holds() -> None:
    teacher = make_hosted("teacher", Halving(max_context=3), is_trained=False)
    with pytest.raises(RolloutError, match=r"policy teacher cannot score \d+ tokens"):
        await with_teacher(teacher).episode(make_task(), seed=1)


# --- evaluation sets of their own ------------------------------------------------------------------


async def twice(task: ScoredTask, policies: Policies) -> Rewards:
    rewards, chat = Rewards(), policies["actor"].conversation()
    await chat.say(task.prompt)
    rewards.add(chat, await task.score((await chat.say("Again.")).text))
    return rewards


async def half(task: Task, text: str) -> float:
    return 0.5


async def test_an_evaluation_set_has_workflow_sampling_and_reward_of_its_own() -> None:
    engine = ScriptedEngine("5")
    own = EvalOverrides(
        sampling={"temperature": 0.6, "top_p": 0.95, "max_tokens": 3}, workflow=twice, score=half
    )
    runner = EpisodeRunner(
        {"actor": make_hosted("actor", engine)}, single_turn, exact, evaluation={"aime": own}
    )
    lease = msgspec.structs.replace(make_lease("1"), kind="eval", eval_set="aime")
    episode = (await runner.run(lease)).outcome
    assert isinstance(episode, Episode)
    assert (episode.score, len(engine.requests)) == (0.5, 2)
    first = engine.requests[0].sampling
    assert (first.temperature, first.top_p, first.max_tokens) == (0.6, 0.95, 3)
    other = (await runner.run(msgspec.structs.replace(lease, eval_set="other"))).outcome
    assert isinstance(other, Episode)
    assert (other.score, len(engine.requests)) == (1.0, 3)


async def test_training_never_runs_as_an_evaluation_set_does() -> None:
    engine = ScriptedEngine("5")
    own = EvalOverrides(sampling={"temperature": 0.6}, workflow=twice, score=half)
    runner = EpisodeRunner({"actor": make_hosted("actor", engine)}, single_turn, exact, evaluation={"": own})
    episode = (await runner.run(make_lease("1"))).outcome
    assert isinstance(episode, Episode)
    assert (episode.score, engine.requests[0].sampling.temperature) == (1.0, 1.0)


async def named_states(task: ScoredTask, policies: Policies, *, key: str = "kitchen") -> Rewards:
    """Two turns in one state, the second of which a fork repeats."""
    rewards = Rewards()
    chat = policies["actor"].conversation()
    for prompt in ("where?", "and now?"):
        rewards.set_state(await chat.say(prompt), key)
    chat.rewrite([Message(role="user", content="again")])
    await chat.send(())
    return rewards


async def test_a_workflow_names_the_states_of_turns() -> None:
    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine("here"))}, named_states, exact)
    whole, fork = (await runner.episode(make_task(), seed=1)).trajectories
    assert [turn.state_key for turn in whole.turns] == ["kitchen", "kitchen"]
    assert [turn.state_key for turn in fork.turns] == [""]


async def test_a_state_without_a_name_is_refused() -> None:
    workflow = partial(named_states, key="")
    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine("here"))}, workflow, exact)
    with pytest.raises(RolloutError, match="the state of a turn is ''"):
        await runner.episode(make_task(), seed=1)


async def test_a_reward_gets_the_tokens_of_the_completion_that_it_scores() -> None:
    seen: list[str] = []

    async def look(task: Task, text: str) -> float:
        seen.append(text)
        return 1.0

    async def workflow(task: ScoredTask, policies: Policies) -> Rewards:
        answer = await policies["actor"].conversation().say(task.prompt)
        await task.score(answer.text)
        await task.score(f"{answer.text}!")
        return Rewards()

    hosted = make_hosted("actor", ScriptedEngine("5"))
    episode = await EpisodeRunner({"actor": hosted}, workflow, look).episode(make_task(), seed=1)
    own, changed = seen
    assert isinstance(own, CompletionText)
    assert not isinstance(changed, CompletionText)
    token_ids = array(episode.trajectories[0].token_ids, "int32")
    mask = array(episode.trajectories[0].mask, "uint8").astype(bool)
    assert own.token_ids == tuple(token_ids[mask])


@pytest.mark.parametrize(
    "value", [np.float32(0.5), torch.tensor(0.5), Decimal("0.5"), Fraction(1, 2)], ids=repr
)
def test_rewards_and_metrics_may_be_numbers_of_libraries(value: Any) -> None:
    rewards = Rewards()
    rewards.add_all("actor", value)
    rewards.add_metric("close", value)
    assert (rewards.by_policy["actor"], rewards.metrics[0].value) == (0.5, 0.5)
    for wrong in ("0.5", None, 1j, torch.ones(2), math.nan):
        with pytest.raises(RolloutError, match="the workflow must return finite numbers"):
            rewards.set_score(wrong)  # pyright: ignore[reportArgumentType] - as users pass


def test_the_text_of_a_failure_can_always_be_sent() -> None:
    for error in (ValueError("name\udce9"), RolloutError("name\udce9")):
        assert "name\ufffd" in wire.checked(classify_failure(error)).message


class WithResource:
    """A workflow with a resource; `error` is raised when that is closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.is_open = False

    async def __call__(self, task: ScoredTask, policies: Policies) -> Rewards:
        return await single_turn(task, policies)

    async def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False
        if self._error is not None:
            raise self._error


async def test_a_workflow_that_fails_to_close_does_not_keep_others_open() -> None:
    failing = WithResource(ValueError("still in use"))
    other = WithResource()
    evaluation = {"test": EvalOverrides(workflow=other)}
    with pytest.raises(ValueError, match="still in use"):
        async with EpisodeRunner({}, failing, exact, evaluation=evaluation):
            assert other.is_open
    assert not other.is_open


async def test_a_workflow_that_never_closes_does_not_keep_others_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hanging(WithResource):
        async def close(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("astraflow.rollout.runner._CLOSE_S", 0.05)
    other = WithResource()
    evaluation = {"test": EvalOverrides(workflow=other)}
    async with asyncio.timeout(10):
        with pytest.raises(DeadlineError, match=r"Hanging object .* did not close within 0\.05 s"):
            async with EpisodeRunner({}, Hanging(), exact, evaluation=evaluation):
                assert other.is_open
    assert not other.is_open


def exit_code(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


async def test_a_fork_in_a_workflow_ends_where_the_workflow_does() -> None:
    forked: list[int] = []

    async def forks(task: ScoredTask, policies: Policies) -> Rewards:
        forked.append(os.fork())
        return await single_turn(task, policies)

    own = os.getpid()
    try:
        runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine("5"))}, forks, exact)
        episode = await runner.episode(make_task(), seed=1)
    finally:
        if os.getpid() != own:
            os._exit(0)  # it must not come here
    assert exit_code(forked[0]) == 70
    assert len(episode.trajectories) == 1
