from astraflow.addons.patterns.multi_turn import multi_turn
from drivers.rollout_fakes import ScriptedEngine
from drivers.stage import Stage, lines, metrics, rewards


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
