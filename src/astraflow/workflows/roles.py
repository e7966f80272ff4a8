"""Who plays which role in a workflow, and how rewards of one's own and of the team mix."""

from collections.abc import Sequence

from astraflow.workflows.conversation import Policies, Policy

__all__ = ["blended", "is_right", "name_at", "policy_at"]

_RIGHT_SCORE = 0.5
"""Rewards run from 0 or -1 (wrong) to 1 (right); partial credit below one half is no right answer."""


def name_at(names: Sequence[str], given: str, place: int) -> str:
    """The policy of a role: the one given; if empty, the recipe's at that place, or its last one."""
    return given or names[min(place, len(names) - 1)]


def policy_at(policies: Policies, given: str, place: int) -> Policy:
    """As `name_at`; one policy alone plays all roles."""
    return policies[name_at(tuple(policies), given, place)]


def blended(own: float, team: float, team_share: float) -> float:
    """A reward that is the role's own at `team_share` 0, the team's at 1, and a mixture between."""
    return (1.0 - team_share) * own + team_share * team


def is_right(score: float) -> bool:
    """Whether a score counts as a right answer where a verdict is compared with it."""
    return score >= _RIGHT_SCORE
