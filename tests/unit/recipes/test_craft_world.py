"""The world `craft`: its rules, tasks and crew, and how well those play who know it and who do not."""

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from recipes.textcraft.craft_crew import crew
from recipes.textcraft.craft_players import expert, random_player
from recipes.textcraft.craft_teachers import demonstrations
from recipes.textcraft.craft_workshop import CRAFTED, REFUSED, TIERS, UNKNOWN, Workshop
from recipes.textcraft.craft_world import Craft, command_in

from astraflow.errors import ConfigError
from astraflow.rollout.environments import Environments
from astraflow.rollout.runner import EpisodeRunner
from astraflow.tasks.config import EnvironmentConfig
from astraflow.tasks.environment import with_environment
from astraflow.types import Episode
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_task
from drivers.world_driver import rewards_of, take_odd_steps

TINY: dict[str, Any] = {"most_ingredients": 2, "most_each": 2, "num_others": 0}
WHEEL = {"wheel": {"plank": 1, "stone": 1}, "plank": {"log": 2}}
CART = {"cart": {"wheel": 1, "ore": 2}, **WHEEL}


@pytest.mark.parametrize("shape", [{}, TINY], ids=["default", "tiny"])
def test_the_expert_makes_every_target_and_a_random_player_hardly_any(shape: dict[str, Any]) -> None:
    world = Craft(**shape, size=60)
    rng = random.Random(0)
    assert statistics.mean(rewards_of(world, lambda game: expert(game.workshop), 60)) == 1.0
    alone = rewards_of(world, lambda game: expert(game.workshop, has_helpers=False), 60)
    assert statistics.mean(alone) == 1.0
    assert statistics.mean(rewards_of(world, lambda game: random_player(rng), 60)) <= 0.10


def test_no_reply_however_odd_raises() -> None:
    odd = [
        "",
        "ACTION:",
        "get",
        "get 0 log",
        "get 99 log",
        "get \u0664 log",
        "craft",
        "spawn \x00\x1b[2J",
        "done",
    ]
    odd += ["x" * 1_000_000, "spawn log", "craft gold", "get cart"]
    rng = random.Random(1)
    take_odd_steps(Craft(size=50), lambda game: random_player(rng), odd, 1_000)


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    first, again, other = (Craft(size=100, seed=seed).tasks("train") for seed in (3, 3, 4))
    assert first == again
    assert [task.spec for task in first] != [task.spec for task in other]


def depth_of(recipes: dict[str, dict[str, int]], item: str) -> int:
    return 1 + max(depth_of(recipes, name) for name in recipes[item]) if item in recipes else 0


def test_splits_share_no_task_and_trees_have_the_depths_1_to_3() -> None:
    world = Craft(**TINY, size=600)
    train, heldout = ({task.prompt for task in world.tasks(split)} for split in ("train", "heldout"))
    assert not train & heldout
    shops = [world.workshop("heldout", idx) for idx in range(600)]
    depths = Counter(depth_of(shop.recipes, shop.target) for shop in shops)
    assert set(depths) == {1, 2, 3}
    assert min(depths.values()) > 60
    assert {shop.target for shop in shops} == set(CRAFTED)
    assert all(depth_of(s.recipes, s.target) == depth_in_tiers(s.target) for s in shops)


def depth_in_tiers(item: str) -> int:
    return next(at for at, items in enumerate(TIERS) if item in items)


def test_a_game_of_two_agents() -> None:
    workshop = Workshop(WHEEL, "wheel")
    assert workshop.text == "plank: 2 log\nwheel: 1 plank, 1 stone\nGoal: wheel"
    told = [
        ("get 1 stone", "Got 1 stone."),
        ("craft wheel", "Lacking 1 plank."),
        ("get plank", "A plank has to be crafted."),
        ("craft cart", UNKNOWN),
        ("spawn plank", "plank: 2 log\nwheel: 1 plank, 1 stone\nGoal: plank"),
        ("get log", "Got 1 log."),
        ("craft plank", "Lacking 1 log."),
        ("get 1 log", "Got 1 log."),
        ("inventory", "You have 1 stone, 2 log."),
        ("craft plank", "The helper made 1 plank."),
        ("craft wheel", "Made 1 wheel."),
    ]
    for command, expected in told:
        assert not workshop.is_solved
        assert workshop.do(command) == expected
    assert workshop.is_solved
    assert workshop.do("inventory") == "You have 1 wheel."


def test_helpers_beyond_the_depth_or_the_budget_are_refused_and_counted() -> None:
    workshop = Workshop(CART, "cart", most_depth=1, most_helpers=2)
    assert workshop.do("spawn wheel").endswith("Goal: wheel")
    assert workshop.do("spawn plank") == REFUSED
    assert workshop.do("done") == "The helper stopped."
    assert workshop.do("spawn wheel").endswith("Goal: wheel")
    workshop.do("done")
    assert workshop.do("spawn wheel") == REFUSED
    assert workshop.num_refused == 2
    assert not workshop.is_over
    workshop.do("done")
    assert workshop.is_over


def test_an_expert_without_free_helpers_does_the_work_itself() -> None:
    workshop = Workshop(CART, "cart", most_helpers=1)
    played = list[str]()
    for command in expert(workshop):
        played.append(command)
        workshop.do(command)
    assert workshop.is_solved
    assert [command for command in played if command.startswith("spawn")] == ["spawn wheel"]
    assert workshop.num_refused == 0


def test_an_episode_ends_when_the_first_agent_is_done_and_when_the_turns_are_used_up() -> None:
    world = Craft(**TINY, max_turns=3, size=1)
    (task,) = world.tasks("train")
    game, _ = world.reset(task, seed=0)
    assert world.step(game, "done").is_done
    game, _ = world.reset(task, seed=0)
    assert [world.step(game, "inventory").is_done for _ in range(3)] == [False, False, True]


def test_the_full_form_instructs_each_agent_that_begins() -> None:
    world = Craft(targets=["wheel"], size=1)
    game, seen = world.reset(world.tasks("train")[0], seed=0)
    assert "Here is your task." in str(seen.messages)
    assert str(seen.messages).endswith(game.workshop.text)
    assert world.step(game, "THOUGHT: I look.\nACTION: inventory").messages == "You have nothing."
    assert "Here is your task." in str(world.step(game, "ACTION: spawn wheel").messages)


def test_an_episode_may_begin_when_few_commands_are_left() -> None:
    world = Craft(**TINY, commands_left=1, form="bare", size=20)
    for task in world.tasks("train"):
        game, seen = world.reset(task, seed=0)
        assert str(seen.messages).startswith(f"{task.prompt}\nYou have ")
        assert world.step(game, f"craft {game.workshop.target}").reward == 1


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("get 2 log", "get 2 log"),
        ("THOUGHT: I go.\n ACTION: Get  2 log.\nmore", "get 2 log"),
        ("ACTION: done\nGot 1 log.\nACTION: craft cart", "done"),
        ("", ""),
    ],
)
def test_the_command_is_what_follows_the_first_action(reply: str, command: str) -> None:
    assert command_in(reply) == command


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"targets": ["log"]}, "targets = .'log'.: choose at least one of brick"),
        ({"targets": []}, "at least one"),
        ({"most_ingredients": 0}, "most_ingredients = 0"),
        ({"most_each": 10}, "most_each = 10"),
        ({"num_others": 12}, "num_others = 12 is not one of 0 to 11"),
        ({"most_helpers": -1}, "most_helpers = -1"),
        ({"max_turns": 0}, "max_turns = 0"),
        ({"heldout_frac": 1.0}, "heldout_frac = 1.0"),
    ],
)
def test_worlds_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Craft(**wrong)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="not one of: train, heldout"):
        Craft().tasks("test")


# --- teachers ---------------------------------------------------------------------------------------


def shown(**teaching: Any) -> list[list[str]]:
    made = demonstrations(num=400, seed=1, **teaching, **TINY)
    assert len(made) == 400
    assert made == demonstrations(num=400, seed=1, **teaching, **TINY)
    return [[str(message.content) for message in agent.conversation] for agent in made]


def test_careful_teachers_lack_nothing_and_hasty_ones_always_do() -> None:
    careful = shown(careful_frac=(1.0, 1.0))
    assert not any(said.startswith("Lacking") or said == "done" for agent in careful for said in agent)
    hasty = shown(careful_frac=(0.0, 0.0))
    assert statistics.mean(agent[-2].startswith("Lacking") and agent[-1] == "done" for agent in hasty) > 0.9
    assert any(agent[1] == "get 1 log" and "2 log" in agent[0] for agent in hasty)


def test_careful_teachers_that_slip_go_on() -> None:
    slipping = shown(careful_frac=(1.0, 1.0), slip_frac=0.3)
    lacked = [agent for agent in slipping if any(said.startswith("Lacking") for said in agent)]
    assert 80 < len(lacked) < 300
    # Few stop all the same: a helper that slipped had used what the one that started it had gathered.
    assert statistics.mean(agent[-1] == "done" for agent in lacked) < 0.1


def test_each_helper_of_a_teacher_is_shown_its_own_goal() -> None:
    agents = shown(careful_frac=(1.0, 1.0))
    goals = [agent[0].rpartition("Goal: ")[2] for agent in agents]
    assert all(f"craft {goal}" in agent for goal, agent in zip(goals, agents, strict=True))
    assert sum(agent[2:].count(f"The helper made 1 {item}.") for agent in agents for item in CRAFTED) > 50
    held = {task.prompt for task in Craft(**TINY, size=300).tasks("heldout")}
    assert not held & {agent[0] for agent in agents}


# --- the crew ---------------------------------------------------------------------------------------


def saying(replies: Sequence[str]) -> ScriptedEngine:
    left: Iterator[str] = iter(replies)
    return ScriptedEngine(lambda _: next(left), max_context=2_000)


async def episode_of(engines: dict[str, ScriptedEngine], **limits: int) -> Episode:
    """An episode of a wheel."""
    args = {"form": "bare", **limits}
    config = EnvironmentConfig(use="recipes.textcraft.craft_world:Craft", args=args)
    spec = msgspec.json.encode({"recipes": WHEEL, "target": "wheel"}).decode()
    task = with_environment(msgspec.structs.replace(make_task(), spec=spec), "craft")
    environments = Environments({"craft": config})
    try:
        await environments.open()
        hosted = {name: make_hosted(name, engine) for name, engine in engines.items()}
        return await EpisodeRunner(hosted, crew, exact, environments=environments).episode(task, seed=1)
    finally:
        await environments.close()


HELPED = ("get 2 log", "craft plank")


async def test_a_helper_has_a_conversation_of_its_own_and_all_are_rewarded_alike() -> None:
    engine = saying(["get 1 stone", "spawn plank", *HELPED, "craft wheel"])
    episode = await episode_of({"actor": engine})
    assert episode.score == 1.0
    said = {
        trajectory.role: (trajectory.reward, len(trajectory.turns)) for trajectory in episode.trajectories
    }
    assert said == {"agent": (1.0, 3), "helper": (1.0, 2)}
    metrics = {metric.name: metric.value for metric in episode.metrics}
    assert (metrics["helpers"], metrics["refused_spawns"], metrics["done"]) == (1, 0, 1)


async def test_helpers_may_be_another_policy() -> None:
    engines = {"lead": saying(["get 1 stone", "spawn plank", "craft wheel"]), "hand": saying(HELPED)}
    episode = await episode_of(engines)
    assert episode.score == 1.0
    assert {(t.policy, t.role) for t in episode.trajectories} == {("lead", "agent"), ("hand", "helper")}


async def test_refused_helpers_are_counted_and_an_agent_that_gives_up_has_no_reward() -> None:
    episode = await episode_of({"actor": saying(["spawn plank", "spawn plank", "done"])}, most_helpers=0)
    assert episode.score == 0.0
    metrics = {metric.name: metric.value for metric in episode.metrics}
    assert (metrics["helpers"], metrics["refused_spawns"]) == (0, 2)
