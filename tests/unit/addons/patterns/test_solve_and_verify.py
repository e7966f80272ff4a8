import pytest

from astraflow.addons.patterns.solve_and_verify import SolveAndVerifyConfig, solve_and_verify
from astraflow.config import parse_config
from astraflow.errors import ConfigError
from drivers.rollout_fakes import ScriptedEngine
from drivers.stage import Stage, lines, metrics, rewards


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
    assert (metrics(episode)["rejects_wrong"], metrics(episode)["unreadable"]) == (0.0, 0.0)
    assert "approves_right" not in metrics(episode)


async def test_an_unclear_verdict_does_not_approve_is_never_right_and_is_counted() -> None:
    episode = await Stage(solver="5", verifier="No step is checked yet").play(solve_and_verify, rounds=1)
    assert [r for _, _, r in rewards(episode)] == [1.0, 0.0]
    assert metrics(episode)["unreadable"] == 1.0
    episode = await Stage(solver="4", verifier="maybe").play(solve_and_verify, rounds=1)
    assert [r for _, _, r in rewards(episode)] == [0.0, 0.0]


async def test_a_verdict_may_be_explained() -> None:
    episode = await Stage(solver="5", verifier="Yes, there is no error in it.").play(solve_and_verify)
    assert [r for _, _, r in rewards(episode)] == [1.0, 1.0]


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


async def test_a_verifier_whose_prompt_finds_no_room_is_no_failure() -> None:
    stage = Stage(solver="5", verifier="yes")
    stage.engines["verifier"] = ScriptedEngine("yes", max_context=20)
    episode = await stage.play(solve_and_verify, rounds=1)
    assert rewards(episode) == [("solver", "solver", 1.0)]
    assert (episode.score, metrics(episode)["overflows"]) == (1.0, 1.0)


def test_roles_are_filled_by_place() -> None:
    assert SolveAndVerifyConfig().acting(("a", "b")) == {"solver": "a", "verifier": "b"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"team_share": 1.5}, "team_share"),
        ({"approve": "Y", "reject": "y"}, "stands for both choices"),
    ],
)
def test_a_wrong_setting_is_refused(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(setting, SolveAndVerifyConfig)
