"""The workflow `solve_and_verify`: a solver tries again until a verifier approves its answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from astraflow.addons.patterns.choices import check_differ
from astraflow.types.facts import is_right
from astraflow.workflows.conversation import (
    Completion,
    Conversation,
    Policies,
    Rewards,
    ScoredTask,
    Workflow,
)
from astraflow.workflows.roles import blend, last_choice, policy_at
from astraflow.workflows.variant import PolicyRoles, Share, template

__all__ = ["RETRY_PROMPT", "VERIFY_PROMPT", "SolveAndVerifyConfig", "solve_and_verify"]

VERIFY_PROMPT = (
    "Problem:\n{prompt}\n\nProposed answer:\n{answer}\n\n"
    "Is the answer right? Say what is wrong, if anything, and end with yes or no."
)
RETRY_PROMPT = "A reviewer rejects this answer:\n{critique}\n\nSolve the problem again:\n{prompt}"


class SolveAndVerifyConfig(PolicyRoles):
    """A verifier approves or rejects an answer; a rejected task is solved again with the critique."""

    roles: ClassVar[tuple[str, ...]] = ("solver", "verifier")
    is_replayable: ClassVar[bool] = True
    name: Literal["solve_and_verify"] = "solve_and_verify"
    solver: str = ""
    """Policy that solves; empty: the recipe's first policy."""
    verifier: str = ""
    """Policy that verifies; empty: the recipe's second policy."""
    rounds: int = Field(default=2, ge=1)
    """Maximum number of attempts."""
    verify_prompt: Annotated[str, template("prompt", "answer")] = VERIFY_PROMPT
    """Prompt of the verifier, with `{prompt}` and `{answer}`."""
    retry_prompt: Annotated[str, template("prompt", "answer", "critique")] = RETRY_PROMPT
    """Prompt of the solver after a rejection, with `{prompt}`, `{answer}` and `{critique}`."""
    approve: str = Field(default="yes", min_length=1)
    """Text that approves: on a line such as `Verdict: yes`, on a last line that only states it, or as the
    first word. Any other verdict is unclear."""
    reject: str = Field(default="no", min_length=1)
    """Text that rejects."""
    keeps_history: bool = True
    """Keep one growing conversation; if false, each attempt starts a new one."""
    splits_verdicts: bool = False
    """Record the verifier as `verifier_of_right` or `verifier_of_wrong`, depending on the answer that it
    judges. The credit `role_balanced` uses this."""
    team_share: Share = 0.0
    """Share of the episode's score in each reward: 0 is individual, 1 is shared."""

    @model_validator(mode="after")
    def _choices_differ(self) -> "SolveAndVerifyConfig":
        check_differ(self.approve, self.reject)
        return self

    def make(self) -> Workflow:
        """Makes the workflow."""
        return self.bind(solve_and_verify)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One attempt of the solver and the verifier's verdict on it."""

    chat: Conversation
    score: float
    verdict: Completion
    choice: bool | None
    """True if the verdict approves, False if it rejects, None if it is unclear."""

    @property
    def is_judged_right(self) -> bool:
        """Whether the verdict approves a right answer or rejects a wrong one."""
        return self.choice is is_right(self.score)


async def solve_and_verify(
    task: ScoredTask,
    policies: Policies,
    *,
    solver: str = "",
    verifier: str = "",
    rounds: int = 2,
    verify_prompt: str = VERIFY_PROMPT,
    retry_prompt: str = RETRY_PROMPT,
    approve: str = "yes",
    reject: str = "no",
    keeps_history: bool = True,
    splits_verdicts: bool = False,
    team_share: float = 0.0,
) -> Rewards:
    """Lets the solver answer until the verifier approves, at most `rounds` times. The last answer counts.

    An unclear verdict doesn't approve, is never right, and counts in `unreadable`. With
    `splits_verdicts`, the verifier's role is recorded as `verifier_of_right` or `verifier_of_wrong`,
    depending on the answer that it judges. The verifier doesn't see this role.

    Rewards: the solver's conversation gets the score of its last answer. Without `keeps_history`, each
    attempt is a conversation with its own score. Each verdict gets 1 if it is right, else 0. `team_share`
    mixes the episode's score into all of these.

    Metrics: `first_score` (the first answer), `attempts`, `unreadable` (the share of unclear verdicts),
    `verdict_right`, `approves_right` and `rejects_wrong`. The mean of the last two is the verifier's balanced
    accuracy.
    """
    actor = policy_at(policies, solver, 0)
    judge = policy_at(policies, verifier, 1)
    chat = actor.conversation(context=task.context, role="solver")
    exchanges: list[_Exchange] = []
    prompt = task.prompt
    for idx in range(rounds):
        if idx and not keeps_history:
            chat = actor.conversation(context=task.context, role="solver")
        answer = await chat.say(prompt)
        score = await task.score(answer.text)
        question = verify_prompt.format(prompt=task.prompt, answer=answer.reply)
        role = "verifier"
        if splits_verdicts:
            role = "verifier_of_right" if is_right(score) else "verifier_of_wrong"
        verdict = await judge.chat(question, role=role)
        choice = {approve: True, reject: False}.get(last_choice(verdict.reply, (approve, reject)))
        exchanges.append(_Exchange(chat, score, verdict, choice))
        if choice:
            break
        prompt = retry_prompt.format(prompt=task.prompt, answer=answer.reply, critique=verdict.reply)
    return _rewards(exchanges, team_share)


def _rewards(exchanges: Sequence[_Exchange], team_share: float) -> Rewards:
    rewards = Rewards()
    team = exchanges[-1].score
    rewards.set_score(team)
    last_scores = {exchange.chat: exchange.score for exchange in exchanges}
    for chat, score in last_scores.items():
        rewards.add(chat, blend(score, team, team_share))
    for exchange in exchanges:
        rewards.add(exchange.verdict, blend(float(exchange.is_judged_right), team, team_share))
    rewards.add_metric("first_score", exchanges[0].score)
    rewards.add_metric("attempts", len(exchanges))
    rewards.add_metric("unreadable", fmean(exchange.choice is None for exchange in exchanges))
    rewards.add_metric("verdict_right", fmean(e.is_judged_right for e in exchanges))
    for name, is_answer_right in (("approves_right", True), ("rejects_wrong", False)):
        verdicts = [float(e.is_judged_right) for e in exchanges if is_right(e.score) is is_answer_right]
        if verdicts:
            rewards.add_metric(name, fmean(verdicts))
    return rewards
