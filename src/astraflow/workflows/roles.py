"""Functions that workflows with several roles share.

They choose the policy of a role, mix a role's own reward with the team's, find the choice that a text names,
and run parts of an episode in parallel.
"""

import asyncio
import re
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from astraflow.workflows.conversation import Policies, Policy

__all__ = ["blend", "in_parallel", "is_right", "last_choice", "name_at", "policy_at"]

_RIGHT_SCORE = 0.5
"""Rewards range from 0 or -1 (wrong) to 1 (right). Partial credit below one half does not count as right."""


def name_at(names: Sequence[str], given: str, place: int) -> str:
    """The policy of a role: `given`, or if it is empty, the recipe's policy at `place`, or else its last."""
    return given or names[min(place, len(names) - 1)]


def policy_at(policies: Policies, given: str, place: int) -> Policy:
    """The policy that `name_at` names."""
    return policies[name_at(tuple(policies), given, place)]


def blend(own: float, team: float, team_share: float) -> float:
    """Mixes two rewards: (1 - team_share) * own + team_share * team."""
    return (1.0 - team_share) * own + team_share * team


def is_right(score: float) -> bool:
    """Whether a score counts as a right answer."""
    return score >= _RIGHT_SCORE


def last_choice(text: str, choices: Sequence[str]) -> str:
    """The choice that occurs last in a text, as whole words in any case; empty if none occurs.

    If two choices end at the same place, the longer one counts.

    Example: `last_choice("No... wait, it is right: Yes.", ("yes", "no")) == "yes"`.
    """
    ends = {choice: _last_end(text, choice) for choice in choices}
    last = max(ends, key=lambda choice: (ends[choice], len(choice)), default="")
    return last if last and ends[last] > 0 else ""


def _last_end(text: str, choice: str) -> int:
    """The position at which the last occurrence ends; 0 if there is none. `no` does not occur in `know`."""
    before = r"(?<!\w)" if choice[:1].isalnum() else ""
    after = r"(?!\w)" if choice[-1:].isalnum() else ""
    pattern = re.compile(before + re.escape(choice) + after, re.IGNORECASE)
    return max((match.end() for match in pattern.finditer(text)), default=0)


_ResultT = TypeVar("_ResultT")


async def in_parallel(parts: Iterable[Coroutine[Any, Any, _ResultT]]) -> list[_ResultT]:
    """Runs all parts concurrently and returns their results in order.

    If one part fails, the others are cancelled; `asyncio.gather` would let them continue.

    Raises: ExceptionGroup with the errors of the parts that failed.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in parts]
    return [task.result() for task in tasks]
