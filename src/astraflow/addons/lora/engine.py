"""One torch engine for all policies that train adapters of one base.

    engine of `solver`   (view) --+
    engine of `verifier` (view) --+--> AdapterEngine: one thread, one base, one batch, one KV cache
    pinned versions             --+

Each view is an `Engine` of its own: it loads its policy's versions, which changes nothing for the others'
requests. Everything else about the engine is that of `TorchEngine`.
"""

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from astraflow.addons.lora.lanes import AdapterLanes
from astraflow.errors import WeightsError
from astraflow.models.adapters import is_adapter
from astraflow.protocols import Capacity
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import BusySpan, GenerateRequest, Generation
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.threads import off_loop

__all__ = ["AdapterEngine", "AdapterView"]


class AdapterEngine(TorchEngine):
    """An engine whose policies share a base. Its first snapshot names the base.

    Example::

        engine = AdapterEngine(TorchEngineConfig(num_slots=64), solver_snapshot)
        solver, verifier = engine.make_view("solver"), engine.make_view("verifier")
        await solver.load(solver_snapshot, slot="live")

    It closes when its last view does. Raises: as `TorchEngine`.
    """

    _adapters: AdapterLanes

    def __init__(self, config: TorchEngineConfig, snapshot: WeightSnapshot) -> None:
        super().__init__(config, snapshot)
        self.base = snapshot.base
        self._names = itertools.count()
        self._views: list[str] = []
        self._paused: set[str] = set()
        """Views that have paused the engine."""

    @property
    def is_closed(self) -> bool:
        """Whether the last view has closed it."""
        return not self._views

    def make_lanes(self, snapshot: WeightSnapshot, *, exact: bool) -> AdapterLanes:
        """Makes the lane of all adapters."""
        assert not exact, "the recipe refuses exact logprobs with adapters"
        self._adapters = AdapterLanes(self._config, snapshot)
        return self._adapters

    def make_view(self, policy: str) -> "AdapterView":
        """Returns the engine of one more policy."""
        # A policy that follows another one has its versions, but later, so names alone don't tell them apart.
        name = f"{policy}.{next(self._names)}"
        self._views.append(name)
        return AdapterView(self, name, policy)

    async def load_adapter(self, view: str, snapshot: WeightSnapshot, slot: str) -> None:
        """Installs an adapter in a slot of a view. Raises: WeightsError if it does not fit."""
        who = f"version {snapshot.version} of policy {snapshot.policy!r}"
        if snapshot.base != self.base:
            raise WeightsError(
                f"{who} is an adapter of {snapshot.base or 'no known base'}, but the engine has {self.base}; "
                "was the policy's model replaced? Restart the run, so that the services load it"
            )
        name = f"{view}/{slot}"
        lanes = self._adapters
        async with self._load_locks.setdefault(name, asyncio.Lock()):
            if await self.call(partial(lanes.version_in, name)) == snapshot.version:
                return
            num_bytes = sum(tensor.data.nbytes for tensor in snapshot.tensors if is_adapter(tensor.name))
            weights = await off_loop(num_bytes, lanes.adapters.read, snapshot.tensors, who)
            await self.call(partial(lanes.install, name, weights, snapshot.version), slot=name)

    async def score_with(self, view: str, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 under a view's newest version. Raises: RolloutError."""
        self._check_tokens(token_ids, len(token_ids))
        return await self.call(partial(self._adapters.score, f"{view}/live", token_ids))

    async def set_paused(self, view: str, *, is_paused: bool) -> None:
        """Pauses all views while at least one is paused."""
        (self._paused.add if is_paused else self._paused.discard)(view)
        await (self.pause() if self._paused else self.resume())

    def load_of(self, view: str) -> Capacity:
        """The load of a view. Raises: ServiceError if the engine has failed.

        The slots are those of all views. All generated tokens count for the first view, so that the sum over
        the views is right.
        """
        whole = self.capacity()
        own = [job for job in self._adapters.lane.jobs if job.policy == view]
        num_running = sum(job.row >= 0 for job in own)
        return Capacity(
            num_slots=whole.num_slots,
            num_running=num_running,
            num_waiting=len(own) - num_running,
            max_context=whole.max_context,
            generated_tokens=whole.generated_tokens if self._views[:1] == [view] else 0,
        )

    async def close_view(self, view: str) -> None:
        """Ends a view. Its requests fail. The last view ends the engine."""
        self._views.remove(view)
        if not self._views:
            await self.close()
            return
        await self.call(partial(self._adapters.remove, view))
        await self.set_paused(view, is_paused=False)


class AdapterView:
    """Implements `Engine` for one of the policies of an `AdapterEngine`."""

    def __init__(self, engine: AdapterEngine, name: str, policy: str) -> None:
        self.shared = engine
        self._name = name
        self._policy = policy

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generates with the policy's adapter. Raises: as `TorchEngine.generate`."""
        return await self.shared.generate(request, policy=self._name)

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1, from the newest version."""
        return await self.shared.score_with(self._name, token_ids)

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version of the policy. Requests of other policies go on as they are.

        Raises: WeightsError if it is an adapter of another base, or does not fit. The old one then keeps
        serving.
        """
        if slot not in ("live", "pinned"):
            raise WeightsError(f'slot {slot!r} does not exist; expected "live" or "pinned"')
        if snapshot.policy != self._policy:
            raise WeightsError(
                f"version {snapshot.version} of policy {snapshot.policy!r} was given to the engine of "
                f"{self._policy!r}"
            )
        await self.shared.load_adapter(self._name, snapshot, slot)

    async def pause(self) -> None:
        """Pauses the whole engine until no view is paused. Requests are kept."""
        await self.shared.set_paused(self._name, is_paused=True)

    async def resume(self) -> None:
        """Undoes `pause`."""
        await self.shared.set_paused(self._name, is_paused=False)

    def capacity(self) -> Capacity:
        """The load of the policy."""
        return self.shared.load_of(self._name)

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Takes the intervals in which the engine generated for any view, since any view's last call."""
        return self.shared.take_spans()

    async def close(self) -> None:
        """Ends the view, and the engine with the last one."""
        await self.shared.close_view(self._name)
