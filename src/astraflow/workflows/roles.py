"""What the built-in workflows share.

Who plays which role, how a role's own reward and the team's mix, which choice a text names, and how parts of
an episode run in parallel.
"""

import asyncio
import re
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from astraflow.config import Config, Variant
from astraflow.workflows.conversation import Policies, Policy

__all__ = [
    "PolicyRoles",
    "WorkflowVariant",
    "blended",
    "in_parallel",
    "is_right",
    "last_choice",
    "name_at",
    "policy_at",
]

_RIGHT_SCORE = 0.5
"""Rewards run from 0 or -1 (wrong) to 1 (right); partial credit below one half is no right answer."""


def name_at(names: Sequence[str], given: str, place: int) -> str:
    """The policy of a role: the one given; if empty, the recipe's at that place, or its last one."""
    return given or names[min(place, len(names) - 1)]


class PolicyRoles(Config):
    """Base of the patterns: decides which policy plays which role."""

    roles: ClassVar[tuple[str, ...]] = ("policy",)
    """Fields that name policies, by their places."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Role -> policy, where the recipe's policies are `names`."""
        return {role: name_at(names, getattr(self, role), place) for place, role in enumerate(self.roles)}

    @property
    def most_turns(self) -> int:
        """Largest number of completions of a policy in an episode; 0 if the config does not say."""
        return 0


class WorkflowVariant(PolicyRoles, Variant):
    """Base of a workflow that an installed package adds; `make` returns the workflow."""


def policy_at(policies: Policies, given: str, place: int) -> Policy:
    """As `name_at`; one policy alone plays all roles."""
    return policies[name_at(tuple(policies), given, place)]


def blended(own: float, team: float, team_share: float) -> float:
    """A reward that is the role's own at `team_share` 0, the team's at 1, and a mixture between."""
    return (1.0 - team_share) * own + team_share * team


def is_right(score: float) -> bool:
    """Whether a score counts as a right answer where a verdict is compared with it."""
    return score >= _RIGHT_SCORE


# --- choices in free text ---------------------------------------------------------------------------


def last_choice(text: str, choices: Sequence[str]) -> str:
    """The choice that is named last, in any case and as whole words; empty if none is.

    Example: `last_choice("No... wait, it is right: Yes.", ("yes", "no")) == "yes"`.
    """
    found = {choice: _last_end(text, choice) for choice in choices}
    best = max(found, key=lambda choice: (found[choice], len(choice)), default="")
    return best if best and found[best] > 0 else ""


def _last_end(text: str, choice: str) -> int:
    """Where the last occurrence ends; 0 without one. `no` does not occur in `know`."""
    before = r"(?<!\w)" if choice[:1].isalnum() else ""
    after = r"(?!\w)" if choice[-1:].isalnum() else ""
    pattern = re.compile(before + re.escape(choice) + after, re.IGNORECASE)
    return max((match.end() for match in pattern.finditer(text)), default=0)


# --- parallel parts ---------------------------------------------------------------------------------


_ResultT = TypeVar("_ResultT")


async def in_parallel(parts: Iterable[Coroutine[Any, Any, _ResultT]]) -> list[_ResultT]:
    """The results in order. When one fails the others are cancelled, unlike with `asyncio.gather`.

    Raises: ExceptionGroup of what failed.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in parts]
    return [task.result() for task in tasks]
