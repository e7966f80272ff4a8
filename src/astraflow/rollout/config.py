"""Rollout services and engines of a recipe."""

import re
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_serializer, model_validator

from astraflow.config import Config, Use, Variant, with_installed
from astraflow.user_input.text_forms import Variable, Word

__all__ = [
    "AttachConfig",
    "EngineConfig",
    "RolloutConfig",
    "ServerEngineConfig",
    "SglangEngineConfig",
    "TorchEngineConfig",
    "VllmEngineConfig",
]


_AUTO_CONTEXT = 256
"""Context of an engine that is made without looking at tasks. A run always looks at them."""


class TorchEngineConfig(Config):
    """Embedded engine for Hugging Face causal language models, with continuous batching on a CPU or one
    GPU."""

    name: Literal["torch"] = "torch"
    num_slots: int = Field(default=128, ge=1, le=65_536)
    """Number of requests that run at the same time."""
    max_context: Literal["auto"] | Annotated[int, Field(ge=2, le=2**24)] = "auto"
    """Largest number of tokens of a prompt and its completion together. `auto`: what the tasks and
    `sampling.max_tokens` need, or 4,096 if a workflow has several turns; at most what the models take."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights, KV cache and computation."""
    device: str = "cpu"
    """Device, e.g. `cpu` or `cuda:0`."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """Number of CPU threads of the service; keep the sum over all processes within the machine's cores."""
    record_experts: bool = False
    """Record which experts a mixture of experts chose where it sampled a token. The trainer then sends the
    token to the same ones (router replay)."""

    @property
    def context(self) -> int:
        """`max_context` as a number; 256 for `auto` until the tasks are known."""
        return _AUTO_CONTEXT if self.max_context == "auto" else self.max_context


class AttachConfig(Config):
    """Servers that already run, for one policy and one rollout service; if `url` is empty, the engine starts
    its own."""

    url: str = ""
    """Address of the server, e.g. `http://127.0.0.1:8000`."""
    pinned_url: str = ""
    """Address of a second server, which serves the pinned versions that evaluation uses."""
    weights_dir: str = ""
    """Folder in which new weights are written for the server to read; empty: `/dev/shm` if it exists, else
    the temporary folder."""

    @model_validator(mode="after")
    def _needs_url(self) -> Self:
        if self.pinned_url and not self.url:
            raise ValueError("pinned_url is set, but url is not; name the server that generates in url")
        return self


REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A reference to a value in the environment: `${HF_TOKEN}`."""


class ServerEngineConfig(Config):
    """What the engines that drive a separate server have in common."""

    python: str
    """Python interpreter that has the server installed; a path is relative to the folder that the command
    runs in."""
    args: tuple[str, ...] = ()
    """Further arguments of the server's command, passed on unchanged."""
    env: dict[Variable, str] = Field(default_factory=dict)
    """Further environment variables of the server. A value `${NAME}` is that of the rollout service's own
    variable; any other stays on the machine of the run, and is such a reference wherever the recipe goes."""
    attach: AttachConfig = AttachConfig()
    """Servers to use instead of starting new ones."""
    num_slots: int = Field(default=128, ge=1, le=65_536)
    """Number of requests that the server runs at the same time."""
    max_context: Literal["auto"] | Annotated[int, Field(ge=2, le=2**24)] = "auto"
    """Largest number of tokens of a prompt and its completion together. `auto`: what the tasks and
    `sampling.max_tokens` need, or 4,096 if a workflow has several turns; at most what the models take."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of weights and computation; attention kernels on a GPU need a 16-bit type."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """Number of CPU threads of the server; keep the sum over all processes within the machine's cores."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Largest time, in seconds, from the start or restart of the server until it serves."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Largest time, in seconds, for one request or one update of the weights."""

    @property
    def context(self) -> int:
        """`max_context` as a number; 256 for `auto` until the tasks are known."""
        return _AUTO_CONTEXT if self.max_context == "auto" else self.max_context

    @property
    def own_env(self) -> dict[str, str]:
        """The variables whose values stand in the recipe itself."""
        return {name: value for name, value in self.env.items() if not REFERENCE.fullmatch(value)}

    @field_serializer("env")
    def _env_without_values(self, env: dict[str, str]) -> dict[str, str]:
        return {name: value if REFERENCE.fullmatch(value) else f"${{{name}}}" for name, value in env.items()}


class VllmEngineConfig(ServerEngineConfig):
    """A vLLM server per policy, started and supervised by the rollout service."""

    name: Literal["vllm"] = "vllm"
    python: str = ".venv-vllm/bin/python"
    """Python interpreter that has vLLM installed; a path is relative to the folder that the command runs
    in."""


class SglangEngineConfig(ServerEngineConfig):
    """An SGLang server per policy, started and supervised by the rollout service."""

    name: Literal["sglang"] = "sglang"
    python: str = ".venv-sglang/bin/python"
    """Python interpreter that has SGLang installed; a path is relative to the folder that the command runs
    in."""


EngineConfig = TorchEngineConfig | VllmEngineConfig | SglangEngineConfig | Variant | Use
if not TYPE_CHECKING:  # which engines are installed is known at run time only
    EngineConfig = with_installed(EngineConfig, "astraflow.engines")


class RolloutConfig(Config):
    """The rollout services that `astraflow run` starts itself; others may join."""

    services: int = Field(default=2, ge=0, le=10_000)
    """Number of services; 0 leaves all generation to services that join."""
    gpus: tuple[Word, ...] = ()
    """`CUDA_VISIBLE_DEVICES` of each of these services, e.g. `["0", "1"]`, which go round if there are more
    services; empty: each sees all GPUs."""
    engine: EngineConfig = TorchEngineConfig()
    """Generates the completions."""
    max_episodes: int = Field(default=128, ge=1, le=65_536)
    """Number of episodes that one service runs at the same time."""
    episode_timeout_s: float = Field(default=300.0, gt=0)
    """Largest duration of an episode, in seconds; a longer one fails."""
    max_proposals: int = Field(default=8, ge=0, le=65_536)
    """Number of new tasks that the workflow of one episode may propose; further ones are refused."""
    resume: Literal["auto", "always", "never"] = "auto"
    """What becomes of an episode whose service is lost or told to stop. `auto`: if the workflow is built in
    and replayable, the next attempt goes on from the completions of the lost one; `always`: the same for any
    workflow, which you thereby declare to be replayable; `never`: it samples everything again."""
    scorers: int = Field(default=1, ge=1, le=1024)
    """Number of scoring processes per service."""
    outage_s: float = Field(default=900.0, gt=0)
    """Seconds without an answer from the dataflow after which a service exits with an error."""
