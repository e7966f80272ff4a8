"""The rollout services and engines of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from astraflow.config import Config, Use, Word, with_installed
from astraflow.rollout.engine_config import EngineVariant, TorchEngineConfig
from astraflow.tasks.config import TasksConfig
from astraflow.workflows.config import WorkflowConfig

__all__ = ["EngineConfig", "EvalRules", "RolloutConfig"]

EngineConfig = TorchEngineConfig | EngineVariant | Use
if not TYPE_CHECKING:  # which engines are installed is known at run time only
    EngineConfig = with_installed(EngineConfig, "astraflow.engines")


class RolloutConfig(Config):
    """The rollout services that `astraflow run` starts itself; others may join."""

    services: int = Field(default=2, ge=0, le=10_000)
    """Number of services; 0 leaves all generation to services that join."""
    gpus: tuple[Word, ...] = ()
    """GPUs of each of these services, e.g. `["0", "1"]`, counted among those that the run sees. If there are
    more services, the list repeats; empty: each service sees all GPUs."""
    engine: EngineConfig = TorchEngineConfig()
    """Generates the completions."""
    max_episodes: int = Field(default=128, ge=1, le=65_536)
    """Largest number of episodes that one service runs at the same time. It runs fewer if the KV cache of an
    engine is full, or if too many requests queue there."""
    episode_timeout_s: float = Field(default=300.0, gt=0)
    """Largest duration of an episode, in seconds. A longer one fails."""
    max_proposals: int = Field(default=8, ge=0, le=65_536)
    """Number of new tasks that the workflow of one episode may propose. Further ones are refused."""
    resume: Literal["auto", "always", "never"] = "auto"
    """What happens to an episode whose service is lost or has to stop. `auto`: if the workflow is built in
    and replayable, the next attempt continues with the completions of the lost one; `always`: the same for
    any workflow, which you thereby declare to be replayable; `never`: it samples everything again."""
    scorers: int = Field(default=1, ge=1, le=1024)
    """Number of scoring processes per service."""
    outage_s: float = Field(default=900.0, gt=0)
    """Seconds without an answer from the dataflow after which a service exits with an error."""


@dataclass(frozen=True, slots=True)
class EvalRules:
    """What the recipe says about the episodes of one evaluation set.

    Example: `EvalRules(sampling={"temperature": 0.6, "top_p": 0.95})`.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `Sampling` that replace those of the policies."""
    workflow: WorkflowConfig | None = None
    """None: the training workflow."""
    tasks: TasksConfig | None = None
    """Reward and extraction, as a `tasks` section; None: those of training."""
