"""The run's plan: what the core knows of a recipe. Sizes, limits and schedules, but no files or models."""

from dataclasses import dataclass, replace
from typing import Literal

from astraflow.algorithms.curation import CuratorConfig
from astraflow.dataflow.config import TableConfig

__all__ = ["BestRule", "EvalPlan", "EvalSetPlan", "PolicyPlan", "RunPlan", "Schedule", "StopPlan"]


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """The table of a trained policy, and its number of steps."""

    table: TableConfig
    num_steps: int
    follower_lag: int = 0
    """Largest number of versions that any follower may be behind the newest one."""
    max_tokens: int = 0
    """Number of tokens of the longest trajectory that the model can be trained on. 0 if unknown."""


@dataclass(frozen=True, slots=True)
class EvalSetPlan:
    """One evaluation set: its first `num_tasks` tasks, with `samples` episodes each."""

    num_tasks: int
    samples: int


@dataclass(frozen=True, slots=True)
class BestRule:
    """The rule that chooses the best version of each policy, which is kept."""

    eval_set: str
    metric: str = ""
    """A metric of the round. Empty means its score."""
    mode: Literal["max", "min"] = "max"

    @property
    def text(self) -> str:
        """The rule in a few words, e.g. `max heldout` or `min heldout/turns`."""
        return f"{self.mode} {self.eval_set}{'/' if self.metric else ''}{self.metric}"


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """Evaluation sets. Rounds are due at version 0, every `every` steps of a policy, and at its last step."""

    sets: dict[str, EvalSetPlan]
    every: int
    deadline_s: float
    best: BestRule | None = None
    """None if no version is kept for its evaluation."""
    max_per_service: int = 0
    """Largest number of evaluation episodes that a service runs at the same time; 0: any."""


@dataclass(frozen=True, slots=True)
class StopPlan:
    """What ends the training of a policy before its last step. 0: there is no such limit."""

    epochs: int = 0
    """Number of draws per task of the sources."""
    sequences: int = 0
    """Samples in batches, with replayed ones. The batch that reaches the number is the last one."""
    tokens: int = 0
    """The same for their trained tokens."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The part of the plan that may change when a run is resumed. Each change is a command, so the journal
    shows from which record on it is in force.

    Example: `Schedule(steps={"actor": 50}, eval=EvalPlan(sets={}, every=10, deadline_s=300.0))`.
    """

    steps: dict[str, int]
    """Trained policy -> number of steps after which its training ends."""
    eval: EvalPlan
    stop: StopPlan = StopPlan()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything that the core's decisions depend on, apart from its commands."""

    seed: int
    group_size: int
    policies: dict[str, PolicyPlan]
    """Trained policies only."""
    sources: dict[str, int]
    """Task source -> number of tasks, in the recipe's order, through which `task_idx` counts."""
    curators: tuple[CuratorConfig, ...]
    eval: EvalPlan
    max_attempts: int
    """Attempts at an episode before it counts as failed."""
    frozen: tuple[str, ...] = ()
    """Policies that never change. They have one version, and no table, tickets, or staleness."""
    max_pushed: int = 10_000
    """Largest number of tasks that may be pushed into the run in total."""
    max_waiting_pushed: int = 1_000
    """Largest number of pushed tasks that may wait to be drawn."""
    max_lost: int = 0
    """Number of lost attempts at an episode that don't count toward `max_attempts`."""
    admission: Literal["any", "all"] = "any"
    """Whether a group is drawn once `any` policy has room, or once `all` that still need groups do."""
    stop: StopPlan = StopPlan()

    @property
    def most_drawn(self) -> int:
        """Tasks of the sources that may be drawn: `epochs` times their number. 0: no limit."""
        return self.stop.epochs * sum(self.sources.values())

    @property
    def schedule(self) -> Schedule:
        """The part that may change."""
        steps = {name: policy.num_steps for name, policy in self.policies.items()}
        return Schedule(steps, self.eval, self.stop)

    def with_schedule(self, schedule: Schedule) -> "RunPlan":
        """The plan with another schedule, which names the same policies."""
        policies = {
            name: replace(plan, num_steps=schedule.steps[name]) for name, plan in self.policies.items()
        }
        return replace(self, policies=policies, eval=schedule.eval, stop=schedule.stop)
