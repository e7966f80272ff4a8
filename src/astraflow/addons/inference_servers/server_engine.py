"""The engine whose model runs in a separate server: vLLM or SGLang.

Each of the two weight slots is a `PolicyServer`: one server and the version of the weights that it serves.
The live server starts with the engine. The pinned server starts when evaluation first needs it, and then
stays.

Requests to a server pass through a door. It is closed while the server starts, is paused, or takes new
weights; requests then wait in this process. Only `PolicyServer.update` changes the version. Requests for
exactly one version hold that version: an update waits until they have ended. If a server dies, its running
requests fail and may be retried.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow.addons.inference_servers.config import KEPT_KV, ServerEngineConfig, keeps_cache
from astraflow.addons.inference_servers.server_api import (
    CompletionPart,
    Gauges,
    ServerApi,
    ServerHttp,
    check_scoring,
)
from astraflow.addons.inference_servers.server_life import ServerLife, ServingState
from astraflow.addons.inference_servers.vllm_api import VllmApi
from astraflow.addons.inference_servers.weights_folder import WeightsFolder
from astraflow.errors import (
    ConfigError,
    DataError,
    Error,
    RefusedError,
    RolloutError,
    ServiceError,
    UnavailableError,
    WeightsError,
)
from astraflow.protocols import Capacity, SlotName, TokenScores
from astraflow.rollout.engines.requests import check_sampling, check_tokens, stop_ids_below
from astraflow.rollout.engines.spans import BusyClock
from astraflow.types import BusySpan, GenerateRequest, Generation, Stream
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["PolicyServer", "ServerEngine", "SleepingServerEngine"]

_log = logging.getLogger(__name__)

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
"""Names of an input embedding."""
_HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of an output head that is a separate tensor."""


class ServerEngine:
    """Implements `Engine` for one policy. Construction starts the server and needs a running event loop.

    Call `close` at the end.
    Example::

        engine = ServerEngine(VllmApi(), VllmEngineConfig(), snapshot)
        await engine.load(snapshot, slot="live")  # returns once the server serves
        generation = await engine.generate(GenerateRequest(token_ids=(5, 6), sampling=Sampling()))

    Raises: DataError if the model folder has no vocabulary size.
    """

    def __init__(self, api: ServerApi, config: ServerEngineConfig, snapshot: WeightSnapshot) -> None:
        config = config.for_policy(snapshot.policy)
        self._api = api
        self._config = config
        self._policy = snapshot.policy
        self._vocab_size = _vocab_size(snapshot)
        self._clock = BusyClock("generate")
        self._num_busy = 0
        """Number of running requests in both slots. Busy time counts while there are any."""
        self.slots: dict[SlotName, PolicyServer] = {
            "live": PolicyServer(api, config, snapshot, url=config.attach.url)
        }

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns a completion: its tokens, their logprobs, and the version that generated each token.

        Raises: RolloutError, which is not retryable if the request itself is at fault.
        """
        if request.media and self._api.blindness:
            raise RolloutError(
                f"the engine of {self._policy!r}: {self._api.name} is not sent images: "
                f"{self._api.blindness}; generate with rollout.engine.name torch or vllm "
                "(docs/models.md#images)",
                is_retryable=False,
            )
        sampling = request.sampling
        num_prompt = len(request.token_ids)
        check_sampling(sampling)
        self._check_tokens(request.token_ids, num_prompt + 1)
        slot = self._slot_for(request.version)
        self._num_busy += 1
        self._clock.start(time.time())
        try:
            max_tokens = min(sampling.max_tokens, self._config.context - num_prompt)
            return await slot.generate(request, max_tokens=max_tokens)
        finally:
            self._num_busy -= 1
            if not self._num_busy:
                self._clock.stop(time.time())

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns logprobs [T - 1] of tokens 1..T-1 at temperature 1 under the newest version. Raises:
        RolloutError."""
        return (await self.score_top(token_ids, 0)).logprobs

    async def score_top(self, token_ids: Sequence[int], num: int, *, temperature: float = 1.0) -> TokenScores:
        """Scores tokens 1..T-1, with the `num` most likely ones in place of each. Raises: RolloutError."""
        check_scoring(temperature)
        self._check_tokens(token_ids, len(token_ids) + 1)  # the server generates one more token
        return await self.slots["live"].score(token_ids, num)

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version in slot `live` or `pinned`.

        In the live slot, running requests for the newest version continue with the new weights. The call
        waits until the server has started, and until requests for exactly the slot's current version have
        ended.

        Raises: WeightsError if the version can't be installed, in which case the old one keeps serving;
        ConfigError or ServiceError if the server is gone for good.
        """
        if slot not in ("live", "pinned"):
            raise WeightsError(f'slot {slot!r} does not exist; expected "live" or "pinned"')
        if snapshot.policy != self._policy:
            raise WeightsError(
                f"version {snapshot.version} of policy {snapshot.policy!r} was given to the engine of "
                f"{self._policy!r}"
            )
        name: SlotName = "live" if slot == "live" else "pinned"
        if name not in self.slots:
            self.slots[name] = self._second_server(snapshot)
        await self.slots[name].update(snapshot)

    async def pause(self) -> None:
        """Stops generation but keeps the requests."""
        for slot in self.slots.values():
            await slot.pause()

    async def resume(self) -> None:
        """Resumes generation."""
        for slot in self.slots.values():
            await slot.resume()

    def capacity(self) -> Capacity:
        """Returns the metrics that the servers last reported; they are polled every second.

        Raises: the failure of a server that is gone for good, e.g. ServiceError.
        """
        for slot in self.slots.values():
            # A RolloutError means that the slot was closed on purpose.
            if slot.failure is not None and not isinstance(slot.failure, RolloutError):
                raise slot.failure
        # A small server for evaluation is often full, which must not hold back training.
        counted = [self.slots["live"]] if self._config.eval_share else self.slots.values()
        gauges = [slot.gauges for slot in counted]
        return Capacity(
            num_slots=self._config.slots,
            num_running=sum(gauge.num_running for gauge in gauges),
            num_waiting=sum(gauge.num_waiting for gauge in gauges),
            max_context=self._config.context,
            generated_tokens=sum(gauge.generated_tokens for gauge in gauges),
            kv_frac=max(gauge.kv_frac or 0.0 for gauge in gauges),
            num_preemptions=sum(gauge.num_preemptions for gauge in gauges),
        )

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Returns the wall-clock intervals in which requests ran since the last call."""
        return self._clock.take(time.time())

    async def close(self) -> None:
        """Ends the servers. Requests that still run fail with a retryable RolloutError."""
        for slot in self.slots.values():
            await slot.close()

    def _second_server(self, snapshot: WeightSnapshot) -> "PolicyServer":
        attach = self._config.attach
        if attach.url and not attach.pinned_url:
            raise ConfigError(
                "evaluation needs a second server: name it in rollout.engine.attach.pinned_url, or leave "
                "eval.sets out and evaluate with `astraflow eval`"
            )
        return PolicyServer(self._api, self._config.for_evaluation(), snapshot, url=attach.pinned_url)

    def _slot_for(self, version: int) -> "PolicyServer":
        """Returns the slot that serves a request for a version; -1 means the newest.

        Raises: RolloutError if no slot has the version, or if the slots that have it are about to change.
        """
        if version < 0:
            return self.slots["live"]
        slots = [slot for slot in self.slots.values() if slot.version == version and not slot.is_changing]
        if slots:
            # The pinned slot comes last. Unless it is still starting, it is preferred, because a request that
            # holds its version doesn't delay the next live version.
            return next((slot for slot in reversed(slots) if slot.is_ready), slots[-1])
        served = ", ".join(f"{name}: {slot.version}" for name, slot in self.slots.items())
        raise RolloutError(
            f"version {version} of {self._policy!r} is in no slot ({served}); load it into the pinned slot "
            "first"
        )

    def _check_tokens(self, token_ids: Sequence[int], num_needed: int) -> None:
        check_tokens(
            token_ids,
            num_needed=num_needed,
            max_context=self._config.context,
            vocab_size=self._vocab_size,
        )


class PolicyServer:
    """A server for one policy, and the version that it serves. Construction needs a running event loop.

    `url` is the address of a running server; if empty, one is started. `version` is the snapshot's version
    from the beginning, but requests wait until the server has started. Call `close` at the end.
    """

    def __init__(
        self, api: ServerApi, config: ServerEngineConfig, snapshot: WeightSnapshot, *, url: str
    ) -> None:
        self.version = snapshot.version
        self.is_changing = False
        """True while an update waits for requests that hold the version, or is in progress."""
        self._api = api
        self._folder = WeightsFolder(
            f"{api.name}-{snapshot.policy}", snapshot, parent=config.attach.weights_dir
        )
        self._is_tied = _is_tied(snapshot)
        self._keeps_cache = keeps_cache(config)
        self._id = secrets.token_hex(4)
        """Prefix of the labels of weights that this slot loaded, to distinguish them from other weights."""
        self._served = ServingState()
        self._life = ServerLife(
            api,
            config,
            self._served,
            name=f"the {api.name} server of {snapshot.policy!r}",
            url=url,
            folder=self._folder.path,
            changed=self._set_door,
        )
        self._door = asyncio.Event()
        """Set while requests may be sent, and permanently after the server has failed."""
        self._unheld = asyncio.Event()
        """Set while no requests hold the version."""
        self._unheld.set()
        self._is_swapping = False
        """True while the weights are being replaced and the door is therefore closed."""
        self._stop_ids: tuple[int, ...] = ()
        self._num_holders = 0
        self._num_held_back = 0
        """Number of requests that wait at the door."""
        self._num_cuts = 0
        """How often all requests were cut off."""
        self._task = asyncio.get_running_loop().create_task(self._run(snapshot), name=self._life.name)

    @property
    def failure(self) -> Error | None:
        """Why the server is gone for good; None unless it is."""
        return self._life.failure

    @property
    def is_ready(self) -> bool:
        """True while requests can pass the door without waiting."""
        return self._door.is_set()

    @property
    def gauges(self) -> Gauges:
        """The server's own metrics, plus the requests that wait at the door."""
        now = self._life.gauges
        return replace(now, num_waiting=now.num_waiting + self._num_held_back)

    async def generate(self, request: GenerateRequest, *, max_tokens: int) -> Generation:
        """Returns a completion. If the server aborts a request for an update, the rest is a new request. If
        `cut` aborts it, its beginning is the result.

        Raises: RolloutError.
        """
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        is_old: list[bool] = []
        num_cuts = self._num_cuts
        with self._holding(request):
            while True:
                part, sent = await self._part(request, tuple(tokens), max_tokens - len(tokens))
                tokens += part.token_ids
                logprobs += part.logprobs
                own = self._versions(part)
                versions += own
                # vLLM may have computed their context before the version that sampled them came.
                is_old += [version != sent for version in own]
                is_whole = part.end != "abort" or len(tokens) >= max_tokens
                if is_whole or self._num_cuts > num_cuts:
                    break
        self._life.note_work()
        finish_reason = "abort"
        if is_whole:
            finish_reason = "stop" if part.end == "stop" else "length"
        return Generation(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finish_reason=finish_reason,
            streams=(Stream(name=KEPT_KV, dtype="uint8", data=bytes(is_old)),) if self._keeps_cache else (),
        )

    async def score(self, token_ids: Sequence[int], num: int) -> TokenScores:
        """Scores tokens 1..T-1, with the `num` most likely ones in place of each. Raises: RolloutError."""
        http = await self._enter()
        try:
            return await self._api.score(http, token_ids, num)
        except (UnavailableError, RefusedError) as err:
            raise await self._life.explained(err) from err

    async def update(self, snapshot: WeightSnapshot) -> None:
        """Switches to another version, with which running requests continue.

        Raises: WeightsError if the version can't be installed, in which case the old one keeps serving;
        ConfigError if the server can't take new weights at all.
        """
        async with self._served.lock:
            http = await self._life.serving()
            if snapshot.version == self.version:
                return
            if why := await self._why_frozen(http):
                raise ConfigError(f"{self._life.name}: {why}")
            model = await asyncio.to_thread(self._folder.write, snapshot)
            self.is_changing = True
            try:
                await self._unheld.wait()
                # Ask again, because the server may have restarted during the wait.
                http = await self._life.serving()
                await self._swap(http, model, snapshot.version)
            finally:
                self.is_changing = False

    async def pause(self) -> None:
        """Stops generation. A server that restarts stays paused."""
        async with self._served.lock:
            self._served.is_paused = True
            self._set_door()
            await self._api.pause(await self._life.serving())

    async def resume(self) -> None:
        """Resumes generation."""
        async with self._served.lock:
            await self._api.resume(await self._life.serving())
            self._served.is_paused = False
            self._set_door()

    async def cut(self, api: VllmApi) -> None:
        """Stops generation, and ends all requests with what they have."""
        async with self._served.lock:
            self._num_cuts += 1
            self._served.is_paused = True
            self._set_door()
            await api.cut(await self._life.serving())

    async def sleep(self, api: VllmApi) -> None:
        """Frees the server's GPU until `wake`. A server that restarts meanwhile takes its memory again."""
        async with self._served.lock:
            self._served.is_paused = True
            self._set_door()
            http = await self._life.serving()
            await api.pause(http)
            await api.sleep(http)

    async def wake(self, api: VllmApi) -> None:
        """Generates again."""
        async with self._served.lock:
            http = await self._life.serving()
            await api.wake(http)
            await api.resume(http)
            self._served.is_paused = False
            self._set_door()

    async def close(self) -> None:
        """Ends a server that was started here. A server at `url` continues to serve its weights."""
        self._life.fail(RolloutError(f"{self._life.name} was closed"))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._life.end()
        await asyncio.to_thread(self._folder.remove)

    async def _run(self, first: WeightSnapshot) -> None:
        """Writes the first version, then keeps a server alive that serves what `_served` specifies."""
        try:
            self._stop_ids = await asyncio.to_thread(_stop_ids, first)
            self._served.model = await asyncio.to_thread(self._folder.write, first)
        except (WeightsError, DataError) as err:
            self._life.fail(err)
            return
        except Exception as err:  # noqa: BLE001 - nothing awaits this task, so tell the waiting requests
            self._life.fail(ServiceError(f"{self._life.name} failed: {type(err).__name__}: {err}"))
            return
        self._served.label = self._label(self.version)
        del first  # this task runs for a long time, and the receiver waits for the snapshot's memory
        await self._life.run()

    # --- requests -----------------------------------------------------------------------------------

    async def _part(
        self, request: GenerateRequest, tokens: tuple[int, ...], max_tokens: int
    ) -> tuple[CompletionPart, int]:
        """Returns the result of one request, and the version that was served when it was sent.

        A part whose version is uncertain is generated again.

        Raises: RolloutError.
        """
        while True:
            http = await self._enter()
            sent = self.version
            label = self._label(sent)
            try:
                part = await self._api.generate(
                    http,
                    request.token_ids + tokens,
                    request.sampling,
                    max_tokens=max_tokens,
                    media=request.media,
                    stop_ids=self._stop_ids,
                    label=label,
                )
            except (UnavailableError, RefusedError) as err:
                raise await self._life.explained(err) from err
            # An inexact label is the label at the time of the answer. If it is still the one at the time of
            # the request, there was no update in between, so all tokens have this version.
            if self._api.is_label_exact or all(span.label == label for span in part.labels):
                return part, sent

    async def _enter(self) -> ServerHttp:
        """Waits at the door, and returns the connection to the server once requests may be sent.

        Raises: RolloutError.
        """
        self._num_held_back += 1
        try:
            await self._life.within_start(self._door, "take requests")
            return self._life.http
        except RolloutError:
            raise
        except Error as err:
            raise RolloutError(str(err)) from err
        finally:
            self._num_held_back -= 1

    @contextlib.contextmanager
    def _holding(self, request: GenerateRequest) -> Generator[None]:
        """Holds the version while a request for exactly this version runs. Other requests don't hold it."""
        is_holder = request.version >= 0
        self._num_holders += is_holder
        if is_holder:
            self._unheld.clear()
        try:
            yield
        finally:
            self._num_holders -= is_holder
            if not self._num_holders:
                self._unheld.set()

    def _versions(self, part: CompletionPart) -> list[int]:
        """Returns the version of each token of a part.

        Raises: RolloutError if a token's version is unknown.
        """
        versions: list[int] = []
        for span in part.labels:
            owner, _, version = span.label.rpartition("-")
            if owner != self._id or span.start != len(versions):
                raise RolloutError(
                    f"{self._life.name} generated with weights {span.label!r}, which this engine did not "
                    "load; does something else update this server?"
                )
            versions += [int(version)] * (span.end - span.start)
        if not len(versions) == len(part.token_ids) == len(part.logprobs):
            raise RolloutError(
                f"{self._life.name}: {len(versions)} versions and {len(part.logprobs)} logprobs for "
                f"{len(part.token_ids)} tokens"
            )
        return versions

    def _set_door(self) -> None:
        """Opens or closes the door. After a failure, it opens for good, so that waiting requests fail."""
        is_open = self._life.ready.is_set() and not self._served.is_paused and not self._is_swapping
        if is_open or self._life.failure is not None:
            self._door.set()
        else:
            self._door.clear()

    # --- weights ------------------------------------------------------------------------------------

    def _label(self, version: int) -> str:
        return f"{self._id}-{version}"

    async def _why_frozen(self, http: ServerHttp) -> str:
        try:
            return await self._api.why_frozen(http, is_tied=self._is_tied)
        except (UnavailableError, RefusedError) as err:
            raise WeightsError(f"{self._life.name}: {err}") from err

    async def _swap(self, http: ServerHttp, model: Path, version: int) -> None:
        """Pauses the server, replaces its weights, and resumes it.

        After any failure, including a cancellation, the server's weights are unknown. The server is therefore
        restarted with what `_served` specifies.
        Raises: WeightsError.
        """
        self._is_swapping = True
        self._set_door()
        started_s = time.monotonic()
        is_done = False
        try:
            await self._api.pause(http)
            await self._api.update(http, model, self._label(version), keeps_cache=self._keeps_cache)
            self.version = version
            self._served.model = model
            self._served.label = self._label(version)
            if not self._served.is_paused:
                await self._api.resume(http)
            is_done = True
        except (UnavailableError, RefusedError) as err:
            raise WeightsError(
                f"{self._life.name} did not take version {version} and starts again with "
                f"{self.version}: {err}"
            ) from err
        finally:
            if not is_done:
                self._life.distrust()
            self._is_swapping = False
            self._set_door()
        _log.info("%s took version %d in %.3f s", self._life.name, version, time.monotonic() - started_s)
        await asyncio.to_thread(self._folder.keep_only, model)


class SleepingServerEngine(ServerEngine):
    """Also implements `SleepingEngine` of the add-on `lending`.

    Example: see `ServerEngine`; then `await engine.sleep()`.
    """

    def __init__(self, api: VllmApi, config: ServerEngineConfig, snapshot: WeightSnapshot) -> None:
        super().__init__(api, config, snapshot)
        self._sleeping_api = api

    async def cut(self) -> None:
        """Ends all requests now, with the finish reason `abort`."""
        for slot in self.slots.values():
            await slot.cut(self._sleeping_api)

    async def sleep(self) -> None:
        """Frees the memory of the GPU. Raises: UnavailableError or RefusedError if a server doesn't sleep."""
        for slot in self.slots.values():
            await slot.sleep(self._sleeping_api)

    async def wake(self) -> None:
        """Generates again. Raises: UnavailableError or RefusedError if a server doesn't wake up."""
        for slot in self.slots.values():
            await slot.wake(self._sleeping_api)


def _vocab_size(snapshot: WeightSnapshot) -> int:
    path = snapshot.model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        # Folders of the hub omit defaults of their family, so the embedding may be all that tells.
        rows = [tensor.shape[0] for tensor in snapshot.tensors if tensor.name.endswith(_EMBEDDING)]
        return int(config.get("vocab_size") or config["text_config"].get("vocab_size") or rows[0])
    except (OSError, ValueError, LookupError, TypeError) as err:
        raise DataError(f"{path} names no vocab_size: {type(err).__name__}: {err}") from err


def _stop_ids(snapshot: WeightSnapshot) -> tuple[int, ...]:
    """Returns the tokens that end a completion. Blocks while the tokenizer is loaded. Raises: DataError."""
    return tuple(sorted(stop_ids_below(_vocab_size(snapshot), snapshot.model_dir)))


def _is_tied(snapshot: WeightSnapshot) -> bool:
    """Checks whether the model's output head is its embedding, by its config or else its tensors' names."""
    config = json.loads((snapshot.model_dir / "config.json").read_text(encoding="utf-8"))
    for section in (config, config.get("text_config", {})):
        if "tie_word_embeddings" in section:
            return bool(section["tie_word_embeddings"])
    return not any(tensor.name.endswith(_HEADS) for tensor in snapshot.tensors)
