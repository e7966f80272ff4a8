"""Agents that start helpers: each has a conversation of its own, and all act in one episode of a world.

The world keeps who waits for whom, and says in what it tells who speaks next. `recipes/textcraft` and
`recipes/deepdive` have such worlds.
"""

from dataclasses import dataclass

from astraflow.errors import RolloutError
from astraflow.protocols import Observation
from astraflow.types import Message
from astraflow.workflows.conversation import Conversation, Policies, Rewards, ScoredTask
from astraflow.workflows.roles import policy_at

__all__ = ["Marks", "Worked", "work"]


@dataclass(frozen=True)
class Marks:
    """By which words a world says that an agent begins, or goes on after its helper."""

    begun: str
    """Stands in what an agent is told that begins, and else in nothing but what helpers answer."""
    returned: str
    """Begins what an agent is told when its helper is done."""
    refused: str
    """What an agent is told that may not start a helper."""


@dataclass(frozen=True)
class Worked:
    """An episode that is over."""

    chats: tuple[Conversation, ...]
    """The conversation of each agent in the order in which they began."""
    seen: Observation
    """What the world showed last."""
    reply: str
    """What was said last."""
    num_refused: int
    """How often a helper was asked for that could not be had."""

    def reward(self, rewards: Rewards, reward: float) -> None:
        """Rewards all agents alike, because what a helper does is worth what comes of it.

        Metrics: `helpers`, the number of helpers; `refused_spawns`; `done`, 1 if the world was done, else 0.
        """
        for chat in self.chats:
            rewards.add(chat, reward)
        rewards.set_score(reward)
        rewards.add_metric("helpers", len(self.chats) - 1)
        rewards.add_metric("refused_spawns", self.num_refused)
        rewards.add_metric("done", float(self.seen.is_done))


async def work(task: ScoredTask, policies: Policies, marks: Marks, *, agent: str, helper: str) -> Worked:
    """The first agent acts; one that starts a helper waits until it is done.

    `agent`: policy of the first agent, whose role is `agent`; empty: the first of the run. `helper`: policy
    of the others, whose role is `helper`; empty: the second one, or the same if the run has one.
    Raises: RolloutError if the world tells several messages at once.
    """
    chats = [policy_at(policies, agent, 0).conversation(context=task.context, role="agent")]
    working = [*chats]
    num_refused = 0
    reply = ""
    async with task.play() as played:
        told = _text(task, played.observation)
        while not played.observation.is_done:
            answer = await working[-1].send([Message(role="user", content=told)])
            if answer.num_tokens == 0:
                break  # a completion without a token means that the context is full
            reply = answer.reply
            told = _text(task, await played.step(reply))
            num_refused += told == marks.refused
            if told.startswith(marks.returned):
                working.pop()
            elif marks.begun in told:
                working.append(policy_at(policies, helper, 1).conversation(role="helper"))
                chats.append(working[-1])
        return Worked(tuple(chats), played.observation, reply, num_refused)


def _text(task: ScoredTask, seen: Observation) -> str:
    """What the world tells the agent that acts."""
    if isinstance(seen.messages, str):
        return seen.messages
    raise RolloutError(
        f"task {task.id}: its environment tells {len(seen.messages)} messages at once; agents with helpers "
        "play worlds that tell one text",
        is_retryable=False,
    )
