"""How the episodes of evaluation sets run. Each set may have its own workflow, sampling, and reward.

    EvalRules (from the recipe) -> Evaluation (opens scoring pools) -> EvalOverrides (used by the runner)

Sets with the same reward share one scoring pool.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.errors import ConfigError
from astraflow.rollout.config import EvalRules
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.scoring import ScoringPool
from astraflow.types import Task
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.factory import make_workflow

__all__ = ["EvalOverrides", "Evaluation", "ScoreFunction"]

ScoreFunction = Callable[[Task, str], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class EvalOverrides:
    """What a runner does differently from training in the episodes of one set. None: as in training."""

    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `Sampling` that replace those of the policies."""
    workflow: Workflow | None = None
    score: ScoreFunction | None = None


class Evaluation:
    """The evaluation sets of a service, with scoring pools for the sets that have their own reward.

    Example: `evaluation = Evaluation({"aime": rules})`; `await evaluation.start()`;
    `evaluation.overrides["aime"]`; `await evaluation.close()`.
    """

    def __init__(
        self, rules: Mapping[str, EvalRules], *, num_workers: int = 1, private: tuple[Path, ...] = ()
    ) -> None:
        """`private`: see `make_workflow`. Raises: ConfigError if a workflow cannot be made."""
        self._pools: dict[str, ScoringPool] = {}
        self.overrides: dict[str, EvalOverrides] = {}
        """By evaluation set."""
        for name, rule in rules.items():
            score = None
            if rule.tasks is not None:
                key = rule.tasks.model_dump_json()
                if key not in self._pools:
                    self._pools[key] = ScoringPool(rule.tasks, num_workers=num_workers)
                score = self._pools[key].score
            workflow = None if rule.workflow is None else make_workflow(rule.workflow, private=private)
            self.overrides[name] = EvalOverrides(rule.sampling, workflow, score)

    def host(self, policies: Mapping[str, HostedPolicy]) -> None:
        """Sets the policies that may serve as judges. The mapping may be filled later."""
        for pool in self._pools.values():
            pool.policies = policies

    async def start(self) -> None:
        """Waits until all rewards are built. Raises: like `ScoringPool.start`."""
        try:
            await asyncio.gather(*[pool.start() for pool in self._pools.values()])
        except ConfigError as err:
            raise ConfigError(f"eval.sets: {err}") from err

    async def close(self) -> None:
        """Ends the scoring processes."""
        await asyncio.gather(*[pool.close() for pool in self._pools.values()])
