"""What the core must know of a recipe: sizes, limits and schedules, but no files, addresses or models."""

from dataclasses import dataclass

from astraflow.algorithms.curation import CuratorConfig
from astraflow.dataflow.config import TableConfig

__all__ = ["EvalPlan", "EvalSetPlan", "PolicyPlan", "RunPlan"]


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """One trained policy's table and the length of its run."""

    table: TableConfig
    num_steps: int
    follower_lag: int = 0
    """Number of versions that a follower may be behind the newest one; the largest of all followers."""
    max_tokens: int = 0
    """Tokens of the longest trajectory that its model can be trained on; 0: not known."""


@dataclass(frozen=True, slots=True)
class EvalSetPlan:
    """One evaluation set: its first `num_tasks` tasks, with `samples` episodes each."""

    num_tasks: int
    samples: int


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The evaluation sets and when rounds are due: at version 0, every `every` steps of a policy, and at its
    last step."""

    sets: dict[str, EvalSetPlan]
    every: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything that the decisions of the core depend on, besides its commands."""

    seed: int
    group_size: int
    policies: dict[str, PolicyPlan]
    """Trained policies only."""
    sources: dict[str, int]
    """Task source -> number of tasks, in the recipe's order; a draw's `task_idx` counts through all of
    them."""
    curators: tuple[CuratorConfig, ...]
    eval: EvalPlan
    max_attempts: int
    frozen: tuple[str, ...] = ()
    """Policies that have one version for ever: no table, ticket or staleness."""
    max_pushed: int = 10_000
    """Largest number of tasks that may be pushed into the run in total."""
    max_waiting_pushed: int = 1_000
    """Largest number of pushed tasks that may wait to be drawn."""
