"""The world `household`: its rules, its tasks, and how well those play who know it and who do not."""

import random
import statistics
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from recipes.alfworld.household_players import expert, random_player
from recipes.alfworld.household_room import GOALS, NOTHING, Goal, Room
from recipes.alfworld.household_teachers import demonstrations
from recipes.alfworld.household_world import Household, command_in

from astraflow.errors import ConfigError
from drivers.world_driver import rewards_of, take_odd_steps

TINY: dict[str, Any] = {"num_places": 3, "num_things": 2, "most_alike": 1, "max_turns": 16}


@pytest.mark.parametrize("shape", [{}, TINY], ids=["default", "tiny"])
def test_the_expert_reaches_every_goal_and_a_random_player_hardly_any(shape: dict[str, Any]) -> None:
    world = Household(**shape, size=60)
    rng = random.Random(0)
    assert statistics.mean(rewards_of(world, lambda game: expert(game.room), 60)) == 1.0
    assert statistics.mean(rewards_of(world, lambda game: random_player(game.room, rng), 60)) <= 0.10


def test_no_reply_however_odd_raises() -> None:
    odd = ["", "ACTION:", "ACTION: go to", "put mug 1 in/on shelf 1", "take  from ", "\x00\x1b[2J"]
    odd += ["x" * 1_000_000, "go to safe 99"]
    rng = random.Random(1)
    take_odd_steps(Household(size=50), lambda game: random_player(game.room, rng), odd, 500)


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


def a_room(kind: str = "pick_heat_then_place_in_recep", thing: str = "mug", target: str = "shelf") -> Room:
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


def test_what_is_looked_at_closely_reads_like_alfworld() -> None:
    room = a_room()
    assert room.do("look") == (
        "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a desk 1, a "
        "fridge 1, a microwave 1, and a shelf 1."
    )
    do(room, "go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1")
    assert room.do("look") == "You are facing the cabinet 1. Next to it, you see nothing."
    assert room.do("examine cabinet 1") == "The cabinet 1 is open. In it, you see a mug 2."
    assert room.do("examine mug 1") == "There's nothing special about mug 1."
    do(room, "go to microwave 1", "heat mug 1 with microwave 1")
    assert room.do("examine mug 1") == "This is a hot mug 1."
    do(room, "go to fridge 1", "cool mug 1 with fridge 1")
    assert room.do("examine mug 1") == "This is a cold mug 1."
    room.treated["mug 1"].add("clean")
    assert room.do("examine mug 1") == "This is a cool and clean mug 1."


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
    assert do(a_room("pick_cool_then_place_in_recep"), *take, *heat, *cool, *put)


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
    assert [world.step(game, "dance").is_done for _ in range(4)] == [False, False, False, True]
    game, _ = world.reset(task, seed=0)
    replies = ("look", "ACTION: dance", "THOUGHT: Dance. ACTION: dance", "ACTION: dance")
    assert not any(world.step(game, reply).is_done for reply in replies)


def test_the_full_form_shows_an_example_and_the_available_actions() -> None:
    world = Household(size=1)
    game, seen = world.reset(world.tasks("train")[0], seed=0)
    assert isinstance(seen.messages, str)
    assert "Here is your task." in seen.messages
    listed = "\n".join(game.room.commands())
    assert seen.messages.endswith(f" AVAILABLE ACTIONS: {listed}\n")
    assert "ACTION: " in seen.messages
    shown = world.step(game, "THOUGHT: I look.\nACTION: look").messages
    assert isinstance(shown, str)
    assert shown.startswith(f"{game.room.text.partition(chr(10))[0]} AVAILABLE ACTIONS: ")


def test_an_episode_may_begin_when_few_commands_are_left() -> None:
    world = Household(**TINY, commands_left=1, kinds=("look_at_obj_in_light",), form="bare", size=20)
    for task in world.tasks("train"):
        game, seen = world.reset(task, seed=0)
        assert isinstance(seen.messages, str)
        assert seen.messages.startswith(game.room.text)
        assert "You arrive at desk 1." in seen.messages
        assert world.step(game, "ACTION: use desklamp 1").reward == 1


def test_more_commands_left_than_a_goal_takes_is_a_game_from_its_beginning() -> None:
    world = Household(**TINY, commands_left=99, size=1)
    game, _ = world.reset(world.tasks("train")[0], seed=0)
    assert game.room.here == ""


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("go to desk 1", "go to desk 1"),
        ("THOUGHT: I go.\n ACTION: Go to  desk 1.\nmore", "go to desk 1"),
        ("ACTION: look\nYou see a bed 1.\nACTION: inventory", "look"),
        ("ACTION:", ""),
        ("", ""),
    ],
)
def test_the_command_is_what_follows_the_first_action(reply: str, command: str) -> None:
    assert command_in(reply) == command


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kinds": ["dance"]}, "pick_and_place_simple"),
        ({"kinds": []}, "at least one"),
        ({"num_places": 2, "most_alike": 2}, "num_places = 2"),
        ({"num_places": 30, "most_alike": 1}, "num_places = 30"),
        ({"commands_left": -1}, "commands_left = -1"),
        ({"max_turns": 0}, "max_turns = 0"),
        ({"heldout_frac": 0.0}, "heldout_frac = 0.0"),
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


def test_teachers_slip_now_and_then_and_still_reach_the_goal() -> None:
    def slips(slip_frac: float) -> list[list[str]]:
        games = demonstrations(num=100, seed=1, careful_frac=(1.0, 1.0), slip_frac=slip_frac, **TINY)
        said = [[str(message.content) for message in game.conversation] for game in games]
        assert not any(game[-1] == "inventory" for game in said)
        return [[done for done, told in pairwise(game) if told == NOTHING] for game in said]

    assert not any(slips(0.0))
    often = slips(1.0)
    assert sum(map(bool, often)) > 50
    assert all(command.startswith("take ") for game in often for command in game)
    assert 0 < sum(map(len, slips(0.2))) < 0.5 * sum(map(len, often))


def test_demonstrations_and_tasks_share_no_room() -> None:
    shown = {game.conversation[0].content for game in demonstrations(num=300, seed=0, **TINY)}
    asked = {task.prompt for task in Household(**TINY, size=300).tasks("heldout")}
    assert not shown & asked
