"""A workflow that proposes tasks: it turns each solved sum into a longer one.

Try it: astraflow try examples/harder_sums.yaml --task 1
"""

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["harder_sums"]


async def harder_sums(task: ScoredTask, policies: Policies, *, max_digits: int = 3) -> Rewards:
    """Asks once. After a correct answer, it proposes the same sum with one more digit per number."""
    rewards = Rewards()
    answer = await policies["actor"].chat(task.prompt)
    score = await task.score(answer.text)
    rewards.add(answer, score)
    a, b = (int(number) for number in task.prompt.removeprefix("Calculate ").rstrip(".").split(" + "))
    if score == 1.0 and max(a, b) < 10 ** (max_digits - 1):
        a, b = 10 * a + b % 10, 10 * b + a % 10
        await task.propose(f"Calculate {a} + {b}.", answer=str(a + b))
    return rewards
