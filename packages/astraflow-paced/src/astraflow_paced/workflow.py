"""The `paced` workflow: every policy generates in turn, and an emulated environment takes time to answer.

The reward is 0 or 1, decided by a checksum of the completion's text. So rewards differ within a group, as
filters and credit need it, and no scoring costs time.
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
    """Lets each policy of the recipe generate `turns` completions, one policy after the other.

    After each completion the environment takes a log-normal time with median `env_s` and standard deviation
    `env_sigma` of its logarithm. These are emulated seconds; `time_scale` of them pass per second of the
    clock.
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
