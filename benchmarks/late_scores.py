"""Workflows whose scores come late, as those of judges, sandboxes, and web services do.

A wait takes real seconds. It is drawn from a lognormal distribution, and lies between half a second and 8 s,
times `scale`.
"""

import asyncio
import math
import random
import re
from typing import Any

from astraflow.addons.patterns.solve_and_check import solve_and_check
from astraflow.types import Task
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.single_turn import single_turn

__all__ = ["check_late", "solve_late", "wait_s"]

MEDIAN_S = 1.5
SIGMA = 0.9
"""Standard deviation of log(wait): one wait in 40 is longer than 8 s, and is cut there."""
SHORTEST_S, LONGEST_S = 0.5, 8.0
HARD = 6.0
"""How many times as long a hard task takes."""


def wait_s(scale: float) -> float:
    """Draws the seconds until a score."""
    drawn = random.lognormvariate(math.log(MEDIAN_S), SIGMA)
    return scale * min(LONGEST_S, max(SHORTEST_S, drawn))


def _late(task: ScoredTask, scale: float) -> ScoredTask:
    """Returns the same task, whose scores come late."""

    async def score(_: Task, text: str) -> float:
        await asyncio.sleep(wait_s(scale))
        return await task.score(text)

    return ScoredTask(task.task, score)


async def check_late(task: ScoredTask, policies: Policies, *, scale: float, **args: Any) -> Rewards:
    """`solve_and_check` with `args`: the checker begins once the solver's answer has its score."""
    return await solve_and_check(_late(task, scale), policies, **args)


async def solve_late(task: ScoredTask, policies: Policies, *, scale: float) -> Rewards:
    """`single_turn`. Sums of numbers with three digits are hard: their scores take `HARD` times as long."""
    is_hard = re.search(r"\d{3}", task.prompt) is not None
    return await single_turn(_late(task, scale * HARD if is_hard else scale), policies)
