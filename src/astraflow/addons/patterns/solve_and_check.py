"""The workflow `solve_and_check`: a checker reads a solver's answer and gives the final answer itself."""

from typing import Annotated, ClassVar, Literal

from astraflow.types.facts import is_right
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import blend, policy_at
from astraflow.workflows.variant import PolicyRoles, Share, template

__all__ = ["CHECK_PROMPT", "SolveAndCheckConfig", "solve_and_check"]

CHECK_PROMPT = (
    "Problem:\n{prompt}\n\nAn answer that may be wrong:\n{answer}\n\nCheck it, then give the right answer."
)


class SolveAndCheckConfig(PolicyRoles):
    """A checker reads the solver's answer and gives the final answer itself."""

    roles: ClassVar[tuple[str, ...]] = ("solver", "checker")
    is_replayable: ClassVar[bool] = True
    name: Literal["solve_and_check"] = "solve_and_check"
    solver: str = ""
    """Policy that solves; empty: the recipe's first policy."""
    checker: str = ""
    """Policy that checks; empty: the recipe's second policy."""
    check_prompt: Annotated[str, template("prompt", "answer")] = CHECK_PROMPT
    """Prompt of the checker, with `{prompt}` and `{answer}`."""
    team_share: Share = 0.0
    """Share of the final answer's score in the solver's reward."""

    def make(self) -> Workflow:
        """Makes the workflow."""
        return self.bind(solve_and_check)


async def solve_and_check(
    task: ScoredTask,
    policies: Policies,
    *,
    solver: str = "",
    checker: str = "",
    check_prompt: str = CHECK_PROMPT,
    team_share: float = 0.0,
) -> Rewards:
    """Lets the solver answer, then the checker, whose answer is the final one.

    The score of the final answer is the episode's score.

    Rewards: the solver gets the score of its own answer, and the checker gets the score of the final one.
    `team_share` mixes the final score into the solver's reward.

    Metrics: `first_score`, the score of the solver's answer; `fixed`, how often the checker corrected a wrong
    answer; `broken`, how often it made a right answer wrong.
    """
    rewards = Rewards()
    chat = policy_at(policies, solver, 0).conversation(context=task.context, role="solver")
    answer = await chat.say(task.prompt)
    own = await task.score(answer.text)
    question = check_prompt.format(prompt=task.prompt, answer=answer.reply)
    check = policy_at(policies, checker, 1).conversation(context=task.context, role="checker")
    final = await check.say(question)
    team = await task.score(final.text)
    rewards.add(chat, blend(own, team, team_share))
    rewards.add(check, team)
    rewards.set_score(team)
    rewards.add_metric("first_score", own)
    rewards.add_metric("fixed", float(is_right(team) and not is_right(own)))
    rewards.add_metric("broken", float(is_right(own) and not is_right(team)))
    return rewards
