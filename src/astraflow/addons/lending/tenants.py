"""What a trainer and an engine do with their memory when their turn on a shared device ends and begins.

Each may keep a share of the memory between its turns: what the other one doesn't take in its own. Those that
compute with PyTorch free the rest by themselves (`torch_tenants`), and vLLM by its sleep mode.
"""

from typing import Protocol, runtime_checkable

from astraflow.errors import ConfigError
from astraflow.protocols import Engine, Learner

__all__ = ["PausingTenant", "SleepingEngine", "Tenant", "make_engine_tenant", "make_trainer_tenant"]


@runtime_checkable
class SleepingEngine(Protocol):
    """Optional interface of an `Engine` that frees its device's memory by itself."""

    async def sleep(self) -> None:
        """Frees the memory. No request runs. The engine takes no new weights until `wake`."""
        ...

    async def wake(self) -> None:
        """Takes the memory again."""
        ...

    async def cut(self) -> None:
        """Ends all requests now. Their callers get the beginnings, with the finish reason `abort`."""
        ...


class Tenant(Protocol):
    """A user of the device."""

    async def enter(self) -> None:
        """Brings everything back to the device."""
        ...

    async def leave(self) -> None:
        """Frees the device's memory, except for what it may keep."""
        ...


class _SleepingTenant:
    """An engine that frees its memory by itself."""

    def __init__(self, engine: SleepingEngine) -> None:
        self._engine = engine

    async def enter(self) -> None:
        await self._engine.wake()

    async def leave(self) -> None:
        await self._engine.sleep()


class PausingTenant:
    """An engine that keeps its memory and its requests between turns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def enter(self) -> None:
        """Generates again."""
        await self._engine.resume()

    async def leave(self) -> None:
        """Stops generation."""
        await self._engine.pause()


def make_engine_tenant(engine: Engine, *, keep_frac: float) -> Tenant:
    """The tenant of an engine that may keep a share of the device's memory between turns.

    Raises: ConfigError if the engine can't free its memory.
    """
    if isinstance(engine, SleepingEngine):
        return _SleepingTenant(engine)
    # These load torch, which services with other engines don't need.
    from astraflow.addons.lending.torch_tenants import EngineTenant
    from astraflow.rollout.engines.torch_engine import TorchEngine

    if isinstance(engine, TorchEngine):
        return EngineTenant(engine, keep_frac=keep_frac)
    raise ConfigError(
        f"cluster.lend: the engine {type(engine).__name__} can't free its device between two turns; generate "
        "with torch or vllm, or leave lend out"
    )


def make_trainer_tenant(learner: Learner, *, keep_frac: float) -> Tenant:
    """The tenant of a trainer that may keep a share of the device's memory between turns.

    Raises: ConfigError if the trainer can't free its memory.
    """
    from astraflow.addons.lending.torch_tenants import TrainerTenant

    return TrainerTenant(learner, keep_frac=keep_frac)
