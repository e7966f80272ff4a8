"""The workflow `spawn`: an agent may split its problem and start helpers in parallel, up to a depth."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from astraflow.workflows.conversation import (
    Completion,
    Conversation,
    Policies,
    Policy,
    Rewards,
    ScoredTask,
    Workflow,
)
from astraflow.workflows.roles import in_parallel, policy_at
from astraflow.workflows.variant import PolicyRoles, template

__all__ = ["RESULTS_PROMPT", "SPLIT_PROMPT", "SpawnConfig", "spawn"]

SPLIT_PROMPT = (
    "{prompt}\n\nAnswer, or split the problem: put each part that others should solve, complete in itself, "
    "between <task> and </task>. They work in parallel, and you get their results."
)
RESULTS_PROMPT = "Results:\n\n{results}\n\nNow give your answer to the problem:\n{prompt}"

_OPENING = "<task>"
_CLOSING = "</task>"
_NOT_STARTED = "(not started: too many parts)"


@dataclass(slots=True)
class _Crew:
    """The agents of one episode: one at the root, and the helpers that they start."""

    helper: Policy
    depth: int
    max_parts: int
    num_left: int
    """Number of helpers that may still be started."""
    split_prompt: str
    results_prompt: str
    helpers: list[Conversation] = field(default_factory=list[Conversation])

    async def solve(self, chat: Conversation, prompt: str, level: int) -> Completion:
        """Returns an agent's answer. The conversation grows by one turn, or by two if the agent splits.

        `level` is the agent's distance from the root; agents at level `depth` may not split.
        """
        may_split = level < self.depth
        answer = await chat.say(self.split_prompt.format(prompt=prompt) if may_split else prompt)
        parts = _parts(answer.reply) if may_split else []
        if not parts:
            return answer
        results = await self._results(parts, level + 1)
        listing = "\n\n".join(f"{part}\n{result}" for part, result in zip(parts, results, strict=True))
        return await chat.say(self.results_prompt.format(prompt=prompt, results=listing))

    async def _results(self, parts: list[str], level: int) -> list[str]:
        """Returns one result per part. Parts beyond the limits are not started."""
        num_started = min(len(parts), self.max_parts, self.num_left)
        self.num_left -= num_started
        chats = [self.helper.conversation(role="helper") for _ in range(num_started)]
        self.helpers += chats
        answers = await in_parallel(
            self.solve(chat, part, level) for chat, part in zip(chats, parts, strict=False)
        )
        return [answer.reply for answer in answers] + [_NOT_STARTED] * (len(parts) - num_started)


def _parts(text: str) -> list[str]:
    """Returns the texts between <task> and </task>.

    Unlike a regular expression, this search takes linear time even for a text that contains only opening
    tags.
    """
    parts: list[str] = []
    end = 0
    while (opening := text.find(_OPENING, end)) >= 0:
        start = opening + len(_OPENING)
        closing = text.find(_CLOSING, start)
        if closing < 0:
            break
        parts.append(text[start:closing].strip())
        end = closing + len(_CLOSING)
    return parts


class SpawnConfig(PolicyRoles):
    """An agent may split its problem and start sub-agents in parallel, down to a given depth."""

    roles: ClassVar[tuple[str, ...]] = ("agent", "helper")
    is_replayable: ClassVar[bool] = True
    name: Literal["spawn"] = "spawn"
    agent: str = ""
    """Policy that gets the task; empty: the recipe's first policy."""
    helper: str = ""
    """Policy that solves the parts; empty: the recipe's second policy."""
    depth: int = Field(default=1, ge=1, le=64)
    """Number of levels of helpers."""
    max_parts: int = Field(default=4, ge=1, le=1024)
    """Maximum number of helpers per agent."""
    max_helpers: int = Field(default=16, ge=1, le=1024)
    """Maximum number of helpers per episode."""
    helper_cost: float = Field(default=0.0, ge=0)
    """Subtracted from the root agent's reward per helper."""
    split_prompt: Annotated[str, template("prompt")] = SPLIT_PROMPT
    """Prompt of an agent that may split, with `{prompt}`. The parts go between `<task>` and `</task>`."""
    results_prompt: Annotated[str, template("prompt", "results")] = RESULTS_PROMPT
    """Prompt of an agent whose parts are solved, with `{prompt}` and `{results}`."""

    def make(self) -> Workflow:
        """Makes the workflow."""
        return self.bind(spawn)


async def spawn(
    task: ScoredTask,
    policies: Policies,
    *,
    agent: str = "",
    helper: str = "",
    depth: int = 1,
    max_parts: int = 4,
    max_helpers: int = 16,
    helper_cost: float = 0.0,
    split_prompt: str = SPLIT_PROMPT,
    results_prompt: str = RESULTS_PROMPT,
) -> Rewards:
    """Lets the agent answer directly, or split its task among up to `max_parts` helpers, which may split too.

    There are at most `depth` levels of helpers and `max_helpers` helpers per episode. A part beyond these
    limits doesn't have a result.

    Rewards: all agents get the score of the root's answer, because parts don't have their own scores. The
    root (role `agent`) pays `helper_cost` for each helper (role `helper`) of the episode.

    Metrics: `helpers`, the number of helpers.
    """
    crew = _Crew(policy_at(policies, helper, 1), depth, max_parts, max_helpers, split_prompt, results_prompt)
    chat = policy_at(policies, agent, 0).conversation(context=task.context, role="agent")
    answer = await crew.solve(chat, task.prompt, level=0)
    score = await task.score(answer.text)
    rewards = Rewards()
    rewards.add(chat, score - helper_cost * len(crew.helpers))
    for conversation in crew.helpers:
        rewards.add(conversation, score)
    rewards.set_score(score)
    rewards.add_metric("helpers", len(crew.helpers))
    return rewards
