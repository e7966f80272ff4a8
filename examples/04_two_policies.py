"""A workflow of two trained policies: a solver answers, and a verifier judges the answer.

`recipes/pair.yaml` and `04_two_policies.yaml` use it. Each policy is rewarded for its own job: the solver for
a correct answer, the verifier for a correct verdict. With more rounds, the solver tries again as long as the
verifier objects.
"""

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["solve_and_verify"]


async def solve_and_verify(task: ScoredTask, policies: Policies, *, rounds: int = 1) -> Rewards:
    """Lets the solver answer until the verifier's verdict is `=y`, at most `rounds` times."""
    rewards = Rewards()
    score = 0.0
    accepts = False
    for _ in range(rounds):
        answer = await policies["actor"].chat(task.prompt)
        score = await task.score(answer.text)
        rewards.add(answer, score)
        verdict = await policies["verifier"].chat(f"{task.prompt}{answer.reply}?")
        accepts = verdict.reply.endswith("=y")
        rewards.add(verdict, float(verdict.reply.endswith("=y" if score == 1.0 else "=n")))
        if accepts:
            break
    rewards.set_score(score)
    rewards.add_metric("verifier_agrees", float(accepts == (score == 1.0)))
    return rewards
