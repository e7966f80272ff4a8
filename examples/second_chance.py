"""A workflow for one policy: after a wrong answer, it gets another try in the same conversation.

Try it: astraflow try examples/second_chance.yaml --task 1
"""

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["second_chance"]


async def second_chance(task: ScoredTask, policies: Policies, *, tries: int = 2) -> Rewards:
    """Asks up to `tries` times. Each answer is a turn with its own reward; each retry halves it."""
    rewards = Rewards()
    chat = policies["actor"].conversation(context=task.context)
    score = 0.0
    num_tries = 0
    while score < 1.0 and num_tries < tries:
        answer = await chat.say(task.prompt)  # extends the exact tokens of the turn before
        score = await task.score(answer.text)
        rewards.add(answer, score * 0.5**num_tries)
        num_tries += 1
    rewards.set_score(score)
    rewards.add_metric("tries", num_tries)
    return rewards
