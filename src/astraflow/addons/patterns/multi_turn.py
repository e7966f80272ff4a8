"""The workflow `multi_turn`: a wrong answer gets feedback and another try in the same conversation."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from astraflow.types.facts import is_right
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import policy_at
from astraflow.workflows.variant import PolicyRoles, template

__all__ = ["FEEDBACK", "MultiTurnConfig", "multi_turn"]

FEEDBACK = "That is not right. Try again."


class MultiTurnConfig(PolicyRoles):
    """A wrong answer gets feedback and another try in the same conversation."""

    is_replayable: ClassVar[bool] = True
    name: Literal["multi_turn"] = "multi_turn"
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""
    turns: int = Field(default=3, ge=1)
    """Maximum number of answers per episode."""
    feedback: Annotated[str, template("score")] = FEEDBACK
    """Message to the policy after a wrong answer; `{score}` is the score of that answer."""
    rewards_each_turn: bool = False
    """Reward each turn with its own score, instead of the whole conversation with the last score."""

    def make(self) -> Workflow:
        """Makes the workflow."""
        return self.bind(multi_turn)


async def multi_turn(
    task: ScoredTask,
    policies: Policies,
    *,
    policy: str = "",
    turns: int = 3,
    feedback: str = FEEDBACK,
    rewards_each_turn: bool = False,
) -> Rewards:
    """Asks until an answer is right, at most `turns` times.

    Rewards: the entire conversation gets the last answer's score or, with `rewards_each_turn`, each turn gets
    its own score. The recipe's credit decides how much a late success is worth.

    Metrics: `first_score`, the score of the first answer, which is given without feedback.
    """
    rewards = Rewards()
    chat = policy_at(policies, policy, 0).conversation(context=task.context)
    scores: list[float] = []
    prompt = task.prompt
    for _ in range(turns):
        answer = await chat.say(prompt)
        scores.append(await task.score(answer.text))
        if rewards_each_turn:
            rewards.add(answer, scores[-1])
        is_context_full = answer.num_tokens == 0
        if is_right(scores[-1]) or is_context_full:
            break
        prompt = feedback.format(score=scores[-1])
    if not rewards_each_turn:
        rewards.add(chat, scores[-1])
    rewards.set_score(scores[-1])
    rewards.add_metric("first_score", scores[0])
    return rewards
