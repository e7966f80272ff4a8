"""One torch engine for all policies that train adapters of one base.

    engine of `solver`   (view) --+
    engine of `verifier` (view) --+--> AdapterEngine: one thread, one base, one batch, one KV cache
    pinned versions             --+

Each view is an `Engine` of its own: it loads its policy's versions, which changes nothing for the others'
requests. Everything else about the engine is that of `TorchEngine`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from astraflow.addons.lora.lanes import AdapterLanes
from astraflow.errors import WeightsError
from astraflow.models.adapters import is_adapter
from astraflow.protocols import Capacity, TokenScores
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.requests import check_tokens
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import BusySpan, GenerateRequest, Generation
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.threads import off_loop

__all__ = ["AdapterEngine", "AdapterView"]


class AdapterEngine(TorchEngine):
    """An engine whose policies share a base, which its first snapshot names. Use it through views.

    Example::

        engine = AdapterEngine(TorchEngineConfig(num_slots=64), solver_snapshot)
        solver, verifier = AdapterView(engine, "solver"), AdapterView(engine, "verifier")
        await solver.load(solver_snapshot, slot="live")

    It closes when its last view does. Raises: as `TorchEngine`.
    """

    adapters: AdapterLanes

    def __init__(self, config: TorchEngineConfig, snapshot: WeightSnapshot) -> None:
        super().__init__(config, snapshot)
        self.base = snapshot.base
        self.num_views = 0
        """Number of views that were made."""
        self.views: list[str] = []
        """The views that are open."""
        self.paused: set[str] = set()
        """The views that have paused the engine."""

    def make_lanes(self, snapshot: WeightSnapshot, *, exact: bool) -> AdapterLanes:
        """Makes the lane of all adapters."""
        assert not exact, "the recipe refuses exact logprobs with adapters"
        self.adapters = AdapterLanes(self._config, snapshot)
        return self.adapters


class AdapterView:
    """Implements `Engine` for one of the policies of an `AdapterEngine`."""

    def __init__(self, engine: AdapterEngine, policy: str) -> None:
        self.shared = engine
        # A policy that follows another one has its versions, but later, so names alone don't tell them apart.
        self.name = f"{policy}.{engine.num_views}"
        self._policy = policy
        self._locks = {slot: asyncio.Lock() for slot in ("live", "pinned")}
        engine.num_views += 1
        engine.views.append(self.name)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generates with the policy's adapter. Raises: as `TorchEngine.generate`."""
        return await self.shared.generate(request, policy=self.name)

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1, from the newest version. Raises:
        RolloutError."""
        self._check_tokens(token_ids)
        return await self.shared.call(partial(self.shared.adapters.score, f"{self.name}/live", token_ids))

    async def score_top(self, token_ids: Sequence[int], num: int, *, temperature: float = 1.0) -> TokenScores:
        """Scores tokens 1..T-1, with the `num` most likely ones in place of each. Raises: RolloutError."""
        self._check_tokens(token_ids)
        score_top = self.shared.adapters.score_top
        return await self.shared.call(partial(score_top, f"{self.name}/live", token_ids, num, temperature))

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        check_tokens(
            token_ids,
            num_needed=len(token_ids),
            max_context=self.shared.capacity().max_context,
            vocab_size=self.shared.adapters.lane.vocab_size,
        )

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version of the policy. Requests of other policies go on as they are.

        Raises: WeightsError if it is an adapter of another base, or does not fit. The old one then keeps
        serving.
        """
        engine = self.shared
        who = f"version {snapshot.version} of policy {snapshot.policy!r}"
        if slot not in self._locks:
            raise WeightsError(f'slot {slot!r} does not exist; expected "live" or "pinned"')
        if snapshot.policy != self._policy:
            raise WeightsError(f"{who} was given to the engine of {self._policy!r}")
        if snapshot.base != engine.base:
            raise WeightsError(
                f"{who} is an adapter of {snapshot.base or 'no known base'}, but the engine has "
                f"{engine.base}; was the policy's model replaced? Restart the run, so that services load it"
            )
        name = f"{self.name}/{slot}"
        async with self._locks[slot]:
            if await engine.call(partial(engine.adapters.version_in, name)) == snapshot.version:
                return
            num_bytes = sum(tensor.data.nbytes for tensor in snapshot.tensors if is_adapter(tensor.name))
            weights = await off_loop(num_bytes, engine.adapters.adapters.read, snapshot.tensors, who)
            install = partial(engine.adapters.install, name, weights, snapshot.version)
            await engine.call(install, slot=name)

    async def pause(self) -> None:
        """Pauses the whole engine until no view is paused. Requests are kept."""
        self.shared.paused.add(self.name)
        await self.shared.pause()

    async def resume(self) -> None:
        """Undoes `pause`."""
        self.shared.paused.discard(self.name)
        if not self.shared.paused:
            await self.shared.resume()

    def capacity(self) -> Capacity:
        """The load of the policy. Raises: ServiceError if the engine has failed.

        The slots are those of all views. All generated tokens count for the first view, so that the sum over
        the views is right.
        """
        whole = self.shared.capacity()
        own = [job for job in self.shared.adapters.lane.jobs if job.policy == self.name]
        num_running = sum(job.row >= 0 for job in own)
        return replace(
            whole,
            num_running=num_running,
            num_waiting=len(own) - num_running,
            generated_tokens=whole.generated_tokens if self.shared.views[:1] == [self.name] else 0,
        )

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Takes the intervals in which the engine generated for any view, since any view's last call."""
        return self.shared.take_spans()

    async def close(self) -> None:
        """Ends the view, whose requests fail. The last view ends the engine."""
        self.shared.views.remove(self.name)
        if not self.shared.views:
            await self.shared.close()
            return
        await self.shared.call(partial(self.shared.adapters.remove, self.name))
        await self.resume()
