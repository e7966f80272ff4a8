"""The workflow of `dive`: each helper has a conversation of its own, and a judge may check the report."""

from operator import eq
from statistics import fmean

from recipes.crew import Marks, work
from recipes.deepdive.dive_checklist import facts_judged
from recipes.deepdive.dive_world import QUESTION, REFUSED, RETURNED, action_in, checklist_of

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["dive"]

_MARKS = Marks(begun=QUESTION, returned=RETURNED, refused=REFUSED)


async def dive(
    task: ScoredTask,
    policies: Policies,
    *,
    agent: str = "",
    helper: str = "",
    judge: str = "",
    judge_tries: int = 3,
) -> Rewards:
    """The first agent acts; one that asks a helper waits for its answer. Then the report is checked.

    `agent`, `helper`: policies of the first agent and of all helpers; see `recipes.crew.work`. `judge`: the
    policy that checks the facts of a report with a right answer, asked at most `judge_tries` times per fact;
    empty: the world's own checker.
    Rewarded: the conversation of each agent with the reward of the report.
    Metrics: those of `recipes.crew.Worked`; `right`, 1 if the answer is right, else 0; with a judge, of right
    answers, `judge_agrees`: share of the facts on which the judge and the checker agree.
    Raises: RolloutError if the judge gives no verdict; there is no reward then.
    """
    worked = await work(task, policies, _MARKS, agent=agent, helper=helper)
    rewards = Rewards()
    reward = worked.seen.reward
    if judge and reward > 0:
        checklist = checklist_of(task.spec)
        _, report = action_in(worked.reply)
        judged = await facts_judged(checklist, report, policies[judge], rewards, tries=judge_tries)
        checked = checklist.facts_reported(report)
        reward = checklist.reward(report, judged)
        rewards.add_metric("judge_agrees", fmean(map(eq, judged, checked)))
    worked.reward(rewards, reward)
    rewards.add_metric("right", float(worked.seen.reward > 0))
    return rewards
