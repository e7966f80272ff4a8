"""Engines with deliberate faults, loaded like a user's own component, which the drift check must detect."""

import msgspec

from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import GenerateRequest, Generation
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["HotEngine", "RoundingEngine"]


class HotEngine(TorchEngine):
    """Samples at a different temperature than requested, and doesn't report it."""

    def __init__(self, snapshot: WeightSnapshot, *, factor: float, max_context: int = 48) -> None:
        super().__init__(TorchEngineConfig(max_context=max_context), snapshot)
        self._factor = factor

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generates at `factor` times the requested temperature."""
        temperature = request.sampling.temperature * self._factor
        sampling = msgspec.structs.replace(request.sampling, temperature=temperature)
        return await super().generate(msgspec.structs.replace(request, sampling=sampling))


class RoundingEngine(TorchEngine):
    """Computes in bfloat16 what the trainer computes in float32."""

    def __init__(self, snapshot: WeightSnapshot, *, max_context: int = 48) -> None:
        super().__init__(TorchEngineConfig(max_context=max_context, dtype="bfloat16"), snapshot)
