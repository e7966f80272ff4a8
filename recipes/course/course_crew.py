"""The workflow of `course`: a proposer names a lesson, and a solver attempts exercises of it."""

import random
from statistics import fmean
from typing import Literal

from recipes.course.course_world import LESSONS, exercise_of, lesson_of

from astraflow.workflows.conversation import Conversation, Policies, Policy, Rewards, ScoredTask
from astraflow.workflows.roles import in_parallel, policy_at

__all__ = ["UNREADABLE", "learnability", "propose_and_solve"]

UNREADABLE = -1.0
"""What a proposal is worth that names no lesson: less than one from which nothing can be learned.

Source: Absolute Zero (arXiv:2505.03335), eq. 6.
"""


async def propose_and_solve(
    task: ScoredTask,
    policies: Policies,
    *,
    proposer: str = "",
    solver: str = "",
    attempts: int = 8,
    choice: Literal["proposer", "uniform"] = "proposer",
) -> Rewards:
    """A lesson is chosen, and the solver attempts exercises of it, each in a conversation of its own.

    `proposer`, `solver`: the policies of the roles; by default the recipe's first one and its last.
    `attempts`: number of exercises, which follow from the task's id, so that all proposals of one lesson in a
    group get the same ones. `choice`: `proposer` asks the proposer for a lesson; `uniform` draws it from the
    task's id, each as often as any other, and asks nobody.
    Rewarded: each attempt with 1 if it is right, else 0; the proposal with `learnability` of their mean.
    Metrics: `unreadable`, 1 if the proposal names no lesson, else 0; nothing is attempted then, and the
    proposal's reward is `UNREADABLE`. Otherwise `lesson`, the number of the lesson from 1, and `solved`, the
    mean.
    """
    rewards = Rewards()
    proposal: Conversation | None = None
    lesson: int | None
    if choice == "uniform":
        lesson = random.Random(task.id).randrange(len(LESSONS))
    else:
        proposal = policy_at(policies, proposer, 0).conversation(context=task.context, role="proposer")
        lesson = lesson_of((await proposal.say(task.prompt)).text)
    solved = 0.0
    if lesson is not None:
        actor = policy_at(policies, solver, len(policies) - 1)
        solved = await _solved(lesson, task.id, actor, attempts, rewards)
        rewards.add_metric("lesson", lesson + 1.0)
        rewards.add_metric("solved", solved)
    if proposal is not None:
        rewards.add(proposal, UNREADABLE if lesson is None else learnability(solved))
    rewards.add_metric("unreadable", float(lesson is None))
    rewards.set_score(solved)
    return rewards


async def _solved(lesson: int, seed: str, solver: Policy, attempts: int, rewards: Rewards) -> float:
    """Has exercises of a lesson attempted, rewards the attempts, and returns the share of right ones."""
    exercises = [exercise_of(lesson, f"{seed} {lesson} {number}") for number in range(attempts)]
    chats = [solver.conversation(role="solver") for _ in exercises]
    answers = await in_parallel(chat.say(e.text) for chat, e in zip(chats, exercises, strict=True))
    scores = [e.score(answer.reply) for e, answer in zip(exercises, answers, strict=True)]
    for chat, score in zip(chats, scores, strict=True):
        rewards.add(chat, score)
    return fmean(scores)


def learnability(solved: float) -> float:
    """What a proposal is worth: 0 if its attempts are right always or never, else `1 - solved`.

    Source: Absolute Zero (arXiv:2505.03335), eq. 4.
    """
    return 1.0 - solved if 0.0 < solved < 1.0 else 0.0
