"""A workflow whose environment takes its time, as tools and browsers do: a run gets longer without work."""

import asyncio

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["unhurried"]


async def unhurried(task: ScoredTask, policies: Policies, *, pause_s: float) -> Rewards:
    """One turn, after a pause."""
    await asyncio.sleep(pause_s)
    rewards = Rewards()
    chat = policies["actor"].conversation(context=task.context)
    answer = await chat.say(task.prompt)
    rewards.add(chat, await task.score(answer.text))
    return rewards
