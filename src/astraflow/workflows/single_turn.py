"""The workflow `single_turn`: one prompt, one completion, one score."""

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["single_turn"]


async def single_turn(task: ScoredTask, policies: Policies, *, policy: str = "") -> Rewards:
    """Asks `policy` (empty: the recipe's first) and rewards its answer with the task's score."""
    rewards = Rewards()
    chat = policies[policy or next(iter(policies))].conversation(context=task.context)
    answer = await chat.say(task.prompt)
    rewards.add(chat, await task.score(answer.text))
    return rewards
