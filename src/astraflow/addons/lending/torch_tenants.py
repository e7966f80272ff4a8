"""The tenants that compute with PyTorch: a trainer, and the torch engine.

Each may keep a share of the memory between its turns. A trainer gives up its optimizer's state first, and
then its weights; the engine first its KV cache, and then its weights. What must come back is copied to host
memory.
"""

import asyncio
import contextlib
import logging
from typing import get_args

import torch
from torch import Tensor

from astraflow.addons.lending.device_memory import DeviceMemory, MemoryGroup
from astraflow.addons.offline.groups import MixedLearner
from astraflow.errors import ConfigError
from astraflow.protocols import Learner, ModelRole
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.trainer.torch.trained_model import TrainedModel

__all__ = ["EngineTenant", "TrainerTenant", "engine_tensors", "trainer_tensors"]

_log = logging.getLogger(__name__)


class TrainerTenant:
    """A trainer. Example: `TrainerTenant(learner, keep_frac=0.4)`. Raises: ConfigError if it can't free its
    memory."""

    def __init__(self, learner: Learner, *, keep_frac: float) -> None:
        """`keep_frac`: the share of the device's memory that it may keep between turns."""
        inner = learner.inner if isinstance(learner, MixedLearner) else learner
        backend = inner.backend if isinstance(inner, LossLearner) else None
        if not isinstance(backend, TorchBackend):
            raise ConfigError(
                f"cluster.lend: the trainer ({type(backend or inner).__name__}) can't free its device "
                "between two steps; train with the torch backend, or leave lend out"
            )
        self._backend = backend
        self._keep_frac = keep_frac
        self._memory = DeviceMemory()

    async def enter(self) -> None:
        """Brings the weights and the optimizer's state back."""
        await asyncio.to_thread(self._memory.restore)

    async def leave(self) -> None:
        """Moves the optimizer's state, and then the weights, to host memory as far as necessary."""
        await asyncio.to_thread(self._free)

    def _free(self) -> None:
        averages, weights = trainer_tensors(self._backend)
        groups = [MemoryGroup(averages, True), MemoryGroup(weights, True)]
        self._memory.free(groups, keep_bytes=self._keep_frac * _total_bytes(weights))


class EngineTenant:
    """A torch engine. It is paused between turns."""

    def __init__(self, engine: TorchEngine, *, keep_frac: float) -> None:
        """`keep_frac`: the share of the device's memory that it may keep between turns."""
        self._engine = engine
        self._keep_frac = keep_frac
        self._memory = DeviceMemory()

    async def enter(self) -> None:
        """Brings weights and KV cache back, and generates again."""
        if await asyncio.to_thread(self._memory.restore):
            await self._engine.call(lambda: [lane.recompute() for lane in self._engine.lanes.lanes])
        await self._engine.resume()

    async def leave(self) -> None:
        """Stops generation, and frees the KV cache, and then the weights, as far as necessary."""
        await self._engine.pause()
        load = self._engine.capacity()
        if load.num_running or load.num_waiting:
            _log.warning("%d requests still run, so the engine keeps its memory", load.num_running)
            return
        await asyncio.to_thread(self._free)

    def _free(self) -> None:
        cache, weights = engine_tensors(self._engine)
        groups = [MemoryGroup(cache, False), MemoryGroup(weights, True)]
        self._memory.free(groups, keep_bytes=self._keep_frac * _total_bytes(weights))


def engine_tensors(engine: TorchEngine) -> tuple[list[Tensor], list[Tensor]]:
    """The keys and values of a paused engine, and its weights."""
    slots = [slot for slot in (engine.lanes.live, engine.lanes.pinned) if slot is not None]
    cache = [tensor for slot in slots for tensor in slot.lane.cache.tensors]
    return cache, [weight for slot in slots for weight in slot.model.state_dict().values()]


def trainer_tensors(backend: TorchBackend) -> tuple[list[Tensor], list[Tensor]]:
    """What stays on a trainer's device between steps: the optimizers' state, and the weights of all
    models."""
    averages: list[Tensor] = []
    weights: list[Tensor] = []
    for role in get_args(ModelRole):
        with contextlib.suppress(ConfigError):  # the recipe has no such model
            model = backend.scoring_model(role)
            weights += model.forward.entry.state_dict().values()
            averages += model.averages if isinstance(model, TrainedModel) else ()
    return averages, weights


def _total_bytes(weights: list[Tensor]) -> int:
    """The memory of the device of some weights; 0 on a CPU, where nothing is kept."""
    device = weights[0].device
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
