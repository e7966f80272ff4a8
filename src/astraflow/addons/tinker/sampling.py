"""Samples with saved weights on an engine in this process.

    caller's threads                     sampling thread (one event loop; the engine's)
    sample / compute_logprobs / load --> engine.generate / score / load; futures come back

The engine holds only the weights that were loaded last. A client refuses to sample after other weights than
its own have been loaded.
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

__all__ = ["ApiFuture", "EngineSampler", "SamplingClient"]

_ResultT = TypeVar("_ResultT")


class ApiFuture(Generic[_ResultT]):
    """The future that a verb returns at once. Await it, or call `result`, to get the verb's result."""

    def __init__(self, future: "Future[_ResultT]") -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> _ResultT:
        """Waits for the result.

        Raises: the error of the verb; TimeoutError after `timeout` seconds.
        """
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> _ResultT:
        """Does the same as `result` without blocking the event loop."""
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(self._future)

    def __await__(self) -> Generator[Any, None, _ResultT]:
        return self.result_async().__await__()


class EngineSampler:
    """An engine and its event loop, in their own thread. Both start when the first weights are loaded."""

    def __init__(self, make_engine: Callable[[WeightSnapshot], Engine]) -> None:
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True)
        self._seeds = itertools.count()
        """Seeds for requests without one. Each request gets a different seed."""

    def load(self, snapshot: WeightSnapshot) -> None:
        """Makes the engine serve these weights.

        Raises: ConfigError, DataError, or WeightsError if it cannot serve them.
        """
        if self._engine is None:
            self._engine = self._make_engine(snapshot)
            self._thread.start()
        self.submit(self._engine.load(snapshot, slot="live")).result()

    def submit(self, coroutine: "Coroutine[Any, Any, _ResultT]") -> "Future[_ResultT]":
        """Runs a coroutine in the sampling thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Ends the engine and the thread. Requests that are still running fail."""
        if self._engine is not None:
            self.submit(self._engine.close()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def sample(
        self, prompt: Sequence[int], num_samples: int, params: SamplingParams, version: int
    ) -> list[SampledSequence]:
        """Samples completions with exactly this version.

        Raises: RolloutError, for example if a newer version was loaded; ConfigError for settings that the
        engine doesn't support.
        """
        assert self._engine is not None
        first = params.seed
        # The samples of one call must differ, so a given seed is for the first one, and the others count up.
        seeds = [next(self._seeds) if first is None else first + idx for idx in range(num_samples)]
        requests = [
            GenerateRequest(token_ids=tuple(prompt), sampling=_sampling(params, seed), version=version)
            for seed in seeds
        ]
        generations = await asyncio.gather(*map(self._engine.generate, requests))
        return [SampledSequence(g.finish_reason, list(g.token_ids), list(g.logprobs)) for g in generations]

    async def score(self, prompt: Sequence[int]) -> list[float | None]:
        """Returns the logprobs of a prompt's tokens under the newest version; None for the first token."""
        assert self._engine is not None
        return [None, *(await self._engine.score(prompt)).tolist()]


def _sampling(params: SamplingParams, seed: int) -> Sampling:
    """Returns the engine's settings for one completion.

    Raises: ConfigError if `stop` contains a token id.
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
        top_k=max(params.top_k, 0),  # all tokens are -1 in the API, and 0 in the engine
        max_tokens=params.max_tokens,
        stop=stop,
        seed=seed,
    )


class SamplingClient:
    """Samples with the weights that it was made for, until newer weights are loaded for another client.

    Example: `client.sample(prompt, num_samples=4, sampling_params=SamplingParams(max_tokens=20)).result()`.
    """

    def __init__(self, sampler: EngineSampler, version: int) -> None:
        self._sampler = sampler
        self._version = version

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> ApiFuture[SampleResponse]:
        """Samples completions of a prompt, with their logprobs at the sampling temperature."""

        async def run() -> SampleResponse:
            ids = prompt.to_ints()
            sequences = await self._sampler.sample(ids, num_samples, sampling_params, self._version)
            return SampleResponse(
                sequences, await self._sampler.score(ids) if include_prompt_logprobs else None
            )

        return ApiFuture(self._sampler.submit(run()))

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> SampleResponse:
        """Does the same as `sample`, and waits for the completions."""
        return await self.sample(prompt, num_samples, sampling_params, include_prompt_logprobs)

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        """Computes the logprobs of a prompt's tokens at temperature 1; None for the first token."""
        return ApiFuture(self._sampler.submit(self._sampler.score(prompt.to_ints())))
