"""The workflow `plan_and_solve`: a planner writes a plan, and solvers follow it."""

from statistics import fmean
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import blend, in_parallel, policy_at
from astraflow.workflows.variant import PolicyRoles, Share, template

__all__ = ["FOLLOW_PROMPT", "PLAN_PROMPT", "PlanAndSolveConfig", "plan_and_solve"]

PLAN_PROMPT = "{prompt}\n\nDo not solve this yet. Write a short plan, step by step."
FOLLOW_PROMPT = "{prompt}\n\nFollow this plan:\n{plan}"


class PlanAndSolveConfig(PolicyRoles):
    """A planner writes a plan, and solvers follow it."""

    roles: ClassVar[tuple[str, ...]] = ("planner", "solver")
    is_replayable: ClassVar[bool] = True
    name: Literal["plan_and_solve"] = "plan_and_solve"
    planner: str = ""
    """Policy that plans; empty: the recipe's first policy."""
    solver: str = ""
    """Policy that solves; empty: the recipe's second policy."""
    num_solvers: int = Field(default=1, ge=1, le=1024)
    """Number of answers that follow the plan, in parallel."""
    plan_prompt: Annotated[str, template("prompt")] = PLAN_PROMPT
    """Prompt of the planner, with `{prompt}`."""
    follow_prompt: Annotated[str, template("prompt", "plan")] = FOLLOW_PROMPT
    """Prompt of a solver, with `{prompt}` and `{plan}`."""
    team_share: Share = 0.0
    """Share of the solvers' mean score in a solver's reward."""

    def make(self) -> Workflow:
        """Makes the workflow."""
        return self.bind(plan_and_solve)


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
    """Lets the planner write one plan, which `num_solvers` answers follow in parallel.

    The mean score of the answers is the episode's score.

    Rewards: each solver gets its own score, and the planner gets the mean, because a plan is as good as the
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
        rewards.add(chat, blend(score, team, team_share))
    rewards.add(plan, team)
    rewards.set_score(team)
    return rewards
