"""The embedded engine: continuous batching of Hugging Face causal language models on a CPU or one GPU.

    event loop                                    stepping thread (owns models, caches, lanes)
    generate / score / load / pause  --inbox-->   run commands; while there is work and no pause: step lanes
    futures  <--call_soon_threadsafe--            results of the step; idle on a condition without work

After construction, nothing outside the thread touches a model, except to read shapes. `lanes` decides which
lane serves a request. If the thread crashes or hangs, every open request and every later call fails with the
cause. `capacity`, which notices that it hangs, raises it too, which ends the rollout service.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow.errors import ConfigError, Error, ImageError, RolloutError, ServiceError, WeightsError
from astraflow.models.images import check_media
from astraflow.models.loading import FittedTensors, fit_tensors
from astraflow.protocols import Capacity, SlotName, TokenScores
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.jobs import Job
from astraflow.rollout.engines.lanes import Lanes, LoadedModel
from astraflow.rollout.engines.requests import (
    StopText,
    TokenDecoder,
    check_sampling,
    check_tokens,
    load_decoder,
)
from astraflow.rollout.engines.spans import BusyClock
from astraflow.types import BusySpan, GenerateRequest, Generation
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.threads import off_loop

__all__ = ["TorchEngine"]

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0
"""Time limit for closing. A step or a load in progress ends first, and both take seconds."""
_HANG_S = 1800.0
"""A thread hangs if it isn't idle and ends no model call for this long. A call for 16,000 tokens of a model
with a billion parameters takes 27 minutes on a core with 20 GFLOP/s."""
_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True)
class _Command:
    """A function that the thread runs between two steps. `future`, if given, gets its result or its error."""

    run: Callable[[], object]
    future: "asyncio.Future[Any] | None" = None
    slot: str = ""
    """The slot that the command changes; empty if none. The command waits until no request holds it."""


class TorchEngine:
    """Implements `Engine` over one model, for use by one event loop from construction until `close`.

    Example::

        engine = TorchEngine(TorchEngineConfig(num_slots=64), snapshot)
        generation = await engine.generate(GenerateRequest(token_ids=(5, 6), sampling=Sampling()))
        await engine.load(newer_snapshot, slot="live")
        await engine.close()

    Raises: DataError, WeightsError, or ConfigError if the first snapshot or the device cannot be used.
    """

    def __init__(
        self,
        config: TorchEngineConfig,
        snapshot: WeightSnapshot,
        *,
        exact: bool = False,
        hang_s: float = _HANG_S,
    ) -> None:
        """`exact`: the engine's logprobs are bitwise equal to those of an exact trainer. `hang_s`: how long
        the thread may show no progress."""
        self._config = config
        self._hang_s = hang_s
        self._policy = snapshot.policy
        self._model_dir: Path = snapshot.model_dir
        _set_up_device(config)
        try:
            self.lanes = self.make_lanes(snapshot, exact=exact)
        except MemoryError as err:
            raise ConfigError(f"the engine of {snapshot.policy!r} cannot start: {err}") from err
        """Owned by the thread. Others may use them while the engine is paused and has no requests."""
        self._vocab_size = self.lanes.live.lane.vocab_size
        self._decoder: TokenDecoder | None = None
        self._clock = BusyClock("generate")
        self._is_idle = False
        self._num_turns = 0
        """Number of turns of the thread's loop."""
        self._progress: tuple[int, ...] = ()
        self._progress_s = 0.0
        """The last progress of the thread that `capacity` saw, and when it saw it first."""
        self._open: set[asyncio.Future[Any]] = set()
        """What callers wait for."""
        self._wake = threading.Condition()
        self._inbox: deque[_Command | Job] = deque()
        self._end: str | None = None
        """Why the engine accepts no more requests. Guarded by `_wake`."""
        self._has_failed = False
        """Whether an error ended the thread. Guarded by `_wake`."""
        self._is_closing = False
        self._is_paused = False
        self._changes: dict[str, _Command] = {}
        """Changes that wait until their slot is not held. At most one per slot, because of `_load_locks`."""
        self._results: list[tuple[asyncio.Future[Any], object]] = []
        """Outcomes for the next delivery."""
        self.num_patched = 0
        """Number of versions that were installed by writing only the changes since the previous version."""
        self._load_locks: dict[SlotName, asyncio.Lock] = {"live": asyncio.Lock(), "pinned": asyncio.Lock()}
        self._thread = threading.Thread(target=self._work, name=f"engine-{self._policy}", daemon=True)
        self._thread.start()

    def make_lanes(self, snapshot: WeightSnapshot, *, exact: bool) -> Lanes:
        """Makes the lanes. Called once, by the constructor. Raises: like the constructor, or MemoryError."""
        return Lanes(self._config, snapshot, exact=exact)

    # --- called from the event loop ---------------------------------------------------------------

    async def generate(self, request: GenerateRequest, *, policy: str = "") -> Generation:
        """Generates a completion: its tokens, their logprobs, and the version that generated each token.

        `policy`: whose request it is, if several policies share the engine.
        Raises: RolloutError, which is not retryable if the request itself is at fault. A CancelledError has
        the tokens so far.
        """
        decoder = await self._stop_decoder() if request.sampling.stop else None
        future = self._future()
        job = self._job(request, future, decoder)
        job.policy = policy
        self._post(job)
        try:
            return await future
        except asyncio.CancelledError as err:
            with contextlib.suppress(RolloutError):  # an engine that has ended has already dropped the job
                begun = await self.call(partial(self.lanes.drop, job))
                err.args = () if begun is None else (begun,)
            raise

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1, from the newest version. Raises:
        RolloutError."""
        self._check_tokens(token_ids, len(token_ids))
        return await self.call(lambda: self.lanes.live.lane.score(token_ids))

    async def score_top(self, token_ids: Sequence[int], num: int, *, temperature: float = 1.0) -> TokenScores:
        """Scores tokens 1..T-1, with the `num` most likely ones in place of each. Raises: RolloutError."""
        self._check_tokens(token_ids, len(token_ids))
        return await self.call(lambda: self.lanes.live.lane.score_top(token_ids, num, temperature))

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version in the slot `live` or `pinned`.

        In the live slot, running requests for the newest version continue with the new one. Requests for
        exactly the slot's current version end first. So don't await this while the engine is paused, unless
        no request holds the slot. A version that the slot already has is not loaded again, because versions
        are immutable.
        Raises: WeightsError if the version cannot be installed. The old one then keeps serving.
        """
        if slot not in ("live", "pinned"):
            raise WeightsError(f'slot {slot!r} does not exist; expected "live" or "pinned"')
        if snapshot.policy != self._policy:
            raise WeightsError(
                f"version {snapshot.version} of policy {snapshot.policy!r} was given to the engine of "
                f"{self._policy!r}"
            )
        name: SlotName = "live" if slot == "live" else "pinned"
        async with self._load_locks[name]:
            await self._load(snapshot, name)

    async def pause(self) -> None:
        """Pauses generation, and returns when no step is running. Requests are kept."""
        await self.call(partial(self._set_paused, True))

    async def resume(self) -> None:
        """Resumes generation."""
        await self.call(partial(self._set_paused, False))

    def capacity(self) -> Capacity:
        """The load of the engine. The slots of the pinned lane are extra, and not counted.

        Raises: ServiceError if the stepping thread has failed or hangs.
        """
        self._check_progress()
        with self._wake:
            if self._has_failed:
                raise ServiceError(f"{self._end}; it cannot recover and has to be restarted")
        lanes = self.lanes.lanes
        return Capacity(
            num_slots=self.lanes.num_slots,
            num_running=sum(lane.num_running for lane in lanes),
            num_waiting=sum(lane.num_waiting for lane in lanes),
            max_context=self._config.context,
            generated_tokens=sum(lane.generated_tokens for lane in lanes),
        )

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Takes the wall-clock intervals in which the engine generated since the last call."""
        return self._clock.take(time.time())

    async def close(self) -> None:
        """Ends the thread. Requests that still run fail with a retryable RolloutError."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, 0 if self._has_failed else _CLOSE_TIMEOUT_S)
        if self._thread.is_alive() and not self._has_failed:
            raise RolloutError(
                f"engine of {self._policy!r}: its thread did not end within {_CLOSE_TIMEOUT_S:.0f} s"
            )

    async def _load(self, snapshot: WeightSnapshot, name: SlotName) -> None:
        loaded = self.lanes.in_slot(name)
        if loaded is None:
            # The new model isn't in use yet, so another thread can build it while the stepping thread works.
            with _memory_for(snapshot):
                built = await asyncio.to_thread(self.lanes.build, snapshot)
            await self.call(partial(self.lanes.pin, built), slot=name)
        elif loaded.lane.version != snapshot.version:
            num_bytes = sum(tensor.data.nbytes for tensor in snapshot.tensors)
            with _memory_for(snapshot):
                weights = await off_loop(num_bytes, _fit, loaded, snapshot)
            self.num_patched += weights.is_partial
            await self.call(partial(loaded.lane.replace, weights.install, snapshot.version), slot=name)

    async def call(self, run: Callable[[], _ResultT], *, slot: str = "") -> _ResultT:
        """Runs a function in the thread, between two steps. If it changes a slot, it waits for its
        holders."""
        future = self._future()
        self._post(_Command(run, future, slot))
        return await future

    def _future(self) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def _check_progress(self) -> None:
        """Fails everything that is open, and everything that comes, if the thread hangs."""
        progress = (self._num_turns, *(lane.num_calls for lane in self.lanes.lanes))
        now_s = time.monotonic()
        if self._is_idle or progress != self._progress:
            self._progress = progress
            self._progress_s = now_s
        if self._end is not None or now_s - self._progress_s < self._hang_s:
            return
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] documented in spite of its name
        stack = traceback.format_stack(frames[self._thread.ident or 0])
        logger.critical("engine of %s hangs:\n%s", self._policy, "".join(stack))
        with self._wake:
            where = " ".join(stack[-1].split())
            self._end = f"the engine of {self._policy!r} hangs: no progress for {self._hang_s:g} s: {where}"
            self._has_failed = True
            self._is_closing = True
        _resolve([(future, RolloutError(self._end)) for future in self._open])

    def _post(self, item: "_Command | Job") -> None:
        with self._wake:
            if self._end is not None:
                raise RolloutError(self._end)
            self._inbox.append(item)
            self._wake.notify()

    async def _stop_decoder(self) -> TokenDecoder:
        if self._decoder is None:
            try:
                self._decoder = await asyncio.to_thread(load_decoder, self._model_dir)
            except (OSError, ValueError) as err:
                raise RolloutError(f"stop texts need a tokenizer: {err}", is_retryable=False) from err
        return self._decoder

    def _job(
        self, request: GenerateRequest, future: "asyncio.Future[Generation]", decoder: TokenDecoder | None
    ) -> Job:
        sampling = request.sampling
        prompt = request.token_ids
        check_sampling(sampling)
        self._check_tokens(prompt, len(prompt) + 1)
        try:
            check_media(self.lanes.images, prompt, request.media)
        except ImageError as err:
            raise RolloutError(f"the engine of {self._policy!r}: {err}", is_retryable=False) from err
        return Job(
            prompt=prompt,
            media=request.media,
            sampling=sampling,
            max_new=min(sampling.max_tokens, self._config.context - len(prompt)),
            stop=None if decoder is None else StopText(sampling.stop, decoder),
            resolve=partial(self._answer, future),
            version=request.version,
            num_begun=request.num_begun,
        )

    def _check_tokens(self, token_ids: Sequence[int], num_needed: int) -> None:
        check_tokens(
            token_ids,
            num_needed=num_needed,
            max_context=self._config.context,
            vocab_size=self._vocab_size,
        )

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        end = f"the engine of {self._policy!r} was closed"
        has_failed = False
        try:
            torch.set_num_threads(self._config.num_threads)
            with torch.inference_mode():
                while self._take():
                    self._step()
        except BaseException as err:  # every error that ends the thread must reach the waiting callers
            logger.exception("engine of %s failed", self._policy)
            end = f"the engine of {self._policy!r} failed: {type(err).__name__}: {err}"
            has_failed = True
        self._clock.stop(time.time())
        self._shut(end, has_failed=has_failed)

    def _take(self) -> bool:
        """Waits for work, then accepts requests and runs commands.

        Returns: False if the engine is closing.
        """
        is_idle = self._is_paused or not any(lane.has_work for lane in self.lanes.lanes)
        if is_idle:
            self._clock.stop(time.time())
        with self._wake:
            # If a waiting change can be made now, the thread must not sleep: nothing would wake it up.
            if is_idle and not self._free_slots():
                self._is_idle = True
                self._wake.wait_for(lambda: self._inbox or self._is_closing)
            self._num_turns += 1
            self._is_idle = False
            if self._is_closing:
                return False
        # No lock is needed: only this thread removes items, and the methods of a deque are atomic.
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Job):
                self._submit(item)
            elif item.slot:
                self._changes[item.slot] = item
            else:
                self._run(item)
        for name in self._free_slots():
            self._run(self._changes.pop(name))
        return True

    def _free_slots(self) -> list[str]:
        """The slots whose waiting change can be made now."""
        return [name for name in self._changes if not self.lanes.is_held(name)]

    def _step(self) -> None:
        if not self._is_paused:
            for lane in self.lanes.lanes:
                if lane.has_work:
                    self._clock.start(time.time())
                    lane.step()
        self._deliver()

    def _run(self, command: _Command) -> None:
        try:
            self._answer(command.future, command.run())
        except Error as err:
            self._answer(command.future, err)
        except Exception as err:
            # The weights may be partly installed, so the thread must end. The caller gets its error first.
            self._answer(command.future, RolloutError(f"the engine of {self._policy!r} failed: {err}"))
            raise

    def _answer(self, future: "asyncio.Future[Any] | None", outcome: object) -> None:
        """Queues an outcome for the next delivery."""
        if future is not None:
            self._results.append((future, outcome))

    def _submit(self, job: Job) -> None:
        try:
            self.lanes.submit(job, changing=frozenset(self._changes))
        except RolloutError as err:
            job.resolve(err)

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _deliver(self) -> None:
        """Delivers results to the event loops of their callers, with one call per loop."""
        results = self._results
        self._results = []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], object]]] = {}
        for future, outcome in results:
            by_loop.setdefault(future.get_loop(), []).append((future, outcome))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, items)
            except RuntimeError:
                logger.warning("engine of %s: %d results for a closed event loop", self._policy, len(items))

    def _shut(self, end: str, *, has_failed: bool) -> None:
        """Refuses all later requests and commands, and fails those that are still open."""
        with self._wake:
            self._end = self._end or end
            self._has_failed |= has_failed
            items = [*self._inbox, *self._changes.values()]
            self._inbox.clear()
            self._changes.clear()
        jobs = [item for item in items if isinstance(item, Job)]
        for job in [*jobs, *(job for lane in self.lanes.lanes for job in lane.drain())]:
            job.resolve(RolloutError(end))
        for item in items:
            if isinstance(item, _Command):
                self._answer(item.future, RolloutError(end))
        self._deliver()


@contextlib.contextmanager
def _memory_for(snapshot: WeightSnapshot) -> Generator[None]:
    """Reports a lack of memory in the block, which must not change a slot yet.

    Raises: WeightsError if the memory of the host or the device runs out.
    """
    try:
        yield
    except RuntimeError as err:  # on a CPU, torch raises a plain RuntimeError
        if not isinstance(err, torch.OutOfMemoryError) and "allocate memory" not in str(err):
            raise
        raise WeightsError(_no_memory(snapshot, err)) from err
    except MemoryError as err:
        raise WeightsError(_no_memory(snapshot, err)) from err


def _no_memory(snapshot: WeightSnapshot, error: Exception) -> str:
    name = f"version {snapshot.version} of policy {snapshot.policy!r}"
    return f"{name}: there is not enough memory to install it: {error}"


def _fit(loaded: LoadedModel, snapshot: WeightSnapshot) -> FittedTensors:
    """Checks a snapshot against the model.

    If the changes since the model's version are known, only these are checked and installed. Nothing else may
    change the model at the same time.
    """
    changes = snapshot.changes
    is_next = changes is not None and changes.base == loaded.lane.version
    changed = changes.find() if changes is not None and is_next else None
    return fit_tensors(loaded.model, snapshot.tensors, changed=changed)


def _resolve(items: Sequence[tuple["asyncio.Future[Any]", object]]) -> None:
    for future, outcome in items:
        if future.done():  # its caller was cancelled
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _set_up_device(config: TorchEngineConfig) -> None:
    name = config.device
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise ConfigError(
            f"rollout.engine.device = {name!r} is not a device; expected cpu or cuda:0"
        ) from err
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"rollout.engine.device = {name!r}, but torch finds {count} CUDA devices here; use cpu, or "
            "install a torch build for this machine's GPU"
        )
    if device.type == "cuda" and config.gpu_share:
        torch.cuda.set_per_process_memory_fraction(config.gpu_share, device)
