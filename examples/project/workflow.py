"""The workflow, which drives one episode. `recipe.yaml` names it under `workflow`."""

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["two_tries"]


async def two_tries(task: ScoredTask, policies: Policies, *, discount: float = 0.5) -> Rewards:
    """Asks, and after a wrong answer asks once more in the same conversation, for a smaller reward."""
    rewards = Rewards()
    chat = policies["actor"].conversation(context=task.context)
    first = await chat.say(task.prompt)
    score = await task.score(first.text)
    rewards.add(first, score)
    rewards.set_score(score)  # evaluation reports the first try
    if score < 1.0:
        second = await chat.say(task.prompt)
        rewards.add(second, discount * await task.score(second.text))
    rewards.add_metric("right_at_first", float(score == 1.0))
    return rewards
