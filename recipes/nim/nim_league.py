"""The workflow of `nim`: a policy plays against itself, or against another policy of a league."""

import random
from collections.abc import Sequence

from recipes.nim.nim_world import IMPOSSIBLE, seat_of

from astraflow.errors import RolloutError
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import name_at

__all__ = ["ROLES", "league"]

ROLES = ("first", "second")
"""The parts of the two players; credit `rae` has a baseline for each."""


async def league(
    task: ScoredTask, policies: Policies, *, player: str = "", opponents: Sequence[str] = ()
) -> Rewards:
    """A game of two policies: the player sits where the task says, an opponent that is drawn opposite.

    `player`: a policy; empty: the first of the run. `opponents`: policies, one of which is drawn by the
    task's id; one that is named twice is drawn twice as often. Empty: the player alone, which then plays
    against itself, as it also does where it is drawn.
    Rewarded: the conversation of who wins with 1, the other's with -1.
    Score: 1 if the player wins, else 0. Metrics: `impossible`, 1 if an impossible move ended the game, else
    0; `moves`; `won_against_NAME`, the score against opponent NAME.
    """
    name = name_at(tuple(policies), player, 0)
    opponent = random.Random(task.id).choice(opponents or (name,))
    seat = seat_of(task.spec)
    names = (opponent, name) if seat else (name, opponent)
    chats = [
        policies[each].conversation(context=task.context, role=role)
        for each, role in zip(names, ROLES, strict=True)
    ]
    num_moves = 0
    async with task.play() as played:
        while not played.observation.is_done:
            told = played.observation.messages
            if not isinstance(told, str):
                raise RolloutError(f"task {task.id}: its world is none that tells a text", is_retryable=False)
            # Where the context is full, the reply is empty, which is no possible move.
            said = await chats[num_moves % 2].say(told)
            await played.step(said.reply)
            num_moves += 1
        end = played.observation
    winner = 0 if end.reward > 0 else 1
    rewards = Rewards()
    rewards.add(chats[winner], 1.0)
    rewards.add(chats[1 - winner], -1.0)
    score = float(winner == seat)
    rewards.set_score(score)
    rewards.add_metric("impossible", float(end.messages == IMPOSSIBLE))
    rewards.add_metric("moves", num_moves)
    rewards.add_metric(f"won_against_{opponent}", score)
    return rewards
