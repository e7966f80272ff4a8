"""The config of an engine that a package adds to AstraFlow.

After `pip install examples/engine_package`, a recipe names it: `rollout: {engine: {name: generate}}`.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

from pydantic import Field

from astraflow.protocols import Engine
from astraflow.rollout.engine_config import EngineVariant
from astraflow.types.host_tensors import WeightSnapshot


class GenerateEngineConfig(EngineVariant):
    """Generate with transformers' `model.generate`, one request at a time."""

    name: Literal["generate"] = "generate"
    max_context: int = Field(default=256, ge=2)
    """Largest number of tokens of a prompt and its completion together."""

    @property
    def context(self) -> int:
        return self.max_context

    def make(self) -> Callable[[WeightSnapshot], Engine]:
        from generate_engine import GenerateEngine  # imports torch, so not with the module

        return partial(GenerateEngine, max_context=self.max_context)
