"""How the episodes of evaluation sets run: each set may have a workflow, sampling and reward of its own.

    EvalRules (of the recipe) -> Evaluation (opens scoring pools) -> Conduct (what a runner uses)

Sets that score alike share the processes that score.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.errors import ConfigError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.judging import JudgedScoring, make_scoring
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.config import TasksConfig
from astraflow.types import Task
from astraflow.workflows.config import WorkflowConfig
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.factory import make_workflow

__all__ = ["Conduct", "EvalRules", "Evaluation", "Scores"]

Scores = Callable[[Task, str], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class EvalRules:
    """What the recipe says about the episodes of one set.

    Example: `EvalRules(sampling={"temperature": 0.6, "top_p": 0.95})`.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `Sampling` that replace the policies' own."""
    workflow: WorkflowConfig | None = None
    """None: that of training."""
    tasks: TasksConfig | None = None
    """Reward and extraction, as a `tasks` section; None: those of training."""


@dataclass(frozen=True, slots=True)
class Conduct:
    """How a runner runs an episode, where that differs from training."""

    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workflow: Workflow | None = None
    score: Scores | None = None


class Evaluation:
    """The evaluation sets of a service, with the processes that score those with a reward of their own.

    Example: `evaluation = Evaluation({"aime": rules})`; `await evaluation.start()`;
    `evaluation.conducts["aime"]`; `await evaluation.close()`.
    """

    def __init__(
        self, rules: Mapping[str, EvalRules], *, num_workers: int = 1, private: tuple[Path, ...] = ()
    ) -> None:
        """`private`: see `make_workflow`. Raises: ConfigError if a workflow cannot be made."""
        self._pools: dict[str, ScoringPool | JudgedScoring] = {}
        self.conducts: dict[str, Conduct] = {}
        """Set -> how its episodes run."""
        for name, rule in rules.items():
            score = None
            if rule.tasks is not None:
                key = rule.tasks.model_dump_json()
                if key not in self._pools:
                    self._pools[key] = make_scoring(rule.tasks, num_workers=num_workers)
                score = self._pools[key].score
            workflow = None if rule.workflow is None else make_workflow(rule.workflow, private=private)
            self.conducts[name] = Conduct(rule.sampling, workflow, score)

    def host(self, policies: Mapping[str, HostedPolicy]) -> None:
        """Names the policies that judges may be; the mapping may be filled later."""
        for pool in self._pools.values():
            if isinstance(pool, JudgedScoring):
                pool.host(policies)

    async def start(self) -> None:
        """Waits until all rewards are built. Raises: as `ScoringPool.start`."""
        try:
            await asyncio.gather(*[pool.start() for pool in self._pools.values()])
        except ConfigError as err:
            raise ConfigError(f"eval.sets: {err}") from err

    async def close(self) -> None:
        """Ends the processes that score."""
        await asyncio.gather(*[pool.close() for pool in self._pools.values()])
