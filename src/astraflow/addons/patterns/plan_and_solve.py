"""The workflow `plan_and_solve`: a planner writes a plan, and solvers follow it."""

from statistics import fmean

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import blended, in_parallel, policy_at

__all__ = ["FOLLOW_PROMPT", "PLAN_PROMPT", "plan_and_solve"]

PLAN_PROMPT = "{prompt}\n\nDo not solve this yet. Write a short plan, step by step."
FOLLOW_PROMPT = "{prompt}\n\nFollow this plan:\n{plan}"


async def plan_and_solve(
    task: ScoredTask,
    policies: Policies,
    *,
    planner: str = "",
    solver: str = "",
    num_solvers: int = 1,
    plan_prompt: str = PLAN_PROMPT,
    follow_prompt: str = FOLLOW_PROMPT,
    team_share: float = 0.0,
) -> Rewards:
    """The planner writes one plan, and `num_solvers` answers follow it in parallel.

    The mean score of the answers is the episode's score.
    Rewarded: each solver with its own score, and the planner with the mean, because a plan is as good as the
    answers that follow it. More solvers make the planner's reward less noisy. `team_share` mixes the mean
    into the solvers' rewards.
    """
    plan = await policy_at(policies, planner, 0).chat(plan_prompt.format(prompt=task.prompt), role="planner")
    text = follow_prompt.format(prompt=task.prompt, plan=plan.reply)
    actor = policy_at(policies, solver, 1)
    chats = [actor.conversation(context=task.context, role="solver") for _ in range(num_solvers)]
    answers = await in_parallel(chat.say(text) for chat in chats)
    scores = await in_parallel(task.score(answer.text) for answer in answers)
    rewards = Rewards()
    team = fmean(scores)
    for chat, score in zip(chats, scores, strict=True):
        rewards.add(chat, blended(score, team, team_share))
    rewards.add(plan, team)
    rewards.set_score(team)
    return rewards
