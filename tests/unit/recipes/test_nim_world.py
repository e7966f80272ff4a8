"""The world `nim`: its rules, tasks and league, and how well those play who know it and who do not."""

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import msgspec
import pytest
from recipes.nim.nim_game import NimGame, can_win, moves, shown, winning_moves
from recipes.nim.nim_league import league
from recipes.nim.nim_players import both, random_player
from recipes.nim.nim_teachers import demonstrations
from recipes.nim.nim_world import IMPOSSIBLE, Nim, move_in, seat_of

from astraflow.errors import ConfigError
from astraflow.rollout.environments import Environments
from astraflow.rollout.runner import EpisodeRunner
from astraflow.tasks.config import EnvironmentConfig
from astraflow.tasks.environment import with_environment
from astraflow.types import Episode
from drivers.nim_driver import ODD_MOVES, shares_won
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_task
from drivers.world_driver import take_odd_steps


@pytest.mark.parametrize("largest", [5, 7])
def test_the_expert_wins_from_every_won_position_and_a_random_player_hardly_ever(largest: int) -> None:
    shares = shares_won(Nim(largest=largest, size=400), random.Random(0))
    assert shares["expert"] == 1.0
    assert shares["random player"] <= 0.10
    assert shares["expert, any position, against the random player"] >= 0.97


@cache
def wins(heaps: tuple[int, ...]) -> bool:
    """Whether the player to move can win, by trying all moves."""
    return any(
        not wins((*heaps[:at], left, *heaps[at + 1 :])) for at, num in enumerate(heaps) for left in range(num)
    )


def test_who_can_win_and_by_which_moves_is_what_a_search_finds() -> None:
    for number in range(1, 6**3):
        heaps = (number // 36, number // 6 % 6, number % 6)
        assert can_win(heaps) is wins(heaps)
        good = list[str]()
        for move in moves(heaps):
            game = NimGame(list(heaps))
            assert game.take(move)
            if not wins(tuple(game.heaps)):
                good.append(move)
        assert bool(good) is wins(heaps)
        assert set(winning_moves(heaps)) == set(good)


def test_a_game() -> None:
    game = NimGame([3, 1, 4])
    for move, left in [
        ("take 2 from C", "A3 B1 C2"),
        ("take 3 from A", "B1 C2"),
        ("take 1 from C", "B1 C1"),
        ("take 1 from B", "C1"),
    ]:
        assert game.take(move)
        assert shown(game.heaps) == left
        assert not game.is_over
    assert game.take("take 1 from C")
    assert game.winner == 0


@pytest.mark.parametrize(
    "move",
    [
        "take 4 from A",
        "take 0 from A",
        "take 1 from B",
        "take 1 from D",
        "take -1 from A",
        "take \u0661 from A",
        "take 1 from A\x00",
        "take 1 from A\ntake 1 from C",
        "take 12 from A",
        "",
    ],
)
def test_an_impossible_move_loses(move: str) -> None:
    game = NimGame([3, 0, 2])
    assert not game.take(move)
    assert game.winner == 1
    assert game.heaps == [3, 0, 2]


def test_nothing_changes_a_game_that_is_over() -> None:
    world = Nim(num_heaps=1, largest=4, form="bare", size=2)
    game, seen = world.reset(world.tasks("train")[0], seed=0)
    seen = world.step(game, f"take {game.heaps[0]} from A")
    assert (seen.reward, seen.is_done) == (1.0, True)
    game, _ = world.reset(world.tasks("train")[0], seed=0)
    assert world.step(game, "take 5 from A").messages == IMPOSSIBLE
    for move in ("take 1 from A", "", "x" * 1_000_000):
        seen = world.step(game, move)
        assert (seen.reward, seen.is_done, game.winner) == (0.0, True, 1)


def test_no_reply_however_odd_raises() -> None:
    rng = random.Random(1)
    chance = random_player(rng)
    take_odd_steps(Nim(size=50), lambda game: both(game, chance, chance), ODD_MOVES, 1_000)


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    first, again, other = (Nim(size=100, seed=seed).tasks("train") for seed in (3, 3, 4))
    assert first == again
    assert [task.spec for task in first] != [task.spec for task in other]


def test_each_position_has_a_task_per_seat_and_the_splits_share_no_beginning() -> None:
    world = Nim(largest=5, size=600)
    split = {name: world.tasks(name) for name in ("train", "heldout")}
    for tasks in split.values():
        seats = [(task.prompt, seat_of(task.spec)) for task in tasks]
        assert [(prompt, 1) for prompt, _ in seats[::2]] == seats[1::2]
        assert {seat for _, seat in seats[::2]} == {0}
    train, heldout = ({task.prompt for task in tasks} for tasks in split.values())
    assert not train & heldout
    assert len(heldout) >= 10


def test_each_player_is_told_the_rules_once_in_the_full_form() -> None:
    world = Nim(num_heaps=2, size=2)
    game, seen = world.reset(world.tasks("train")[0], seed=0)
    assert "You play Nim." in str(seen.messages)
    game.heaps[:] = [3, 2]
    seen = world.step(game, "THOUGHT: I begin.\nACTION: take 1 from A")
    assert "You play Nim." in str(seen.messages)
    assert str(seen.messages).endswith("A2 B2")
    assert world.step(game, "take 1 from B").messages == "A2 B1"


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("take 2 from A", "take 2 from A"),
        ("THOUGHT: I go.\n ACTION: take  2 from A.\nmore", "take 2 from A"),
        ("ACTION: take 1 from B\nB1\nACTION: take 2 from A", "take 1 from B"),
        ("", ""),
    ],
)
def test_the_move_is_what_follows_the_first_action(reply: str, move: str) -> None:
    assert move_in(reply) == move


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_heaps": 0}, "num_heaps = 0"),
        ({"num_heaps": 7}, "1 to 6 heaps of 1 to 9 things"),
        ({"largest": 10}, "largest = 10"),
        ({"size": 0}, "size = 0"),
        ({"heldout_frac": 1.0}, "heldout_frac = 1.0"),
    ],
)
def test_worlds_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Nim(**wrong)


def test_a_split_without_positions_and_an_unknown_one_are_refused() -> None:
    empty = Nim(num_heaps=1, largest=1, size=2)
    with pytest.raises(ConfigError, match="too few positions"):
        [empty.tasks(split) for split in ("train", "heldout")]
    with pytest.raises(ConfigError, match="not one of: train, heldout"):
        Nim().tasks("test")


# --- teachers ---------------------------------------------------------------------------------------


def skill(**teaching: Any) -> float:
    """Share of good moves, where there are any, of teachers that are shown."""
    made = demonstrations(num=400, seed=1, largest=5, **teaching)
    assert len(made) == 400
    assert made == demonstrations(num=400, seed=1, largest=5, **teaching)
    good = list[bool]()
    for one in made:
        said = [str(message.content) for message in one.conversation]
        for seen, move in zip(said[::2], said[1::2], strict=True):
            heaps = [0] * 3
            for heap in seen.split(" "):
                heaps["ABC".index(heap[0])] = int(heap[1])
            assert move in moves(heaps)
            if can_win(heaps):
                good.append(move in winning_moves(heaps))
    return statistics.mean(good)


def test_teachers_know_the_rules_and_have_the_skill_that_is_asked_for() -> None:
    assert skill(skill_frac=(1.0, 1.0)) == 1.0
    assert 0.15 < skill(skill_frac=(0.0, 0.0)) < 0.4
    assert 0.5 < skill(skill_frac=(1.0, 0.0)) < 0.75


def test_no_teachers_game_begins_with_a_position_that_is_held_out() -> None:
    held = {task.prompt for task in Nim(largest=5, size=400).tasks("heldout")}
    made = demonstrations(num=400, seed=1, largest=5)
    # Who moves second sees a position after one move, which may be any.
    begun = {str(one.conversation[0].content) for one in made[::2]}
    assert not held & begun


# --- the league -------------------------------------------------------------------------------------


def saying(replies: Sequence[str]) -> ScriptedEngine:
    left: Iterator[str] = iter(replies)
    return ScriptedEngine(lambda _: next(left), max_context=2_000)


async def episode_of(
    engines: dict[str, ScriptedEngine], *, seat: int = 0, task_id: str = "", **args: Any
) -> Episode:
    """A game from two heaps of one."""
    config = EnvironmentConfig(use="recipes.nim.nim_world:Nim", args={"form": "bare"})
    spec = msgspec.json.encode({"heaps": [1, 1], "seat": seat}).decode()
    task = msgspec.structs.replace(make_task(), spec=spec)
    if task_id:
        task = msgspec.structs.replace(task, id=task_id)
    environments = Environments({"nim": config})
    hosted = {name: make_hosted(name, engine) for name, engine in engines.items()}
    workflow = partial(league, **args)
    try:
        await environments.open()
        runner = EpisodeRunner(hosted, workflow, exact, environments=environments)
        return await runner.episode(with_environment(task, "nim"), seed=1)
    finally:
        await environments.close()


def rewards_by_role(episode: Episode) -> dict[str, float]:
    return {trajectory.role: trajectory.reward for trajectory in episode.trajectories}


def metrics_of(episode: Episode) -> dict[str, float]:
    return {metric.name: metric.value for metric in episode.metrics}


async def test_a_policy_that_plays_against_itself_has_a_trajectory_per_role_and_they_sum_to_zero() -> None:
    episode = await episode_of({"actor": saying(["take 1 from A", "take 1 from B"])})
    assert rewards_by_role(episode) == {"first": -1.0, "second": 1.0}
    assert {len(trajectory.turns) for trajectory in episode.trajectories} == {1}
    assert episode.score == 0.0
    found = metrics_of(episode)
    assert (found["impossible"], found["moves"], found["won_against_actor"]) == (0, 2, 0)


@pytest.mark.parametrize(("seat", "score"), [(0, 0.0), (1, 1.0)])
async def test_the_player_sits_where_the_task_says(seat: int, score: float) -> None:
    replies = [["take 1 from A"], ["take 1 from B"]]
    engines = {"actor": saying(replies[seat]), "start": saying(replies[1 - seat])}
    episode = await episode_of(engines, seat=seat, opponents=["start"])
    assert episode.score == score
    assert metrics_of(episode)["won_against_start"] == score
    roles = {trajectory.policy: trajectory.role for trajectory in episode.trajectories}
    assert roles["actor"] == ("first", "second")[seat]


async def test_an_impossible_move_loses_for_who_made_it() -> None:
    episode = await episode_of({"actor": saying(["take 1 from A", "take 2 from B"])})
    assert rewards_by_role(episode) == {"first": 1.0, "second": -1.0}
    assert metrics_of(episode)["impossible"] == 1


async def test_the_opponent_is_drawn_by_the_tasks_id_in_proportion_to_how_often_it_is_named() -> None:
    met = Counter[str]()
    for number in range(90):
        names = [
            name
            for _ in range(2)
            for name in metrics_of(
                await episode_of(
                    {"actor": saying(["take 1 from A"] * 2), "start": saying(["take 1 from B"])},
                    task_id=f"positions/{number}",
                    opponents=["actor", "actor", "start"],
                )
            )
            if name.startswith("won_against_")
        ]
        assert names[0] == names[1]
        met[names[0]] += 1
    assert 18 < met["won_against_start"] < 42
    assert met.total() == 90
