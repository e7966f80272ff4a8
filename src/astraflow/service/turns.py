"""The turns of a trainer or a rollout service on its device, which it may share with another one."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from astraflow import added
from astraflow.protocols import Engine, Learner
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["DEVICE_VARIABLE", "MakeEngine", "Turns", "own_turns"]

MakeEngine = Callable[[WeightSnapshot], Engine | Awaitable[Engine]]

DEVICE_VARIABLE = "ASTRAFLOW_DEVICE"
"""Environment variable with the socket at which a shared device is asked for; unset if it isn't shared."""


class Turns:
    """The turns of a service whose device isn't shared: `async with turns:` begins at once."""

    def __init__(self) -> None:
        self.is_asked_back = asyncio.Event()
        """The turn must end soon, because the other service needs the device."""

    async def __aenter__(self) -> None:
        """Waits for the device."""

    async def __aexit__(self, *error: object) -> None:
        """Frees the device."""

    async def until_asked_back(self) -> None:
        """Returns when the turn must end."""
        await self.is_asked_back.wait()

    def to_load(self) -> AbstractAsyncContextManager[None]:
        """A turn in which a trainer loads or saves its model."""
        return nullcontext()

    def share_learner(self, learner: Learner) -> None:
        """Lets the learner's memory be freed between turns."""

    def share_engines(self, make_engine: MakeEngine) -> MakeEngine:
        """Makes engines that use the device only during turns."""
        return make_engine


def own_turns(name: str) -> Turns:
    """The turns of this process, which runs the service `name`. Raises: ConfigError if it shares its device,
    and this installation cannot do that."""
    if path := os.environ.get(DEVICE_VARIABLE, ""):
        return added.SharedTurns(Path(path), name)
    return Turns()
