"""The workflow: how the policy and a task talk in one episode. `recipe.yaml` names it under `workflow`."""

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["two_tries"]


async def two_tries(task: ScoredTask, policies: Policies, *, discount: float = 0.5) -> Rewards:
    """Asks; if the answer is wrong, asks once more in the same conversation. A later answer is worth less."""
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
