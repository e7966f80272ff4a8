"""Plays the same actions in `household` in three ways: in this process, by AgentBench v0.2, and by the
adapter protocol."""

import random
from functools import partial

from aiohttp.test_utils import TestServer
from examples.environments.agentbench import AgentBench
from examples.environments.episode_server import EpisodeServer
from recipes.alfworld.household_players import expert, random_player
from recipes.alfworld.household_server import make_app
from recipes.alfworld.household_world import Household

from astraflow.protocols import Observation
from astraflow.types import Task
from drivers.agentbench_client import played_here

__all__ = ["check_ways"]


async def check_ways(world: Household, num: int) -> None:
    """Checks that `num` games have the same rewards and texts in all ways; half of them are an expert's."""
    rng = random.Random(0)
    rewards = list[float]()
    async with TestServer(make_app(world)) as server:
        url = str(server.make_url("/api"))
        environments = (
            AgentBench(url=url, name="household", samples=num),
            EpisodeServer(url=url, samples=num),
        )
        for environment in environments:
            await environment.open()
        for idx, task in enumerate(world.tasks("heldout")[:num]):
            player = expert if idx % 2 else partial(random_player, rng=rng)
            here = played_here(world, task, player)
            rewards.append(here.reward)
            for environment in environments:
                told, reward = await _played(environment, idx, here.replies)
                assert reward == here.reward
                # The adapter protocol says nothing with the reward.
                assert told[: len(here.told) - 1] == here.told[:-1]
        for environment in environments:
            await environment.close()
    assert 0 < sum(rewards) < num


async def _played(
    environment: AgentBench | EpisodeServer, idx: int, replies: list[str]
) -> tuple[list[str], float]:
    task = Task(id=str(idx), source="heldout", prompt="", spec=str(idx))
    session, seen = await environment.reset(task, 0)
    told = [_text(seen)]
    total = 0.0
    for reply in replies:
        assert not seen.is_done
        seen = await environment.step(session, reply)  # pyright: ignore[reportArgumentType]
        told.append(_text(seen))
        total += seen.reward
    assert seen.is_done
    await environment.end(session)  # pyright: ignore[reportArgumentType]
    return told, total


def _text(seen: Observation) -> str:
    assert not isinstance(seen.messages, str)
    return "\n".join(message.content for message in seen.messages)
