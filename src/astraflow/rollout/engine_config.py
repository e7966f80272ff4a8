"""The engine `torch` of a recipe, and the base class of engines that packages add."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from astraflow.config import Config, Variant
from astraflow.protocols import Engine
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["SLOT_STEPS", "EngineVariant", "ModelEngineConfig", "TorchEngineConfig"]

_AUTO_CONTEXT = 256
"""Context of an engine for which no tasks are known. A run always knows its tasks."""
SLOT_STEPS = (128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Numbers of slots from which one is chosen if the recipe names none. The steps are coarse so that the same
machine gets the same number every time."""


class ModelEngineConfig(Config):
    """Settings of all engines that generate with the policy's own model."""

    name: Any
    """A `Literal` in each subclass."""
    num_slots: Literal["auto"] | Annotated[int, Field(ge=1, le=65_536)] = "auto"
    """Number of requests that run at the same time. `auto`: 128, or fewer if the KV caches of the embedded
    engine would take more than half of the available memory."""
    max_context: Literal["auto"] | Annotated[int, Field(ge=2, le=2**24)] = "auto"
    """Largest number of tokens of a prompt and its completion together. `auto`: what the tasks and
    `sampling.max_tokens` need, or 4,096 if a workflow has several turns; at most what the models take."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """Number of CPU threads of the engine. Keep the sum over all processes within the machine's cores."""

    @property
    def context(self) -> int:
        """`max_context` as a number; 256 for `auto` until the tasks are known."""
        return _AUTO_CONTEXT if self.max_context == "auto" else self.max_context

    @property
    def slots(self) -> int:
        """`num_slots` as a number; 128 for `auto`, which the embedded engine may lower."""
        return SLOT_STEPS[0] if self.num_slots == "auto" else self.num_slots


class TorchEngineConfig(ModelEngineConfig):
    """Embedded engine for Hugging Face causal language models, with continuous batching on a CPU or one
    GPU."""

    name: Literal["torch"] = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights, KV cache and computation."""
    device: str = "cpu"
    """Device, e.g. `cpu` or `cuda:0`."""
    gpu_share: float = Field(default=0.0, ge=0, le=1)
    """Largest share of the GPU's memory that an engine takes; 0: all. Required if several processes use one
    GPU; a trainer takes what the shares leave."""
    prefix_pool: float = Field(default=1.0, ge=0, le=64)
    """Memory for the keys and values of prefixes that later requests may share, as a multiple of the memory
    of the slots; 0: none. With 1, twice as many conversations as slots keep theirs between turns. Prefixes of
    fewer than 32 tokens aren't kept."""
    record_experts: bool = False
    """Record which experts a mixture-of-experts model chose when it sampled a token. The trainer then routes
    the token to the same experts (router replay)."""


class EngineVariant(Variant):
    """Base of the config of an engine that an installed package adds.

    Only `make` is required. The other members are for engines that need more than the policy's model.
    """

    def make(self) -> Callable[[WeightSnapshot], Engine]:
        """Returns the function that makes the engines of one service, one per policy."""
        raise NotImplementedError

    @property
    def context(self) -> int:
        """Largest number of tokens of a prompt and its completion together; 0 if only the model limits it."""
        return 0

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands that the engine runs. A service that joins over the network must allow them explicitly."""
        return ()

    @property
    def secret_env(self) -> Mapping[str, str]:
        """Secret environment variables for the processes that make the engine."""
        return {}

    def gpu_shares(self, *, num_policies: int, has_evals: bool) -> tuple[float, ...]:
        """Shares of a GPU's memory, one for each program that a service runs there; 0 if one isn't stated."""
        del num_policies, has_evals
        return (0.0,)

    def check_services(self, *, num_policies: int, num_services: int, has_evals: bool) -> None:
        """Raises: ConfigError if the engine can't serve this number of policies for these services."""
