"""An agent that may split its problem and start sub-agents in parallel, down to a depth."""

from dataclasses import dataclass, field

from astraflow.workflows.conversation import Completion, Conversation, Policies, Policy, Rewards, ScoredTask
from astraflow.workflows.roles import in_parallel, policy_at

__all__ = ["RESULTS_PROMPT", "SPLIT_PROMPT", "spawn"]

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
    """The agents of one episode."""

    helper: Policy
    depth: int
    max_parts: int
    num_left: int
    split_prompt: str
    results_prompt: str
    helpers: list[Conversation] = field(default_factory=list[Conversation])

    async def solve(self, chat: Conversation, prompt: str, level: int) -> Completion:
        """An agent's answer; the conversation grows by one turn, or by two if it split the problem."""
        may_split = level < self.depth
        answer = await chat.say(self.split_prompt.format(prompt=prompt) if may_split else prompt)
        parts = _parts(answer.reply) if may_split else []
        if not parts:
            return answer
        results = await self._results(parts, level + 1)
        listed = "\n\n".join(f"{part}\n{result}" for part, result in zip(parts, results, strict=True))
        return await chat.say(self.results_prompt.format(prompt=prompt, results=listed))

    async def _results(self, parts: list[str], level: int) -> list[str]:
        num_started = min(len(parts), self.max_parts, self.num_left)
        self.num_left -= num_started
        chats = [self.helper.conversation(role="helper") for _ in range(num_started)]
        self.helpers += chats
        answers = await in_parallel(
            self.solve(chat, part, level) for chat, part in zip(chats, parts, strict=False)
        )
        return [answer.reply for answer in answers] + [_NOT_STARTED] * (len(parts) - num_started)


def _parts(text: str) -> list[str]:
    """The text between tags. Takes linear time, even for a text of nothing but opening tags."""
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
    """The agent answers at once, or gives parts to at most `max_parts` helpers, which may do the same.

    `depth` levels of helpers, `max_helpers` in an episode; a part beyond the limits has no result.
    Rewarded: all agents with the score of the root's answer, since parts have no score of their own; the root
    (role `agent`) pays `helper_cost` for every helper of the episode (role `helper`).
    Metrics: `helpers`.
    """
    crew = _Crew(policy_at(policies, helper, 1), depth, max_parts, max_helpers, split_prompt, results_prompt)
    chat = policy_at(policies, agent, 0).conversation(context=task.context, role="agent")
    score = await task.score((await crew.solve(chat, task.prompt, 0)).text)
    rewards = Rewards()
    rewards.add(chat, score - helper_cost * len(crew.helpers))
    for conversation in crew.helpers:
        rewards.add(conversation, score)
    rewards.set_score(score)
    rewards.add_metric("helpers", len(crew.helpers))
    return rewards
