"""The workflow `propose_and_select`: a proposer makes proposals in parallel, and a selector picks one."""

from statistics import fmean
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import blend, in_parallel, last_choice, policy_at
from astraflow.workflows.variant import PolicyRoles, Share, template

__all__ = ["SELECT_PROMPT", "ProposeAndSelectConfig", "propose_and_select"]

SELECT_PROMPT = (
    "Problem:\n{prompt}\n\n{proposals}\n\nWhich answer is right? End with its number, from 1 to {count}."
)


class ProposeAndSelectConfig(PolicyRoles):
    """A proposer makes several proposals in parallel, and a selector picks one."""

    roles: ClassVar[tuple[str, ...]] = ("proposer", "selector")
    is_replayable: ClassVar[bool] = True
    name: Literal["propose_and_select"] = "propose_and_select"
    proposer: str = ""
    """Policy that proposes; empty: the recipe's first policy."""
    selector: str = ""
    """Policy that selects; empty: the recipe's second policy."""
    num_proposals: int = Field(default=4, ge=2, le=1024)
    """Number of proposals to choose from."""
    select_prompt: Annotated[str, template("prompt", "proposals", "count")] = SELECT_PROMPT
    """Prompt of the selector, with `{prompt}`, `{proposals}` (numbered from 1) and `{count}`."""
    team_share: Share = 0.0
    """Share of the picked proposal's score in the reward of each proposal."""

    def make(self) -> Workflow:
        """Makes the workflow."""
        return self.bind(propose_and_select)


async def propose_and_select(
    task: ScoredTask,
    policies: Policies,
    *,
    proposer: str = "",
    selector: str = "",
    num_proposals: int = 4,
    select_prompt: str = SELECT_PROMPT,
    team_share: float = 0.0,
) -> Rewards:
    """Lets the selector pick a proposal by its number. The score of this proposal is the episode's score.

    If it is unclear which number the selector names, the score is 0.

    Rewards: each proposal gets its own score, and the selector gets the score of the picked proposal.
    `team_share` mixes the picked proposal's score into the proposers' rewards.

    Metrics: `proposal_score`, the mean score of the proposals; `best_score`, the highest; `unreadable`, 1 if
    the selector named no clear number, else 0.
    """
    actor = policy_at(policies, proposer, 0)
    chats = [actor.conversation(context=task.context, role="proposer") for _ in range(num_proposals)]
    answers = await in_parallel(chat.say(task.prompt) for chat in chats)
    scores = await in_parallel(task.score(answer.text) for answer in answers)
    proposals = "\n\n".join(f"Answer {number}:\n{a.reply}" for number, a in enumerate(answers, start=1))
    question = select_prompt.format(prompt=task.prompt, proposals=proposals, count=num_proposals)
    selection = await policy_at(policies, selector, 1).chat(question, role="selector")
    number = last_choice(selection.reply, [str(number) for number in range(1, num_proposals + 1)])
    picked = scores[int(number) - 1] if number else 0.0
    rewards = Rewards()
    for chat, score in zip(chats, scores, strict=True):
        rewards.add(chat, blend(score, picked, team_share))
    rewards.add(selection, picked)
    rewards.set_score(picked)
    rewards.add_metric("proposal_score", fmean(scores))
    rewards.add_metric("best_score", max(scores))
    rewards.add_metric("unreadable", float(not number))
    return rewards
