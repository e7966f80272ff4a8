"""The workflow of `craft`: each helper that an agent starts has a conversation of its own."""

from recipes.crew import Marks, work
from recipes.textcraft.craft_workshop import GOAL, REFUSED, RETURNED

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["crew"]

_MARKS = Marks(begun=GOAL, returned=RETURNED, refused=REFUSED)


async def crew(task: ScoredTask, policies: Policies, *, agent: str = "", helper: str = "") -> Rewards:
    """The first agent acts; one that starts a helper waits until it is done. All act on one inventory.

    `agent`, `helper`: policies of the first agent and of all helpers; see `recipes.crew.work`.
    Rewarded: the conversation of each agent with 1 if the target is made, else 0.
    Metrics: those of `recipes.crew.Worked`.
    """
    worked = await work(task, policies, _MARKS, agent=agent, helper=helper)
    rewards = Rewards()
    worked.reward(rewards, worked.seen.reward)
    return rewards
