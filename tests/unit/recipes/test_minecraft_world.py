"""TextCraft by Minecraft's recipe files: how they are read, what an agent sees, and what its actions do."""

import re
from pathlib import Path

import pytest
from recipes.textcraft.minecraft_world import Recipe, TextCraft, read_book

from astraflow.errors import ConfigError, DataError
from drivers.minecraft_files import write_minecraft


@pytest.fixture
def world(tmp_path: Path) -> TextCraft:
    return TextCraft(path=str(write_minecraft(tmp_path)))


def play(world: TextCraft, goal: str, *actions: str) -> tuple[list[str], float]:
    """What the actions were answered, and the reward."""
    (task,) = [t for split in ("train", "heldout") for t in world.tasks(split) if t.spec == goal]
    game, _ = world.reset(task, 0)
    told = [world.step(game, f"THOUGHT: on it\nACTION: {action}") for action in actions]
    return [str(one.messages) for one in told], sum(one.reward for one in told)


def test_shaped_and_shapeless_recipes_are_read_with_their_numbers(tmp_path: Path) -> None:
    book = read_book(write_minecraft(tmp_path))
    assert book.by_item["oak sign"] == [Recipe("oak sign", 3, {"oak planks": 6, "stick": 1})]
    assert book.by_item["oak planks"] == [Recipe("oak planks", 4, {"oak logs": 1})]
    assert book.groups["planks"] == {"oak planks", "birch planks"}
    assert (book.depth("oak logs"), book.depth("planks"), book.depth("stick"), book.depth("oak sign")) == (
        0, 1, 2, 3,
    )  # fmt: skip


def test_what_leads_back_comes_from_a_block_or_a_furnace_is_left_out(tmp_path: Path) -> None:
    book = read_book(write_minecraft(tmp_path))
    assert [recipe.needs for recipe in book.by_item["iron ingot"]] == []  # a block is made of ingots
    assert "glass" not in book.known
    assert book.is_fetched("iron ingot")


def test_the_prompt_has_the_commands_that_the_goal_needs(world: TextCraft) -> None:
    text = world.text("oak sign")
    assert text.startswith("Crafting commands:\ncraft ")
    assert text.endswith("\n\nGoal: craft oak sign.")
    for command in ("craft 3 oak sign using 6 oak planks, 1 stick", "craft 4 stick using 2 planks"):
        assert command in text.splitlines()
    assert text == world.text("oak sign")


def test_a_goal_is_reached_by_its_recipes(world: TextCraft) -> None:
    told, reward = play(
        world,
        "oak sign",
        "get 2 oak logs",
        "craft 4 oak planks using 1 oak logs",
        "craft 4 oak planks using 1 oak logs",
        "craft 4 stick using 2 oak planks",
        "inventory",
        "craft 3 oak sign using 6 oak planks, 1 stick",
    )
    assert told[:2] == ["Got 2 oak logs", "Crafted 4 minecraft:oak_planks"]
    assert told[4] == "Inventory: [oak planks] (6) [stick] (4)"
    assert reward == 1.0


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("get 1 stick", "Could not find stick"),
        ("get 1 diamond", "Could not find diamond"),
        ("craft 4 stick using 2 birch planks", "Could not find enough items to craft minecraft:stick"),
        ("craft 4 stick using 3 oak planks", "Could not find a valid recipe for stick"),
        ("craft 4 stick using 2 oak planks, 1 oak logs", "Could not find a valid recipe for stick"),
        ("inventory", "Inventory: You are not carrying anything."),
        ("dance", "Could not execute dance"),
    ],
)
def test_an_impossible_action_says_why(world: TextCraft, action: str, said: str) -> None:
    assert play(world, "oak sign", action) == ([said], 0.0)


def test_an_episode_ends_after_its_turns(tmp_path: Path) -> None:
    world = TextCraft(path=str(write_minecraft(tmp_path)), max_turns=2)
    game, _ = world.reset(world.tasks("train")[0], 0)
    assert [world.step(game, "inventory").is_done for _ in range(2)] == [False, True]


def test_a_folder_without_recipes_names_the_command_that_gets_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no crafting recipes .*git clone .*--branch 1\.16\.5 https"):
        TextCraft(path=str(tmp_path)).tasks("train")
    write_minecraft(tmp_path)
    (tmp_path / "torn.json").write_text('{"type": "minecraft:crafting_shaped", "result": {}}')
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'torn.json'} is not a recipe")):
        TextCraft(path=str(tmp_path)).tasks("train")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_turns = 0"):
        TextCraft(path="x", max_turns=0)
    with pytest.raises(ConfigError, match="split = 'test'"):
        TextCraft(path="x").tasks("test")
