"""Several debaters answer, read each other, and answer again (Du et al. 2023, arXiv:2305.14325)."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from astraflow.workflows.conversation import Completion, Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import blend, in_parallel
from astraflow.workflows.variant import Share, WorkflowVariant, template

__all__ = ["DEBATE_PROMPT", "DebateConfig", "debate", "seats"]

DEBATE_PROMPT = (
    "Others answered:\n\n{answers}\n\nConsider them, then give your answer to the problem again:\n{prompt}"
)


def seats(names: Sequence[str], debaters: Sequence[str], num_debaters: int) -> tuple[str, ...]:
    """Returns the policy of each seat: `debaters` in turn, or all policies of the recipe if it is empty."""
    chosen = debaters or names
    return tuple(chosen[idx % len(chosen)] for idx in range(num_debaters))


class DebateConfig(WorkflowVariant):
    """Several debaters answer, read each other's answers, answer again, and vote."""

    is_replayable: ClassVar[bool] = True
    name: Literal["debate"] = "debate"
    debaters: tuple[str, ...] = ()
    """Policies that take the seats in turn; empty: all policies of the recipe."""
    num_debaters: int = Field(default=2, ge=2, le=1024)
    """Number of seats."""
    rounds: int = Field(default=2, ge=1)
    """Number of answers per debater."""
    debate_prompt: Annotated[str, template("prompt", "answers")] = DEBATE_PROMPT
    """Prompt of each further round, with `{prompt}` and the other debaters' `{answers}`."""
    team_share: Share = 0.0
    """Share of the vote's score in each reward."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each seat to its policy."""
        seated = seats(names, self.debaters, self.num_debaters)
        return {f"debaters.{idx}": name for idx, name in enumerate(seated)}

    def make(self) -> Workflow:
        """Makes the workflow."""
        return self.bind(debate)


async def debate(
    task: ScoredTask,
    policies: Policies,
    *,
    debaters: Sequence[str] = (),
    num_debaters: int = 2,
    rounds: int = 2,
    debate_prompt: str = DEBATE_PROMPT,
    team_share: float = 0.0,
) -> Rewards:
    """Lets each debater answer `rounds` times in one growing conversation, then lets the last answers vote.

    A vote is the last line of an answer. The line with the most votes wins. In a tie, the earliest seat wins.
    The score of the winning answer is the episode's score.

    Rewards: each debater gets the score of its own last answer. `team_share` mixes in the episode's score.

    Metrics: `first_score` and `last_score`, the means of the debaters' first and last scores; `agreement`,
    the share of votes for the winner.
    """
    names = seats(tuple(policies), debaters, num_debaters)
    chats = [policies[name].conversation(context=task.context, role="debater") for name in names]
    answers = await in_parallel(chat.say(task.prompt) for chat in chats)
    first_score = fmean(await _scores(task, answers))
    for _ in range(rounds - 1):
        replies = [answer.reply for answer in answers]
        others = ["\n\n".join(replies[:seat] + replies[seat + 1 :]) for seat in range(len(chats))]
        texts = [debate_prompt.format(prompt=task.prompt, answers=each) for each in others]
        answers = await in_parallel(chat.say(text) for chat, text in zip(chats, texts, strict=True))
    scores = await _scores(task, answers)
    # The last lines, in lowercase, with single spaces, and without a period at the end.
    lines = [answer.reply.split("\n")[-1] for answer in answers]
    votes = [" ".join(line.lower().split()).rstrip(".") for line in lines]
    winner, num_votes = Counter(votes).most_common(1)[0]
    team = scores[votes.index(winner)]
    rewards = Rewards()
    for chat, score in zip(chats, scores, strict=True):
        rewards.add(chat, blend(score, team, team_share))
    rewards.set_score(team)
    rewards.add_metric("first_score", first_score)
    rewards.add_metric("last_score", fmean(scores))
    rewards.add_metric("agreement", num_votes / len(votes))
    return rewards


async def _scores(task: ScoredTask, answers: Sequence[Completion]) -> list[float]:
    return await in_parallel(task.score(answer.text) for answer in answers)
