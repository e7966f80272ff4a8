"""Every workflow, whatever is said in it, trains exactly what was sampled; a new one enters by itself."""

import inspect
from collections import Counter
from functools import partial
from typing import Any

import pytest

from astraflow.types import Message
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from drivers.installed_workflows import FUNCTIONS, required
from drivers.workflow_driver import SAID, Sampled, Table, replayed

LONGEST: dict[str, Any] = {
    "turns": 4,
    "rounds": 4,
    "depth": 2,
    "num_solvers": 3,
    "num_debaters": 3,
    "query_pattern": SAID,
}
"""Settings that let more happen, where a workflow has them."""
TEAMS = [("actor",), ("first", "second", "third")]
SEEDS = range(6)


def made(name: str) -> Workflow:
    function = FUNCTIONS[name]
    known = inspect.signature(function).parameters
    longest = {key: value for key, value in LONGEST.items() if key in known}
    return partial(function, **required(name), **longest)


async def check_exact(table: Table, workflow: Workflow, seed: int) -> int:
    """Plays an episode, replays it, and returns the number of its forks."""
    before = {name: Counter(engine.sampled) for name, engine in table.engines.items()}
    episode = await table.play(workflow, seed=seed)
    trained: dict[str, Sampled] = {name: Counter() for name in table.engines}
    for trajectory in episode.trajectories:
        trained[trajectory.policy] += replayed(trajectory)
    assert trained == {name: engine.sampled - before[name] for name, engine in table.engines.items()}
    forks = sum(trajectory.is_fork for trajectory in episode.trajectories)
    assert [m.value for m in episode.metrics if m.name == "forks"] == [forks]
    return forks


@pytest.mark.parametrize("team", TEAMS, ids=len)
@pytest.mark.parametrize("template", ["plain", "stripping", "agentic"])
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
async def test_a_replay_gives_the_recorded_logprobs(name: str, template: str, team: tuple[str, ...]) -> None:
    table = Table(team, template=template)
    forks = [await check_exact(table, made(name), seed) for seed in SEEDS]
    if template == "plain":
        assert forks == [0] * len(forks)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
async def test_a_context_that_runs_full_changes_nothing_of_that(name: str) -> None:
    table = Table(("first", "second"), template="stripping", max_context=400)
    for seed in SEEDS:
        await check_exact(table, made(name), seed)


@pytest.mark.parametrize(
    "name", sorted({"multi_turn", "solve_and_verify", "debate", "spawn", "tool_use"} & FUNCTIONS.keys())
)
async def test_a_template_that_strips_reasoning_forks_conversations_of_several_turns(name: str) -> None:
    table = Table(template="stripping")
    assert sum([await check_exact(table, made(name), seed) for seed in range(30)]) > 0


async def twins(task: ScoredTask, policies: Policies) -> Rewards:
    """Two conversations that say the same for a while, and one that edits its history."""
    rewards, chats = Rewards(), [policies["actor"].conversation() for _ in range(2)]
    for text in ("a", "b", "c"):
        for idx, chat in enumerate(chats):
            rewards.add(await chat.say(text), float(idx))
    chats[0].rewrite((Message(role="user", content="summary"),))
    await chats[0].send((Message(role="tool", content="x"), Message(role="tool", content="y")))
    return rewards


@pytest.mark.parametrize("template", ["plain", "stripping", "agentic"])
async def test_conversations_that_coincide_and_edits_are_exact_too(template: str) -> None:
    table = Table(template=template)
    assert sum([await check_exact(table, twins, seed) for seed in SEEDS]) >= len(SEEDS)
