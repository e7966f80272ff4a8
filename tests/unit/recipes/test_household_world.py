"""The world `household`: its rules, its tasks, and how well those play who know it and who do not."""

import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from recipes.alfworld.household_players import demonstrations, expert, random_player
from recipes.alfworld.household_world import GOALS, NOTHING, Goal, Household, Room, command_in

from astraflow.errors import ConfigError

TINY: dict[str, Any] = {"num_places": 3, "num_things": 2, "most_alike": 1, "max_turns": 16}


def play(world: Household, player_of: Callable[[Room], Iterator[str]], num: int) -> list[float]:
    """Rewards of a player over the first tasks held out."""
    rewards = list[float]()
    for task in world.tasks("heldout")[:num]:
        game, seen = world.reset(task, seed=0)
        player = player_of(game.room)
        while not seen.is_done:
            seen = world.step(game, next(player))
        rewards.append(seen.reward)
    return rewards


@pytest.mark.parametrize("shape", [{}, TINY], ids=["default", "tiny"])
def test_the_expert_reaches_every_goal_and_a_random_player_hardly_any(shape: dict[str, Any]) -> None:
    world = Household(**shape, size=1_000)
    rng = random.Random(0)
    assert statistics.mean(play(world, expert, 1_000)) >= 0.99
    assert statistics.mean(play(world, lambda room: random_player(room, rng), 1_000)) <= 0.10


def test_no_reply_however_odd_raises_in_10_000_steps() -> None:
    world = Household(size=50)
    rng = random.Random(1)
    tasks = world.tasks("train")
    odd = [
        "",
        "ACTION:",
        "ACTION: go to",
        "put mug 1 in/on shelf 1",
        "take  from ",
        "\x00\x1b[2J",
        "x" * 1_000_000,
        "go to safe 99",
    ]
    num_steps = 0
    while num_steps < 10_000:
        game, seen = world.reset(rng.choice(tasks), seed=0)
        while not seen.is_done:
            is_odd = rng.random() < 0.02
            seen = world.step(game, rng.choice(odd) if is_odd else rng.choice(game.room.commands()))
            num_steps += 1


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    first, again, other = (Household(size=100, seed=seed).tasks("train") for seed in (3, 3, 4))
    assert first == again
    assert [task.spec for task in first] != [task.spec for task in other]


def test_splits_share_no_room_and_have_all_kinds_of_goals() -> None:
    world = Household(size=600)
    train, heldout = ({task.prompt for task in world.tasks(split)} for split in ("train", "heldout"))
    assert not train & heldout
    kinds = Counter(world.room("heldout", idx).goal.kind for idx in range(600))
    assert set(kinds) == set(GOALS)
    assert min(kinds.values()) > 60


def a_room(kind: str = "pick_heat_then_place", thing: str = "mug", target: str = "shelf") -> Room:
    contents = {"cabinet 1": ["mug 1", "mug 2"], "desk 1": ["desklamp 1"], "fridge 1": [], "microwave 1": []}
    return Room(Goal(kind, thing, target, "put a hot mug in shelf."), {**contents, "shelf 1": ["pan 1"]})


def test_a_game_reads_like_alfworld() -> None:
    room = a_room()
    assert room.text == (
        "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a desk 1, a "
        "fridge 1, a microwave 1, and a shelf 1.\n\nYour task is to: put a hot mug in shelf."
    )
    told = [
        ("go to cabinet 1", "You arrive at cabinet 1. The cabinet 1 is closed."),
        ("take mug 1 from cabinet 1", NOTHING),
        (
            "open cabinet 1",
            "You open the cabinet 1. The cabinet 1 is open. In it, you see a mug 1, and a mug 2.",
        ),
        ("take mug 1 from cabinet 1", "You pick up the mug 1 from the cabinet 1."),
        ("take mug 2 from cabinet 1", NOTHING),
        ("heat mug 1 with microwave 1", NOTHING),
        ("inventory", "You are carrying: a mug 1."),
        ("close cabinet 1", "You close the cabinet 1."),
        ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
        ("heat mug 1 with microwave 1", "You heat the mug 1 using the microwave 1."),
        ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a pan 1."),
        ("put mug 1 in/on shelf 1", "You move the mug 1 to the shelf 1."),
    ]
    for command, expected in told:
        assert not room.is_solved
        assert room.do(command) == expected
    assert room.is_solved


def do(room: Room, *commands: str) -> bool:
    for command in commands:
        assert room.do(command) != NOTHING, command
    return room.is_solved


def test_what_was_heated_and_then_cooled_is_not_hot() -> None:
    take = ("go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1")
    heat = ("go to microwave 1", "heat mug 1 with microwave 1")
    cool = ("go to fridge 1", "cool mug 1 with fridge 1")
    put = ("go to shelf 1", "move mug 1 to shelf 1")
    assert do(a_room(), *take, *cool, *heat, *put)
    assert not do(a_room(), *take, *heat, *cool, *put)
    assert do(a_room("pick_cool_then_place"), *take, *heat, *cool, *put)


def test_two_things_must_lie_there_and_the_lamp_must_shine_on_the_thing() -> None:
    room = a_room("pick_two_obj_and_place")
    assert not do(room, "go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1")
    assert not do(
        room, "go to shelf 1", "move mug 1 to shelf 1", "go to cabinet 1", "take mug 2 from cabinet 1"
    )
    assert do(room, "go to shelf 1", "move mug 2 to shelf 1")
    room = a_room("look_at_obj_in_light", target="")
    assert not do(room, "go to desk 1", "use desklamp 1")
    assert not do(room, "go to cabinet 1", "open cabinet 1", "take mug 2 from cabinet 1")
    assert do(room, "go to desk 1", "use desklamp 1")


def test_an_episode_ends_after_max_turns_and_when_a_command_is_repeated() -> None:
    world = Household(max_turns=5, size=1)
    (task,) = world.tasks("train")
    game, _ = world.reset(task, seed=0)
    seen = [world.step(game, reply) for reply in ("look", "inventory", "look", "inventory", "look")]
    assert [step.is_done for step in seen] == [False] * 4 + [True]
    game, _ = world.reset(task, seed=0)
    assert [world.step(game, "dance").is_done for _ in range(3)] == [False, False, True]


def test_the_full_form_shows_an_example_and_the_available_actions() -> None:
    world = Household(size=1)
    game, seen = world.reset(world.tasks("train")[0], seed=0)
    assert isinstance(seen.messages, str)
    assert "Here is your task." in seen.messages
    assert seen.messages.endswith(f"AVAILABLE ACTIONS: {', '.join(game.room.commands())}")
    assert "ACTION: " in seen.messages


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("go to desk 1", "go to desk 1"),
        ("THOUGHT: I go.\n ACTION: Go to  desk 1.\nmore", "go to desk 1"),
        ("ACTION: look\nACTION: inventory", "inventory"),
        ("", ""),
    ],
)
def test_the_command_is_what_follows_the_last_action(reply: str, command: str) -> None:
    assert command_in(reply) == command


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kinds": ["dance"]}, "pick_and_place_simple"),
        ({"kinds": []}, "at least one"),
        ({"num_places": 2, "most_alike": 2}, "num_places = 2"),
        ({"num_places": 30, "most_alike": 1}, "num_places = 30"),
    ],
)
def test_worlds_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Household(**wrong)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="not one of: train, heldout"):
        Household().tasks("test")


def test_teachers_show_careful_games_less_and_less() -> None:
    def share_solved(shown: list[str]) -> float:
        return statistics.mean(last != "inventory" for last in shown)

    made = demonstrations(num=1_000, seed=1, careful_frac=(1.0, 0.0), **TINY)
    lasts = [str(game.conversation[-1].content) for game in made]
    assert share_solved(lasts[:50]) == 1
    assert share_solved(lasts[-300:]) < 0.4
    assert all([m.role for m in game.conversation[:2]] == ["user", "assistant"] for game in made)
    assert made == demonstrations(num=1_000, seed=1, careful_frac=(1.0, 0.0), **TINY)


def test_demonstrations_and_tasks_share_no_room() -> None:
    shown = {game.conversation[0].content for game in demonstrations(num=300, seed=0, **TINY)}
    asked = {task.prompt for task in Household(**TINY, size=300).tasks("heldout")}
    assert not shown & asked
