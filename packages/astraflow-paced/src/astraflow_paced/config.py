"""What a recipe says about the emulated engine, trainer backend and workflow.

A recipe finds these classes under `name: paced`, because the package names them as entry points. They import
nothing heavy: what they describe is imported when it is made.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from astraflow.protocols import Engine, Learner
from astraflow.rollout.engine_config import EngineVariant
from astraflow.trainer.backend_config import BackendVariant
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.variant import WorkflowVariant

if TYPE_CHECKING:
    from astraflow.trainer.config import TrainConfig

__all__ = ["PacedBackendConfig", "PacedEngineConfig", "PacedWorkflowConfig"]


class PacedEngineConfig(EngineVariant):
    """Emulates the speed of a GPU without a model, for benchmarks of the system; tokens are random and
    nothing can be learned. It needs the extra `paced`."""

    name: Literal["paced"] = "paced"
    num_slots: int = Field(default=256, ge=1)
    """Number of requests that run at the same time, over all policies of the service; further requests
    wait."""
    max_context: int = Field(default=32_768, ge=2)
    """Largest number of tokens of a prompt and its completion together."""
    tokens_per_s: float = Field(default=80.0, gt=0)
    """Tokens per emulated second of a request that runs alone. All times of this section are emulated."""
    max_tokens_per_s: float = Field(default=0.0, ge=0)
    """Bound on the tokens per second of all requests together: with n requests, each gets 1 / (1 /
    tokens_per_s + n / max_tokens_per_s). 0: no bound, each gets tokens_per_s."""
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens that fit into the KV cache. A request that doesn't fit anymore is preempted and computes its
    tokens again. 0: no bound."""
    mean_tokens: float = Field(default=500.0, ge=1)
    """Mean length of a completion in tokens before `sampling.max_tokens` cuts it; lengths are log-normal."""
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of log(length); 0 makes all completions equally long."""
    prefill_cost: float = Field(default=0.0, ge=0)
    """Time per prompt token, as a share of the time per generated token."""
    update_s: float = Field(default=0.0, ge=0)
    """Seconds for which the requests of a policy pause while a new version is loaded."""
    time_scale: float = Field(default=1.0, gt=0)
    """Emulated seconds per second of the wall clock; the same everywhere in a recipe."""

    @property
    def context(self) -> int:
        """`max_context`."""
        return self.max_context

    def make(self) -> Callable[[WeightSnapshot], Engine]:
        """Makes the engines of one service, one per policy. They share one emulated device."""
        from astraflow_paced.engine import PacedClock, PacedEngine

        return partial(PacedEngine, clock=PacedClock(self))


class PacedBackendConfig(BackendVariant):
    """Emulates the duration of a training step without a model, for benchmarks of the system; nothing is
    learned. It needs the extra `paced`."""

    name: Literal["paced"] = "paced"
    step_s: float = Field(default=10.0, ge=0)
    """Emulated seconds per step, whatever its batch holds."""
    million_tokens_s: float = Field(default=0.0, ge=0)
    """Additional emulated seconds per million tokens of the batch, prompts included."""
    weights_bytes: int = Field(default=65_536, ge=2)
    """Size of a published version in bytes."""
    changed_frac: float = Field(default=0.01, ge=0, le=1)
    """Share of the elements (2 bytes each) that a step changes."""
    time_scale: float = Field(default=1.0, gt=0)
    """Emulated seconds per second of the wall clock; the same everywhere in a recipe."""

    def make(self, train: "TrainConfig", *, seed: int, **_: Any) -> Learner:
        """The backend for the policy whose `train` section this is part of; it reads no model."""
        from astraflow_paced.backend import PacedBackend

        return PacedBackend(train, seed=seed)


class PacedWorkflowConfig(WorkflowVariant):
    """For benchmarks of the system: every policy speaks in turn, and an environment takes an emulated time to
    answer. It needs the extra `paced`."""

    is_replayable: ClassVar[bool] = True
    name: Literal["paced"] = "paced"
    turns: int = Field(default=1, ge=1)
    """Number of completions per policy."""
    env_s: float = Field(default=0.0, ge=0)
    """Median time of the environment after a completion, in emulated seconds; times are log-normal."""
    env_sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of log(time); 0 makes all times equal."""
    time_scale: float = Field(default=1.0, gt=0)
    """Emulated seconds per second of the wall clock; the same everywhere in a recipe."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """All policies."""
        return {f"speaker {name}": name for name in names}

    def make(self) -> Workflow:
        """The workflow with its arguments bound."""
        from astraflow_paced.workflow import paced

        return self.bind(paced)
