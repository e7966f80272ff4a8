import pytest

from astraflow.addons.patterns.solve_and_check import solve_and_check
from drivers.stage import Stage, metrics, rewards


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
