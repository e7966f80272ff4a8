"""Samples with saved weights, on an engine in this process.

    caller's threads                     sampling thread (one event loop; the engine's)
    sample / compute_logprobs / load --> engine.generate / score / load; futures come back

The engine holds only the weights that were loaded last. A client refuses to sample once these are no longer
the weights that it was made for.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from astraflow.addons.tinker.wire_types import (
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)
from astraflow.errors import ConfigError
from astraflow.protocols import Engine
from astraflow.types import GenerateRequest, Sampling
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["ApiFuture", "Sampler", "SamplingClient"]

_ResultT = TypeVar("_ResultT")


class ApiFuture(Generic[_ResultT]):
    """What a verb returns at once; its result comes later. It can be awaited, or asked by `result`."""

    def __init__(self, future: "Future[_ResultT]") -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> _ResultT:
        """Waits for the result.

        Raises: whatever the verb failed with; TimeoutError after `timeout` seconds.
        """
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> _ResultT:
        """Waits for the result without blocking the event loop; otherwise the same as `result`."""
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(self._future)

    def __await__(self) -> Generator[Any, None, _ResultT]:
        return self.result_async().__await__()


class Sampler:
    """An engine and its event loop, in a thread of its own. Both begin with the first weights."""

    def __init__(self, make_engine: Callable[[WeightSnapshot], Engine]) -> None:
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True)
        self._seeds = itertools.count()
        """Seeds for requests that name none: each gets another one."""

    def load(self, snapshot: WeightSnapshot) -> None:
        """Makes the engine serve these weights.

        Raises: ConfigError, DataError or WeightsError if it cannot.
        """
        if self._engine is None:
            self._engine = self._make_engine(snapshot)
            self._thread.start()
        self.submit(self._engine.load(snapshot, slot="live")).result()

    def submit(self, coroutine: "Coroutine[Any, Any, _ResultT]") -> "Future[_ResultT]":
        """Runs a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Ends the engine and the thread; requests that still run fail."""
        if self._engine is not None:
            self.submit(self._engine.close()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def sample(
        self, prompt: Sequence[int], num_samples: int, params: SamplingParams, version: int
    ) -> list[SampledSequence]:
        """Samples completions with exactly this version.

        Raises: RolloutError, e.g. if a newer version was loaded; ConfigError for settings it does not know.
        """
        assert self._engine is not None
        first = params.seed
        # The samples of one call must differ, so a given seed is that of the first.
        seeds = [next(self._seeds) if first is None else first + idx for idx in range(num_samples)]
        requests = [
            GenerateRequest(token_ids=tuple(prompt), sampling=_sampling(params, seed), version=version)
            for seed in seeds
        ]
        generations = await asyncio.gather(*map(self._engine.generate, requests))
        return [SampledSequence(g.finish_reason, list(g.token_ids), list(g.logprobs)) for g in generations]

    async def score(self, prompt: Sequence[int]) -> list[float | None]:
        """Logprobs of a prompt's tokens under the newest version; the first token has None."""
        assert self._engine is not None
        return [None, *(await self._engine.score(prompt)).tolist()]


def _sampling(params: SamplingParams, seed: int) -> Sampling:
    """The engine's settings for one completion.

    Raises: ConfigError if a token id is to end it.
    """
    given = (params.stop,) if isinstance(params.stop, str) else params.stop or ()
    stop = tuple(text for text in given if isinstance(text, str))
    if len(stop) != len(given):
        raise ConfigError(
            f"stop = {params.stop!r}: the engine ends at the model's own end tokens anyway; name only texts"
        )
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),  # the API's -1 keeps all; the engine's 0 does
        max_tokens=params.max_tokens,
        stop=stop,
        seed=seed,
    )


class SamplingClient:
    """Samples with the weights that it was made for, until newer ones are loaded for another client.

    Example: `client.sample(prompt, num_samples=4, sampling_params=SamplingParams(max_tokens=20)).result()`.
    """

    def __init__(self, sampler: Sampler, version: int) -> None:
        self._sampler = sampler
        self._version = version

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> ApiFuture[SampleResponse]:
        """Completions of a prompt, with their logprobs at the sampling temperature."""

        async def run() -> SampleResponse:
            ids = prompt.to_ints()
            found = await self._sampler.sample(ids, num_samples, sampling_params, self._version)
            return SampleResponse(found, await self._sampler.score(ids) if include_prompt_logprobs else None)

        return ApiFuture(self._sampler.submit(run()))

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> SampleResponse:
        """Samples as `sample` does, and waits for the completions."""
        return await self.sample(prompt, num_samples, sampling_params, include_prompt_logprobs)

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        """Logprobs of a prompt's tokens at temperature 1; the first token has None."""
        return ApiFuture(self._sampler.submit(self._sampler.score(prompt.to_ints())))
