"""Who is asked what, and who is rewarded for what, in each built-in workflow."""

import pytest

from astraflow.workflows.multi_turn import multi_turn
from astraflow.workflows.solve_and_check import solve_and_check
from astraflow.workflows.solve_and_verify import solve_and_verify
from drivers.rollout_fakes import ScriptedEngine
from drivers.stage import Stage, lines, metrics, rewards

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
