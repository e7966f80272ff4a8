"""The engine whose model runs in a server of its own: vLLM or SGLang, one server a policy.

Evaluation pins a version: for that a second server is started when it is first needed, and stays.
"""

import json
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import ConfigError, DataError, RolloutError, WeightsError
from astraflow.host_tensors import WeightSnapshot
from astraflow.protocols import Capacity
from astraflow.rollout.config import ServerEngineConfig
from astraflow.rollout.engines.requests import check_sampling, check_tokens
from astraflow.rollout.engines.server_api import ServerApi
from astraflow.rollout.engines.server_slot import ServerSlot
from astraflow.rollout.engines.spans import BusyClock
from astraflow.types import BusySpan, GenerateRequest, Generation

__all__ = ["ServerEngine"]

SlotName = Literal["live", "pinned"]


class ServerEngine:
    """`Engine` over one policy. Starts its server on construction, in a running event loop; `close` it.

    Example::

        engine = ServerEngine(VllmApi(), VllmEngineConfig(), snapshot)
        await engine.load(snapshot, slot="live")  # returns once the server serves
        generation = await engine.generate(GenerateRequest(token_ids=(5, 6), sampling=Sampling()))

    Raises: DataError if the model folder has no vocabulary size.
    """

    def __init__(self, api: ServerApi, config: ServerEngineConfig, snapshot: WeightSnapshot) -> None:
        self._api, self._config, self._policy = api, config, snapshot.policy
        self._vocab_size = _vocab_size(snapshot)
        self._clock, self._num_busy = BusyClock("generate"), 0
        self._slots: dict[SlotName, ServerSlot] = {
            "live": ServerSlot(api, config, snapshot, url=config.attach.url)
        }

    async def generate(self, request: GenerateRequest) -> Generation:
        """Tokens, logprobs and the version of each token.

        Raises: RolloutError; not retryable if the request itself is at fault.
        """
        sampling, num_prompt = request.sampling, len(request.token_ids)
        check_sampling(sampling)
        self._check_tokens(request.token_ids, num_prompt + 1)
        slot = self._slot_for(request.version)
        self._num_busy += 1
        self._clock.start(time.time())
        try:
            max_tokens = min(sampling.max_tokens, self._config.max_context - num_prompt)
            return await slot.generate(request, max_tokens=max_tokens)
        finally:
            self._num_busy -= 1
            if not self._num_busy:
                self._clock.stop(time.time())

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1 under the newest version.

        Raises: RolloutError. The server generates a token besides, so that `max_context` cannot be scored
        in full.
        """
        self._check_tokens(token_ids, len(token_ids) + 1)
        if len(token_ids) < 2:
            return np.zeros(0, np.float32)
        return await self._slots["live"].score(tuple(token_ids))

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version in slot `live` (running requests go on with it) or `pinned`.

        Waits for the server to start, and for the requests that are for exactly the slot's present version.
        Raises: WeightsError; the old version then keeps serving. ConfigError or ServiceError if there will
        be no server.
        """
        if slot not in ("live", "pinned"):
            raise WeightsError(f'slot {slot!r} does not exist; expected "live" or "pinned"')
        if snapshot.policy != self._policy:
            raise WeightsError(
                f"version {snapshot.version} of policy {snapshot.policy!r} was given to the engine of "
                f"{self._policy!r}"
            )
        name: SlotName = "live" if slot == "live" else "pinned"
        if name not in self._slots:
            self._slots[name] = self._second_server(snapshot)
        await self._slots[name].update(snapshot)

    async def pause(self) -> None:
        """Stops stepping; requests stay."""
        for slot in self._slots.values():
            await slot.pause()

    async def resume(self) -> None:
        """Goes on."""
        for slot in self._slots.values():
            await slot.resume()

    def capacity(self) -> Capacity:
        """The servers' own figures, a second old at most.

        Raises: ServiceError if a server is gone for good.
        """
        for slot in self._slots.values():
            if slot.failure is not None and not isinstance(slot.failure, RolloutError):
                raise slot.failure
        gauges = [slot.gauges for slot in self._slots.values()]
        return Capacity(
            num_slots=self._config.num_slots,
            num_running=sum(gauge.num_running for gauge in gauges),
            num_waiting=sum(gauge.num_waiting for gauge in gauges),
            max_context=self._config.max_context,
            generated_tokens=sum(gauge.generated_tokens for gauge in gauges),
        )

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Wall-clock intervals in which requests ran, since the last call."""
        return self._clock.take(time.time())

    async def close(self) -> None:
        """Ends the servers; requests that still run fail with a retryable RolloutError."""
        for slot in self._slots.values():
            await slot.close()

    def _second_server(self, snapshot: WeightSnapshot) -> ServerSlot:
        attach = self._config.attach
        if attach.url and not attach.pinned_url:
            raise ConfigError(
                "evaluation needs a second server: name it in rollout.engine.attach.pinned_url, or leave "
                "eval.sets out and evaluate with `astraflow eval`"
            )
        return ServerSlot(self._api, self._config, snapshot, url=attach.pinned_url)

    def _slot_for(self, version: int) -> ServerSlot:
        """The slot that serves a request for a version, -1 for the newest. Raises: RolloutError."""
        if version < 0:
            return self._slots["live"]
        slots = [slot for slot in self._slots.values() if slot.version == version and not slot.is_changing]
        if slots:  # the pinned one, unless it is still starting
            return next((slot for slot in reversed(slots) if slot.is_ready), slots[-1])
        served = ", ".join(f"{name}: {slot.version}" for name, slot in self._slots.items())
        raise RolloutError(
            f"version {version} of {self._policy!r} is in no slot ({served}); load it into the pinned slot "
            "first"
        )

    def _check_tokens(self, token_ids: Sequence[int], num_needed: int) -> None:
        check_tokens(
            token_ids,
            num_needed=num_needed,
            max_context=self._config.max_context,
            vocab_size=self._vocab_size,
        )


def _vocab_size(snapshot: WeightSnapshot) -> int:
    path = snapshot.model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise DataError(f"{path} names no vocab_size: {type(err).__name__}: {err}") from err
