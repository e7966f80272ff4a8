"""Plays `household` by HTTP as AgentBench's client does, and the same game in this process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp.test_utils import TestClient
from recipes.alfworld.household_room import Room
from recipes.alfworld.household_world import Household

from astraflow.types import Task

__all__ = ["GameResult", "play_by_http", "played_here"]


@dataclass
class GameResult:
    """What was said in a game, and what came out of it."""

    replies: list[str]
    told: list[str]
    reward: float
    status: str = field(default="", compare=False)
    """How AgentBench calls the end; empty for a game in this process."""


def played_here(world: Household, task: Task, player: Callable[[Room], Iterator[str]]) -> GameResult:
    """A game in this process."""
    game, seen = world.reset(task, seed=0)
    commands = player(game.room)
    played = GameResult([], [str(seen.messages)], 0.0)
    while not seen.is_done:
        played.replies.append(f"THOUGHT: I go on.\nACTION: {next(commands)}")
        seen = world.step(game, played.replies[-1])
        played.told.append(str(seen.messages))
        played.reward += seen.reward
    return played


async def play_by_http(client: TestClient[Any, Any], idx: int, replies: Sequence[str]) -> GameResult:
    """A game with these replies, by the requests of AgentBench's client."""
    async with client.post("/api/start_sample", json={"name": "household", "index": idx}) as answer:
        assert answer.status == 200, await answer.text()
        heard = await answer.json()
    number = heard["session_id"]
    left = list(replies)
    while heard["output"]["status"] == "running":
        body = {"session_id": number, "agent_response": {"status": "normal", "content": left.pop(0)}}
        async with client.post("/api/interact", json=body) as answer:
            assert answer.status == 200, await answer.text()
            heard = await answer.json()
        assert heard["session_id"] == number
    assert not left
    history = heard["output"]["history"]
    assert [said["role"] for said in history] == (["user", "agent"] * len(history))[: len(history)]
    contents = [said["content"] for said in history]
    reward = float(heard["output"]["result"]["result"])
    return GameResult(contents[1::2], contents[::2], reward, heard["output"]["status"])
