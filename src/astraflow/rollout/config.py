"""Rollout services and engines of a recipe."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_serializer, model_validator

from astraflow.config import Config, Use

__all__ = [
    "AttachConfig",
    "EngineConfig",
    "PacedEngineConfig",
    "RolloutConfig",
    "ServerEngineConfig",
    "SglangEngineConfig",
    "TorchEngineConfig",
    "VllmEngineConfig",
]


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


class AttachConfig(Config):
    """Servers that run already, for one policy and one rollout service; empty: the engine starts its own."""

    url: str = ""
    """Of the server, e.g. `http://127.0.0.1:8000`."""
    pinned_url: str = ""
    """Of a second server, which serves the versions that `eval.sets` are evaluated with."""
    weights_dir: str = ""
    """Where new weights are written for the server to read; empty: `/dev/shm`, else the temporary folder."""

    @model_validator(mode="after")
    def _needs_url(self) -> Self:
        if self.pinned_url and not self.url:
            raise ValueError("pinned_url is set, but url is not; name the server that generates in url")
        return self


REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A value that stands in the environment: `${HF_TOKEN}`."""


class ServerEngineConfig(Config):
    """What the engines behind a server of its own have in common."""

    python: str
    """The Python that has the server installed; a path is relative to the folder that the command runs in."""
    args: tuple[str, ...] = ()
    """Further arguments of the server's command, as given."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the server. A value `${NAME}` is that of the rollout service's own
    variable; any other stays on the machine of the run, and is such a reference wherever the recipe goes."""
    attach: AttachConfig = AttachConfig()
    """Servers to use instead of starting some."""
    num_slots: int = Field(default=128, ge=1)
    """Requests that the server runs at once."""
    max_context: int = Field(default=256, ge=2)
    """Tokens of prompt and completion together."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and computation; GPU attention kernels need a 16-bit one."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the server; keep the sum over all processes within the machine's cores."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Longest time from a start, or restart, of the server until it serves."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time that the server may take for one request, or one update of the weights."""

    @property
    def own_env(self) -> dict[str, str]:
        """The variables whose values stand in the recipe itself."""
        return {name: value for name, value in self.env.items() if not REFERENCE.fullmatch(value)}

    @field_serializer("env")
    def _env_without_values(self, env: dict[str, str]) -> dict[str, str]:
        return {name: value if REFERENCE.fullmatch(value) else f"${{{name}}}" for name, value in env.items()}


class VllmEngineConfig(ServerEngineConfig):
    """A vLLM server for each policy, started and supervised by the rollout service."""

    name: Literal["vllm"] = "vllm"
    python: str = ".venv-vllm/bin/python"
    """The Python that has vLLM installed; a path is relative to the folder that the command runs in."""


class SglangEngineConfig(ServerEngineConfig):
    """An SGLang server for each policy, started and supervised by the rollout service."""

    name: Literal["sglang"] = "sglang"
    python: str = ".venv-sglang/bin/python"
    """The Python that has SGLang installed; a path is relative to the folder that the command runs in."""


EngineConfig = Annotated[
    TorchEngineConfig | PacedEngineConfig | VllmEngineConfig | SglangEngineConfig | Use,
    Field(discriminator="name"),
]


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
