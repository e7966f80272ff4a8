"""Every policy speaks in turn, and an environment takes its time: for benchmarks with `paced` engines.

The reward is a coin that the completion's text decides, so groups differ within and nothing is scored.
"""

import asyncio
import math
import random
import zlib

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["paced"]

_REPLY = "Go on."


async def paced(
    task: ScoredTask,
    policies: Policies,
    *,
    turns: int = 1,
    env_s: float = 0.0,
    env_sigma: float = 1.0,
    time_scale: float = 1.0,
) -> Rewards:
    """Lets each of the recipe's policies say `turns` completions, one after the other.

    After each, the environment takes a log-normal time with median `env_s` and `env_sigma`, in emulated
    seconds, of which `time_scale` fit into one of the wall clock.
    """
    rewards = Rewards()
    chats = {name: policies[name].conversation(context=task.context) for name in policies}
    coins: list[int] = []
    prompt = task.prompt
    for _ in range(turns):
        for chat in chats.values():
            answer = await chat.say(prompt)
            digest = zlib.crc32(answer.text.encode())
            coins.append(digest & 1)
            rewards.add(answer, coins[-1] / turns)
            if env_s:
                latency_s = random.Random(digest).lognormvariate(math.log(env_s), env_sigma)
                await asyncio.sleep(latency_s / time_scale)
        prompt = _REPLY
    rewards.set_score(sum(coins) / len(coins))
    return rewards
