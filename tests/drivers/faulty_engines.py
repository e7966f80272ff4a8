"""Engines with a fault, as a component of a user's own may have one: what the drift check has to find."""

import msgspec

from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import GenerateRequest, Generation
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["HotEngine", "RoundingEngine"]


class HotEngine(TorchEngine):
    """Samples at another temperature than it is asked for, and tells nobody."""

    def __init__(self, snapshot: WeightSnapshot, *, factor: float, max_context: int = 48) -> None:
        super().__init__(TorchEngineConfig(max_context=max_context), snapshot)
        self._factor = factor

    async def generate(self, request: GenerateRequest) -> Generation:
        """As asked, but for the temperature."""
        heat = request.sampling.temperature * self._factor
        sampling = msgspec.structs.replace(request.sampling, temperature=heat)
        return await super().generate(msgspec.structs.replace(request, sampling=sampling))


class RoundingEngine(TorchEngine):
    """Computes in bfloat16 what the trainer computes in float32."""

    def __init__(self, snapshot: WeightSnapshot, *, max_context: int = 48) -> None:
        super().__init__(TorchEngineConfig(max_context=max_context, dtype="bfloat16"), snapshot)
