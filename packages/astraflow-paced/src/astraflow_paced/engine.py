"""The `paced` engine: requests take the time that a GPU would need, and their tokens are random.

It serves benchmarks of the system on machines without GPUs. Protocol, processes, slots, versions, updates and
waits are real; only the forward pass is left out. Length and tokens of a completion depend on its seed alone,
not on the weights, and all logprobs are the same constant. Nothing can be learned from it, so it logs a
warning when it is made.

    generate --job--> device <--advance-- one timer for the whole device (`PacedClock`) --> futures

The engines of a service, one per policy, share its one device and timer. Nothing polls.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import DataError, RolloutError, ServiceError, WeightsError
from astraflow.models.stop_ids import folder_stop_ids
from astraflow.protocols import Capacity
from astraflow.rollout.engines.spans import BusyClock
from astraflow.types import BusySpan, FinishReason, GenerateRequest, Generation
from astraflow.types.host_tensors import WeightSnapshot
from astraflow_paced.config import PacedEngineConfig
from astraflow_paced.emulated_device import PacedDevice, PacedJob

__all__ = ["PacedClock", "PacedEngine"]

_log = logging.getLogger(__name__)

_LOGPROB = -0.7
"""Logprob of every token in nats: about one bit, as from a model that is fairly sure."""

_MAX_DRAWS = 1000
"""Draws of a length that exceeds the tokens that a completion already has."""

_LATE_S = 0.001
"""Event loops round to milliseconds. A timer that is set this much later never fires before the time it is
for."""


class PacedClock:
    """A device, and the one timer that advances its clock. It belongs to one event loop.

    Example: `clock = PacedClock(PacedEngineConfig(time_scale=10.0))`, then `PacedEngine(snapshot, clock)`.
    """

    def __init__(self, config: PacedEngineConfig) -> None:
        self.config = config
        self.device = PacedDevice(
            num_slots=config.num_slots,
            tokens_per_s=config.tokens_per_s,
            max_tokens_per_s=config.max_tokens_per_s,
            kv_tokens=config.kv_tokens,
        )
        self._clocks: dict[str, BusyClock] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.failure = ""
        """The error that stopped the timer for good; empty while it works."""
        self._engines: list[PacedEngine] = []

    def attach(self, engine: "PacedEngine") -> None:
        """Adds an engine to notify if the timer fails, because nobody awaits a timer."""
        self._engines.append(engine)

    def busy_clock(self, owner: str) -> BusyClock:
        """The busy clock of an owner, which runs while its requests advance."""
        return self._clocks.setdefault(owner, BusyClock("generate"))

    def bring_up(self) -> None:
        """Advances the device to the present. Call it before the device is changed or read."""
        now_s = asyncio.get_running_loop().time() * self.config.time_scale
        for job in self.device.advance(now_s):
            job.ended()

    def settle(self) -> None:
        """Sets timer and busy clocks by the state of the device. Call it after the device was changed."""
        for owner, clock in self._clocks.items():
            is_busy = self.device.num_running(owner) > 0 and not self.device.is_held(owner)
            (clock.start if is_busy else clock.stop)(time.time())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.device.due_s
        if math.isfinite(due_s):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(due_s / self.config.time_scale + _LATE_S, self._tick)

    async def sleep(self, seconds: float) -> None:
        """Waits for emulated seconds."""
        await asyncio.sleep(seconds / self.config.time_scale)

    def _tick(self) -> None:
        self._timer = None
        try:
            self.bring_up()
            self.settle()
        except Exception as err:  # noqa: BLE001 - nobody awaits a timer, so those who wait are told here
            _log.exception("the paced device failed")
            self.failure = f"the paced device failed: {type(err).__name__}: {err}"
            for engine in self._engines:
                engine.fail(self.failure)


class PacedEngine:
    """Implements `Engine` for one policy on a device that others may share.

    Example::

        engine = PacedEngine(snapshot, PacedClock(PacedEngineConfig(tokens_per_s=50.0)))
        generation = await engine.generate(GenerateRequest(token_ids=(5, 6), sampling=Sampling(seed=1)))
    """

    def __init__(self, snapshot: WeightSnapshot, clock: PacedClock) -> None:
        """Raises: DataError if the files in the model folder do not say which tokens there are."""
        self._policy = snapshot.policy
        self._clock = clock
        self._config = clock.config
        self._device = clock.device
        self._tokens, self._stop_id = _vocabulary(snapshot.model_dir)
        self._versions = {"live": snapshot.version}
        self._running: dict[PacedJob, asyncio.Future[None]] = {}
        self._marks: dict[PacedJob, list[tuple[int, int]]] = {}
        """Request -> (first token, version from there on), for requests that follow the live version."""
        self._is_paused = self._is_closed = False
        self._num_tokens = 0
        self._busy = clock.busy_clock(self._policy)
        clock.attach(self)
        _log.warning(
            "EMULATED: policy %s has no model here; %d slots at %g tokens/s, time runs %g times faster",
            self._policy,
            self._config.num_slots,
            self._config.tokens_per_s,
            self._config.time_scale,
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns random tokens after the time that a GPU would take for them.

        Raises: RolloutError; not retryable if the request itself is at fault.
        """
        version = self._version_for(request)
        cap = self._room(request)
        rng = np.random.default_rng(request.sampling.seed)
        length = self._length(rng, request.num_begun)
        finish_reason: FinishReason = "stop" if length <= cap else "length"
        num_tokens = min(length, cap)
        marks = [(0, version)]
        try:
            await self._run(request, num_tokens, marks)
        except asyncio.CancelledError as err:
            if (num_done := min(err.args[0], num_tokens - 1)) <= 0:
                raise
            raise asyncio.CancelledError(self._sample(rng, num_done, marks, "abort")) from None
        return self._sample(rng, num_tokens, marks, finish_reason)

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns the constant logprob for tokens 1..T-1, without a wait."""
        return np.full(max(0, len(token_ids) - 1), _LOGPROB, np.float32)

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Switches to a version. Requests in the live slot pause for `update_s` and continue with the new
        version.

        Raises: WeightsError.
        """
        if slot not in ("live", "pinned"):
            raise WeightsError(f'slot {slot!r} does not exist; expected "live" or "pinned"')
        if snapshot.policy != self._policy:
            raise WeightsError(
                f"version {snapshot.version} of policy {snapshot.policy!r} was given to the engine of "
                f"{self._policy!r}"
            )
        if slot == "live":
            await self._update()
            for job, marks in self._marks.items():
                marks.append((self._device.tokens_done(job), snapshot.version))
        self._versions[slot] = snapshot.version

    async def pause(self) -> None:
        """Stops all requests."""
        if not self._is_paused:
            self._is_paused = True
            self._hold()

    async def resume(self) -> None:
        """Continues all requests."""
        if self._is_paused:
            self._is_paused = False
            self._release()

    def capacity(self) -> Capacity:
        """What this policy runs on the shared slots. Tokens count once their request has ended.

        Raises: ServiceError if the device has failed.
        """
        if self._clock.failure:
            raise ServiceError(f"{self._clock.failure}; the service has to be started again")
        return Capacity(
            num_slots=self._config.num_slots,
            num_running=self._device.num_running(self._policy),
            num_waiting=self._device.num_waiting(self._policy),
            max_context=self._config.max_context,
            generated_tokens=self._num_tokens,
            kv_frac=self._device.kv_frac,
            num_preemptions=self._device.num_preemptions(self._policy),
        )

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Wall-clock intervals in which its requests advanced, since the last call."""
        return self._busy.take(time.time())

    async def close(self) -> None:
        """Ends; requests that still run fail with a retryable RolloutError."""
        self._is_closed = True
        self.fail(f"the engine of {self._policy!r} was closed")

    def fail(self, problem: str) -> None:
        """Ends the requests that run with a retryable RolloutError."""
        for future in self._running.values():
            if not future.done():
                future.set_exception(RolloutError(problem))

    # --- requests ---

    async def _run(self, request: GenerateRequest, num_tokens: int, marks: list[tuple[int, int]]) -> None:
        """Waits until the request is done. `marks`: which version makes its tokens, from where on.

        If it is cancelled, the CancelledError has the number of tokens so far as its argument.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        prefill = len(request.token_ids) * self._config.prefill_cost
        context = len(request.token_ids)
        job = PacedJob(self._policy, num_tokens, prefill, ended=lambda: _resolve(done), num_context=context)
        self._clock.bring_up()
        self._running[job] = done
        if request.version < 0:
            self._marks[job] = marks
        self._device.submit(job)
        self._clock.settle()
        try:
            await done
        except asyncio.CancelledError:
            if not self._clock.failure:
                self._clock.bring_up()
            raise asyncio.CancelledError(self._device.tokens_done(job)) from None
        finally:
            del self._running[job]
            self._marks.pop(job, None)
            if job.left > 0 and not self._clock.failure:  # given up: its slot is free from now on
                self._clock.bring_up()
                self._device.remove(job)
                self._clock.settle()

    def _sample(
        self,
        rng: np.random.Generator,
        num_tokens: int,
        marks: list[tuple[int, int]],
        finish_reason: FinishReason,
    ) -> Generation:
        """A completion of random tokens, or its beginning."""
        ids = self._tokens[rng.integers(len(self._tokens), size=num_tokens)]
        if finish_reason == "stop" and self._stop_id >= 0:
            ids[-1] = self._stop_id
        self._num_tokens += num_tokens
        return Generation(
            token_ids=tuple(ids.tolist()),
            logprobs=(_LOGPROB,) * num_tokens,
            versions=_versions(marks, num_tokens),
            finish_reason=finish_reason,
        )

    def _version_for(self, request: GenerateRequest) -> int:
        if self._is_closed:
            raise RolloutError(f"the engine of {self._policy!r} was closed")
        if self._clock.failure:
            raise RolloutError(self._clock.failure)
        if request.version < 0:
            return self._versions["live"]
        if request.version not in self._versions.values():
            raise RolloutError(
                f"version {request.version} of {self._policy!r} is in no slot ({self._versions}); load it "
                "into the pinned slot first"
            )
        return request.version

    def _room(self, request: GenerateRequest) -> int:
        """Most tokens that the request may get."""
        if request.sampling.stop:
            raise RolloutError(
                "a paced engine generates random tokens and does not support stop texts", is_retryable=False
            )
        room = self._config.max_context - len(request.token_ids)
        if not request.token_ids or room < 1:
            raise RolloutError(
                f"{len(request.token_ids)} tokens of prompt; expected at least one, and fewer than "
                f"rollout.engine.max_context = {self._config.max_context}",
                is_retryable=False,
            )
        return min(request.sampling.max_tokens, room)

    def _length(self, rng: np.random.Generator, num_begun: int) -> int:
        """Number of tokens left of a completion before it is cut, at least one. Whole lengths are log-normal
        with the recipe's mean; a completion that has begun is known to be longer than its beginning."""
        mean = self._config.mean_tokens
        sigma = self._config.sigma
        for _ in range(_MAX_DRAWS):
            length = max(1, round(float(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma))))
            if length > num_begun:
                return length - num_begun
        return 1

    # --- standing still ---

    async def _update(self) -> None:
        self._hold()
        try:
            if self._config.update_s:
                await self._clock.sleep(self._config.update_s)
        finally:
            self._release()

    def _hold(self) -> None:
        self._clock.bring_up()
        self._device.hold(self._policy)
        self._clock.settle()

    def _release(self) -> None:
        self._clock.bring_up()
        self._device.release(self._policy)
        self._clock.settle()


def _resolve(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


def _versions(marks: list[tuple[int, int]], count: int) -> tuple[int, ...]:
    """The version of each of `count` tokens."""
    ends = [min(start, count) for start, _ in marks[1:]] + [count]
    return tuple(
        version for (start, version), end in zip(marks, ends, strict=True) for _ in range(start, end)
    )


# --- what can be said -----------------------------------------------------------------------------


def _vocabulary(folder: Path) -> tuple[NDArray[np.int64], int]:
    """Ids of plain tokens, and the id that ends a completion (-1: none). Raises: DataError."""
    config = _json(folder / "config.json")
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise DataError(f"{folder / 'config.json'}: vocab_size = {size!r}; expected a positive integer")
    stop_ids = folder_stop_ids(folder)
    tokenizer = folder / "tokenizer.json"
    added = [e["id"] for e in _json(tokenizer).get("added_tokens", ())] if tokenizer.is_file() else []
    plain = np.setdiff1d(np.arange(size), [*stop_ids, *added])
    if not len(plain):
        raise DataError(f"{folder}: none of the {size} tokens is a plain one")
    return plain, stop_ids[0] if stop_ids else -1


def _json(path: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as err:
        raise DataError(f"{path} cannot be read: {err}") from err
