"""The workflow of `craft`: each helper that an agent starts has a conversation of its own."""

from recipes.textcraft.craft_workshop import GOAL, REFUSED, RETURNED

from astraflow.errors import RolloutError
from astraflow.protocols import Observation
from astraflow.types import Message
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import policy_at

__all__ = ["crew"]


async def crew(task: ScoredTask, policies: Policies, *, agent: str = "", helper: str = "") -> Rewards:
    """The first agent acts; one that starts a helper waits until it is done. All act on one inventory.

    `agent`: policy of the first agent; empty: the first of the run. `helper`: policy of all helpers; empty:
    the second one, or the same if the run has one.
    Rewarded: the conversation of each agent with 1 if the target is made, else 0, because what a helper makes
    is worth what comes of it. The first has the role `agent`, the others have the role `helper`.
    Metrics: `helpers`, the number of helpers; `refused_spawns`, how often there was no helper left; `done`, 1
    if the environment was done at the end, else 0.
    """
    rewards = Rewards()
    chats = [policy_at(policies, agent, 0).conversation(context=task.context, role="agent")]
    working = [*chats]
    num_refused = 0
    async with task.play() as played:
        told = _text(task, played.observation)
        while not played.observation.is_done:
            answer = await working[-1].send([Message(role="user", content=told)])
            if answer.num_tokens == 0:
                break  # a completion without a token means that the context is full
            told = _text(task, await played.step(answer.reply))
            num_refused += told == REFUSED
            if GOAL in told:
                working.append(policy_at(policies, helper, 1).conversation(role="helper"))
                chats.append(working[-1])
            elif told.startswith(RETURNED):
                working.pop()
        is_done = played.observation.is_done
        reward = played.observation.reward
    for chat in chats:
        rewards.add(chat, reward)
    rewards.set_score(reward)
    rewards.add_metric("helpers", len(chats) - 1)
    rewards.add_metric("refused_spawns", num_refused)
    rewards.add_metric("done", float(is_done))
    return rewards


def _text(task: ScoredTask, seen: Observation) -> str:
    """What the world tells the agent that acts."""
    if isinstance(seen.messages, str):
        return seen.messages
    raise RolloutError(
        f"task {task.id}: its environment tells {len(seen.messages)} messages at once; the "
        "workflow `crew` plays the world `craft`, which tells one text",
        is_retryable=False,
    )
