"""A torch engine that compares what it serves with what was published, bit for bit, after every load."""

from typing import ClassVar

from astraflow.models.file_layout import weights_by_name
from astraflow.models.loading import DTYPES, host_tensor
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types.host_tensors import WeightSnapshot
from drivers.transfer_driver import digest_of

__all__ = ["CheckedEngine"]


class CheckedEngine(TorchEngine):
    """Its name in a configuration is `drivers.checked_engine:CheckedEngine`; one per process at a time."""

    published: ClassVar[dict[int, str]] = {}
    """Version -> digest, as the trainer said it."""
    checked: ClassVar[list[int]] = []
    """Versions that were compared."""
    problems: ClassVar[list[str]] = []

    def __init__(self, snapshot: WeightSnapshot, *, num_slots: int, max_context: int) -> None:
        super().__init__(TorchEngineConfig(num_slots=num_slots, max_context=max_context), snapshot)
        self._compare(snapshot.version, "live")

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        await super().load(snapshot, slot=slot)
        self._compare(snapshot.version, slot)

    def _compare(self, version: int, slot: str) -> None:
        """The model's own tensors, float32 values of a version in bfloat16, against its digest."""
        found = self.lanes.live if slot == "live" else self.lanes.pinned
        assert found is not None
        narrow = [
            host_tensor(name, tensor.to(DTYPES["bfloat16"])) for name, tensor in weights_by_name(found.model)
        ]
        digest = digest_of(narrow)
        if digest != self.published.get(version):
            self.problems.append(f"{slot} holds {digest} as version {version}: {self.published.get(version)}")
        self.checked.append(version)
