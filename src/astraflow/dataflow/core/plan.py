"""What the core must know of a recipe: sizes, limits and schedules, but no files, addresses or models."""

from dataclasses import dataclass, replace
from typing import Literal

from astraflow.algorithms.curation import CuratorConfig
from astraflow.dataflow.config import TableConfig

__all__ = ["BestPlan", "EvalPlan", "EvalSetPlan", "PolicyPlan", "RunPlan", "Schedule"]


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
class BestPlan:
    """By which figure the best version of each policy is chosen, to be kept for ever."""

    eval_set: str
    metric: str = ""
    """A metric of the round; empty: its score."""
    mode: Literal["max", "min"] = "max"

    @property
    def text(self) -> str:
        """The rule in a few words, e.g. `max heldout` or `min heldout/turns`."""
        return f"{self.mode} {self.eval_set}{'/' if self.metric else ''}{self.metric}"


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The evaluation sets and when rounds are due: at version 0, every `every` steps of a policy, and at its
    last step."""

    sets: dict[str, EvalSetPlan]
    every: int
    deadline_s: float
    best: BestPlan | None = None
    """None: no version is kept for its score."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The part of the plan that may change when a run is resumed. A change is a command of its own, so the
    journal says from which record on it holds.

    Example: `Schedule(steps={"actor": 50}, eval=EvalPlan(sets={}, every=10, deadline_s=300.0))`.
    """

    steps: dict[str, int]
    """Trained policy -> number of steps after which its training ends."""
    eval: EvalPlan


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
    """Attempts at an episode before it counts as failed."""
    frozen: tuple[str, ...] = ()
    """Policies that have one version for ever: no table, ticket or staleness."""
    max_pushed: int = 10_000
    """Largest number of tasks that may be pushed into the run in total."""
    max_waiting_pushed: int = 1_000
    """Largest number of pushed tasks that may wait to be drawn."""
    max_lost: int = 0
    """Attempts at an episode that may be lost with their services and do not count in `max_attempts`."""
    admission: Literal["any", "all"] = "any"
    """Whether a group is drawn as soon as any policy has room for it, or only once all have that still need
    groups."""

    @property
    def schedule(self) -> Schedule:
        """The part that may change."""
        steps = {name: policy.num_steps for name, policy in self.policies.items()}
        return Schedule(steps, self.eval)

    def with_schedule(self, schedule: Schedule) -> "RunPlan":
        """The plan with another schedule, which names the same policies."""
        policies = {
            name: replace(plan, num_steps=schedule.steps[name]) for name, plan in self.policies.items()
        }
        return replace(self, policies=policies, eval=schedule.eval)
