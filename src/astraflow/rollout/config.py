"""Rollout services and engines of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use

__all__ = ["EngineConfig", "PacedEngineConfig", "RolloutConfig", "TorchEngineConfig"]


class TorchEngineConfig(Config):
    """Embedded engine for Hugging Face causal language models: continuous batching on a CPU or one GPU."""

    name: Literal["torch"] = "torch"
    num_slots: int = Field(default=128, ge=1)
    """Requests that run at once."""
    max_context: int = Field(default=256, ge=2)
    """Tokens of prompt and completion together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, KV cache and computation."""
    device: str = "cpu"
    """`cpu` or `cuda:0`."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the service; keep the sum over all processes within the machine's cores."""


class PacedEngineConfig(Config):
    """No model: emulates the speed of a GPU for benchmarks of the system; random tokens, nothing to learn."""

    name: Literal["paced"] = "paced"
    num_slots: int = Field(default=256, ge=1)
    """Requests that run at once, of all policies of the service together; further ones wait."""
    max_context: int = Field(default=32_768, ge=2)
    """Tokens of prompt and completion together."""
    tokens_per_s: float = Field(default=80.0, gt=0)
    """Of a request that runs alone, in emulated seconds, as all times here."""
    max_tokens_per_s: float = Field(default=0.0, ge=0)
    """Bound of all together: with n requests each gets 1 / (1 / tokens_per_s + n / max_tokens_per_s); 0: no
    bound, each gets tokens_per_s."""
    mean_tokens: float = Field(default=500.0, ge=1)
    """Mean length of a completion before `sampling.max_tokens` cuts it; log-normal."""
    sigma: float = Field(default=1.0, ge=0)
    """Of the logarithm of the length; 0: all are equally long."""
    prefill_cost: float = Field(default=0.0, ge=0)
    """Time of a prompt's token, as a share of a generated one's."""
    update_s: float = Field(default=0.0, ge=0)
    """Seconds that a policy's requests stand still for a new version."""
    time_scale: float = Field(default=1.0, gt=0)
    """Emulated seconds in a second of the wall clock; the same everywhere in a recipe."""


EngineConfig = Annotated[TorchEngineConfig | PacedEngineConfig | Use, Field(discriminator="name")]


class RolloutConfig(Config):
    """The rollout services that `astraflow run` starts itself; others may join."""

    services: int = Field(default=2, ge=0)
    """Number of services; 0 leaves all generation to those that join."""
    engine: EngineConfig = TorchEngineConfig()
    """What generates."""
    max_episodes: int = Field(default=128, ge=1)
    """Episodes that one service runs at once."""
    episode_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time of one episode; a longer one fails."""
    max_proposals: int = Field(default=8, ge=0)
    """New tasks that the workflow of one episode may propose; more are refused."""
    scorers: int = Field(default=1, ge=1)
    """Processes of the scoring pool, a service."""
    outage_s: float = Field(default=900.0, gt=0)
    """A service that the dataflow has not answered for this long leaves with an error."""
