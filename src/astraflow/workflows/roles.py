"""Who plays which role in a workflow, and how rewards of one's own and of the team mix."""

from collections.abc import Sequence
from typing import ClassVar

from astraflow.config import Config, Variant
from astraflow.workflows.conversation import Policies, Policy

__all__ = ["PolicyRoles", "WorkflowVariant", "blended", "is_right", "name_at", "policy_at"]

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
