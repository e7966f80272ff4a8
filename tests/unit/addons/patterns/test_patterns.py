"""Who is asked what, and who is rewarded for what, in each pattern of several policies."""

import asyncio
from typing import Any

import pytest

from astraflow.addons.patterns.debate import DebateConfig, debate
from astraflow.addons.patterns.plan_and_solve import plan_and_solve
from astraflow.addons.patterns.propose_and_select import propose_and_select
from astraflow.addons.patterns.route import RouteConfig, route
from astraflow.addons.patterns.spawn import spawn
from astraflow.config import Config, parse_config
from astraflow.errors import ConfigError, RolloutError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import GenerateRequest, Generation
from astraflow.workflows.config import WorkflowConfig
from drivers.rollout_fakes import CharRenderer, ScriptedEngine, exact, make_policy, make_task
from drivers.stage import Stage, lines, metrics, rewards

# --- plan_and_solve -------------------------------------------------------------------------------


async def test_plan_and_solve_rewards_the_plan_with_the_mean_of_what_follows_it() -> None:
    stage = Stage(planner="add", solver=lines("5", "4", "4", "5"))
    episode = await stage.play(
        plan_and_solve, num_solvers=4, plan_prompt="plan {prompt}", follow_prompt="{plan}: {prompt}"
    )
    assert rewards(episode)[0] == ("planner", "planner", 0.5)
    assert [r for _, role, r in rewards(episode) if role == "solver"] == [1.0, 0.0, 0.0, 1.0]
    assert (stage.asked("planner"), stage.asked("solver")) == ("|plan 2+3||", "|add: 2+3||")
    assert episode.score == 0.5


async def test_plan_and_solve_shares_the_mean() -> None:
    episode = await Stage(p="add", s=lines("5", "4")).play(plan_and_solve, num_solvers=2, team_share=1.0)
    assert [r for _, _, r in rewards(episode)] == [0.5, 0.5, 0.5]


# --- propose_and_select ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pick", "share", "expected"),
    [
        ("It is 1. No, 2", 0.0, [0.0, 1.0, 1.0]),
        ("1", 0.0, [0.0, 1.0, 0.0]),
        ("neither, nor 3", 0.0, [0.0, 1.0, 0.0]),
        ("2", 0.5, [0.5, 1.0, 1.0]),
    ],
)
async def test_propose_and_select_rewards_proposals_and_pick(
    pick: str, share: float, expected: list[float]
) -> None:
    stage = Stage(proposer=lines("4", "5"), selector=pick)
    episode = await stage.play(propose_and_select, num_proposals=2, team_share=share)
    assert [r for _, _, r in rewards(episode)] == expected
    assert [role for _, role, _ in rewards(episode)] == ["proposer", "proposer", "selector"]
    assert episode.score == expected[-1]
    assert metrics(episode)["unreadable"] == float("3" in pick)
    assert (metrics(episode)["proposal_score"], metrics(episode)["best_score"]) == (0.5, 1.0)
    assert "Answer 2:\n5" in stage.asked("selector")


async def test_a_selector_may_be_asked_in_other_words() -> None:
    stage = Stage(proposer="5", selector="1")
    await stage.play(propose_and_select, num_proposals=3, select_prompt="{count} {prompt}")
    assert stage.asked("selector") == "|3 2+3||"


# --- route ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("small", [("router", "router", 0.0), ("small", "small", 0.0)]),
        ("the large one", [("router", "router", 0.75), ("large", "large", 1.0)]),
        ("who knows", [("router", "router", -0.25)]),
    ],
)
async def test_route_charges_the_router_for_the_large_model(
    choice: str, expected: list[tuple[str, str, float]]
) -> None:
    episode = await Stage(router=choice, small="4", large="5").play(route, large_cost=0.25)
    assert rewards(episode) == expected
    assert metrics(episode)["unreadable"] == float(len(expected) == 1)
    assert episode.score == float("large" in choice)


async def test_routes_may_have_other_names() -> None:
    stage = Stage(router="A", small="4", large="5")
    episode = await stage.play(route, small_choice="B", large_choice="A", route_prompt="A or B: {prompt}")
    assert stage.asked("router") == "|A or B: 2+3||"
    assert metrics(episode)["large_frac"] == 1.0


# --- debate ---------------------------------------------------------------------------------------


async def test_debaters_read_each_other_and_the_last_answers_vote() -> None:
    stage = Stage(a=lines("4", "So\n5."), b=lines("5", "5"), c=lines("6", "6"))
    episode = await stage.play(debate, num_debaters=3, debate_prompt="{answers}")
    assert stage.asked("a") == "|2+3||4||5\n\n6||"
    assert [r for _, _, r in rewards(episode)] == [0.0, 1.0, 0.0]
    found = metrics(episode)
    assert (found["first_score"], found["last_score"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert found["agreement"] == pytest.approx(2 / 3)
    assert episode.score == 0.0  # the vote is for 5, and its first voter said more than the answer


async def test_a_debate_of_one_policy_compares_its_seats() -> None:
    episode = await Stage(actor=lines("4", "5", "5", "5")).play(debate, team_share=0.5)
    assert rewards(episode) == [("actor", "debater", 1.0)] * 2


async def test_seats_are_taken_in_turn_by_the_policies_named() -> None:
    stage = Stage(a="5", b="5", c="5")
    episode = await stage.play(debate, debaters=("c", "a"), num_debaters=3, rounds=1)
    assert [policy for policy, _, _ in rewards(episode)] == ["c", "a", "c"]


# --- spawn ----------------------------------------------------------------------------------------

SPLIT = "<task>1+1</task> and <task>1+2</task>"


async def test_helpers_work_on_parts_and_all_share_the_roots_score() -> None:
    stage = Stage(agent=lines(SPLIT, "5"), helper=lines("two", "three"))
    episode = await stage.play(spawn, helper_cost=0.125, results_prompt="{prompt}: {results}")
    assert rewards(episode) == [
        ("agent", "agent", 0.75),
        ("helper", "helper", 1.0),
        ("helper", "helper", 1.0),
    ]
    assert stage.asked("agent").endswith("|2+3: 1+1\ntwo\n\n1+2\nthree||")
    assert [stage.asked("helper", idx) for idx in (0, 1)] == ["|1+1||", "|1+2||"]
    assert (episode.score, metrics(episode)["helpers"]) == (1.0, 2.0)


class Meeting(ScriptedEngine):
    """Answers nobody before two have asked."""

    def __init__(self) -> None:
        super().__init__("1")
        self._both = asyncio.Barrier(2)

    async def generate(self, request: GenerateRequest) -> Generation:
        async with asyncio.timeout(5):
            await self._both.wait()
        return await super().generate(request)


async def test_helpers_run_at_the_same_time() -> None:
    stage = Stage(agent=lines(SPLIT, "5"), helper="1")
    stage.engines["helper"] = Meeting()
    assert (await stage.play(spawn)).score == 1.0


@pytest.mark.timeout(10)
async def test_a_text_of_nothing_but_opening_tags_is_read_at_once() -> None:
    engine = ScriptedEngine("<task>" * 100_000, max_context=2_000_000)
    hosted = HostedPolicy(make_policy("agent", max_tokens=1_000_000), engine, CharRenderer())
    episode = await EpisodeRunner({"agent": hosted}, spawn, exact).episode(make_task(), seed=1)
    assert (episode.score, len(engine.requests), metrics(episode)["helpers"]) == (0.0, 1, 0.0)


async def test_depth_and_numbers_bound_the_helpers() -> None:
    stage = Stage(agent=lambda request: SPLIT)
    episode = await stage.play(spawn, depth=3, max_helpers=5, split_prompt="{prompt}")
    assert metrics(episode)["helpers"] == 5.0
    deep = await Stage(agent=lambda request: SPLIT).play(spawn, depth=2)
    assert metrics(deep)["helpers"] == 2.0 + 4.0
    stage = Stage(agent=lines(SPLIT, "2", "5"))
    few = await stage.play(spawn, max_parts=1)
    assert metrics(few)["helpers"] == 1.0
    assert "1+2\n(not started" in stage.asked("agent")


async def test_a_helper_that_fails_fails_the_episode_and_leaves_nothing_running() -> None:
    stage = Stage(agent=lines(SPLIT, "5"), helper="1")
    stage.engines["helper"].error = RolloutError("out of memory")
    with pytest.raises(ExceptionGroup):
        await stage.play(spawn)
    assert len(asyncio.all_tasks()) == 1


# --- in a recipe ----------------------------------------------------------------------------------


class Section(Config):
    """A recipe with nothing but a workflow."""

    workflow: WorkflowConfig


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ({"name": "route", "small_choice": "a", "large_choice": "A"}, "stands for both choices"),
        ({"name": "debate", "num_debaters": 1}, "num_debaters"),
        ({"name": "debat"}, 'did you mean "debate"'),
    ],
)
def test_a_wrong_setting_is_refused(workflow: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"workflow": workflow}, Section)


def test_roles_are_filled_by_place_and_seats_in_turn() -> None:
    assert RouteConfig(small="c").acting(("a", "b")) == {"router": "a", "small": "c", "large": "b"}
    assert list(DebateConfig(num_debaters=3).acting(("a", "b")).values()) == ["a", "b", "a"]
