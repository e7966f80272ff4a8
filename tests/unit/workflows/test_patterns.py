"""Who is asked what, and who is rewarded for what, in each built-in workflow."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from astraflow.addons.patterns.debate import debate
from astraflow.addons.patterns.plan_and_solve import plan_and_solve
from astraflow.addons.patterns.propose_and_select import propose_and_select
from astraflow.addons.patterns.route import route
from astraflow.addons.patterns.spawn import spawn
from astraflow.errors import RolloutError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, GenerateRequest, Generation
from astraflow.workflows.multi_turn import multi_turn
from astraflow.workflows.solve_and_check import solve_and_check
from astraflow.workflows.solve_and_verify import solve_and_verify
from drivers.rollout_fakes import CharRenderer, ScriptedEngine, exact, make_hosted, make_policy, make_task


def lines(*replies: str) -> Callable[[GenerateRequest], str]:
    """One reply after the other, then the last one for ever."""
    left = list(replies)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


class Stage:
    """Policies with scripts; the task is 2+3 and the right answer 5."""

    def __init__(self, **scripts: str | Callable[[GenerateRequest], str]) -> None:
        self.engines = {
            name: ScriptedEngine(script if callable(script) else lines(script), max_context=4096)
            for name, script in scripts.items()
        }

    async def play(self, workflow: Callable[..., Any], **settings: Any) -> Episode:
        hosted = {name: make_hosted(name, engine) for name, engine in self.engines.items()}
        return await EpisodeRunner(hosted, partial(workflow, **settings), exact).episode(make_task(), seed=1)

    def asked(self, name: str, idx: int = -1) -> str:
        """The idx-th prompt of a policy as text."""
        ids = self.engines[name].requests[idx].token_ids
        return "".join(chr(i) if i > 5 else "|" for i in ids)


def rewards(episode: Episode) -> list[tuple[str, str, float]]:
    return [(t.policy, t.role, t.reward) for t in episode.trajectories]


def metrics(episode: Episode) -> dict[str, float]:
    return {m.name: m.value for m in episode.metrics}


# --- multi_turn -----------------------------------------------------------------------------------


async def test_multi_turn_rewards_the_conversation_with_its_last_score() -> None:
    stage = Stage(actor=lines("4", "5"))
    episode = await stage.play(multi_turn, feedback="no, {score}")
    assert rewards(episode) == [("actor", "actor", 1.0)]
    assert stage.asked("actor") == "|2+3||4||no, 0.0||"
    assert (episode.score, metrics(episode)["first_score"], metrics(episode)["turns"]) == (1.0, 0.0, 2.0)


async def test_multi_turn_may_reward_each_turn_instead() -> None:
    episode = await Stage(actor=lines("4", "6", "5")).play(multi_turn, rewards_each_turn=True)
    (trajectory,) = episode.trajectories
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    assert trajectory.reward == 1.0


async def test_multi_turn_ends_after_its_turns() -> None:
    stage = Stage(actor="4")
    assert (await stage.play(multi_turn, turns=2)).score == 0.0
    assert len(stage.engines["actor"].requests) == 2


async def test_multi_turn_ends_when_the_context_is_full() -> None:
    stage = Stage(actor="4")
    stage.engines["actor"] = ScriptedEngine("4", max_context=20)
    episode = await stage.play(multi_turn, turns=9)
    assert len(stage.engines["actor"].requests) == 1
    assert (metrics(episode)["turns"], metrics(episode)["overflows"]) == (2.0, 1.0)


async def test_a_verifier_whose_prompt_finds_no_room_is_no_failure() -> None:
    stage = Stage(solver="5", verifier="yes")
    stage.engines["verifier"] = ScriptedEngine("yes", max_context=20)
    episode = await stage.play(solve_and_verify, rounds=1)
    assert rewards(episode) == [("solver", "solver", 1.0)]
    assert (episode.score, metrics(episode)["overflows"]) == (1.0, 1.0)


# --- solve_and_verify -----------------------------------------------------------------------------


async def test_solve_and_verify_retries_with_the_critique_and_rewards_both_for_their_jobs() -> None:
    stage = Stage(solver=lines("4", "5"), verifier=lines("too small: no", "yes"))
    episode = await stage.play(solve_and_verify)
    assert rewards(episode) == [
        ("solver", "solver", 1.0),
        ("verifier", "verifier", 1.0),
        ("verifier", "verifier", 1.0),
    ]
    assert "too small: no" in stage.asked("solver")
    assert stage.asked("solver").startswith("|2+3||4||")
    assert "5" in stage.asked("verifier")
    found = metrics(episode)
    assert (found["first_score"], found["attempts"], found["verdict_right"]) == (0.0, 2.0, 1.0)
    assert (found["approves_right"], found["rejects_wrong"]) == (1.0, 1.0)


async def test_verdicts_may_be_recorded_by_what_they_judge() -> None:
    stage = Stage(solver=lines("4", "5"), verifier=lines("no", "yes"))
    episode = await stage.play(solve_and_verify, splits_verdicts=True)
    roles = [role for policy, role, _ in rewards(episode) if policy == "verifier"]
    assert roles == ["verifier_of_wrong", "verifier_of_right"]


async def test_a_wrong_approval_costs_the_verifier_and_ends_the_episode() -> None:
    episode = await Stage(solver=lines("4", "5"), verifier="yes").play(solve_and_verify)
    assert [r for _, _, r in rewards(episode)] == [0.0, 0.0]
    assert metrics(episode)["rejects_wrong"] == 0.0
    assert "approves_right" not in metrics(episode)


async def test_no_verdict_rejects_and_is_never_right() -> None:
    episode = await Stage(solver="5", verifier="maybe").play(solve_and_verify, rounds=1)
    assert [r for _, _, r in rewards(episode)] == [1.0, 0.0]
    episode = await Stage(solver="4", verifier="maybe").play(solve_and_verify, rounds=1)
    assert [r for _, _, r in rewards(episode)] == [0.0, 0.0]


async def test_fresh_attempts_are_conversations_with_scores_of_their_own() -> None:
    stage = Stage(solver=lines("5", "4"), verifier="=n")
    episode = await stage.play(
        solve_and_verify,
        keeps_history=False,
        verify_prompt="{prompt}{answer}?",
        retry_prompt="{prompt} {answer} {critique}",
        approve="=y",
        reject="=n",
    )
    assert [r for _, role, r in rewards(episode) if role == "solver"] == [1.0, 0.0]
    assert [r for _, role, r in rewards(episode) if role == "verifier"] == [0.0, 1.0]
    assert stage.asked("solver") == "|2+3 5 =n||"
    assert stage.asked("verifier") == "|2+34?||"
    assert episode.score == 0.0


@pytest.mark.parametrize(("share", "expected"), [(0.0, [1.0, 0.0]), (0.5, [1.0, 0.5]), (1.0, [1.0, 1.0])])
async def test_team_share_mixes_individual_and_shared_rewards(share: float, expected: list[float]) -> None:
    stage = Stage(solver="5", verifier="no")
    episode = await stage.play(solve_and_verify, rounds=1, team_share=share)
    assert [r for _, _, r in rewards(episode)] == expected


async def test_one_policy_may_play_both_roles_which_stay_apart() -> None:
    episode = await Stage(actor=lines("5", "yes")).play(solve_and_verify)
    assert rewards(episode) == [("actor", "solver", 1.0), ("actor", "verifier", 1.0)]


async def test_roles_may_name_their_policies() -> None:
    episode = await Stage(a="yes", b="5").play(solve_and_verify, solver="b", verifier="a")
    assert rewards(episode) == [("b", "solver", 1.0), ("a", "verifier", 1.0)]


async def test_others_read_an_answer_without_its_reasoning() -> None:
    stage = Stage(solver="<think>2+2</think>\n5", verifier="<think>no</think> yes")
    episode = await stage.play(solve_and_verify, verify_prompt="{answer}")
    assert stage.asked("verifier") == "|5||"
    assert metrics(episode)["attempts"] == 1.0


# --- solve_and_check ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "final", "share", "expected", "changed"),
    [
        ("4", "5", 0.0, [0.0, 1.0], (1.0, 0.0)),
        ("5", "4", 0.0, [1.0, 0.0], (0.0, 1.0)),
        ("5", "5", 0.0, [1.0, 1.0], (0.0, 0.0)),
        ("4", "5", 0.25, [0.25, 1.0], (1.0, 0.0)),
    ],
)
async def test_solve_and_check_rewards_each_answer(
    answer: str, final: str, share: float, expected: list[float], changed: tuple[float, float]
) -> None:
    stage = Stage(solver=answer, checker=final)
    episode = await stage.play(solve_and_check, team_share=share, check_prompt="{prompt} {answer}")
    assert rewards(episode) == [("solver", "solver", expected[0]), ("checker", "checker", expected[1])]
    assert (metrics(episode)["fixed"], metrics(episode)["broken"]) == changed
    assert episode.score == float(final == "5")
    assert stage.asked("checker") == f"|2+3 {answer}||"


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
