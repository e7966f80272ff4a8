"""An engine that runs transformers' `model.generate`, one request at a time.

It is slow but short; a real engine batches requests. Try it: astraflow try examples/generate_engine.yaml
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow.errors import RolloutError
from astraflow.models.loading import empty_causal_lm, install_tensors
from astraflow.protocols import Capacity
from astraflow.rollout.engines.requests import stop_ids
from astraflow.types import BusySpan, GenerateRequest, Generation
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["GenerateEngine"]


class GenerateEngine:
    """Starts with the first version that it serves; `load` fills slot `live` or `pinned` between requests."""

    def __init__(self, snapshot: WeightSnapshot, *, max_context: int = 256, num_threads: int = 1) -> None:
        torch.set_num_threads(num_threads)
        self._max_context = max_context
        model = _model(snapshot)
        self._slots: dict[str, tuple[int, Any]] = {"live": (snapshot.version, model)}
        self._stop_ids = sorted(stop_ids(model, snapshot.model_dir))
        self._turn = asyncio.Lock()
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._num_waiting = self._num_tokens = 0
        self._spans: list[BusySpan] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns tokens with their logprobs and versions. Raises: RolloutError."""
        if request.sampling.stop:
            raise RolloutError("this engine does not support stop texts", is_retryable=False)
        self._num_waiting += 1
        try:
            await self._is_free.wait()
            async with self._turn:
                started_s = time.time()
                generation = await asyncio.to_thread(self._generate, request)
                self._spans.append(BusySpan("generate", started_s, time.time()))
        finally:
            self._num_waiting -= 1
        self._num_tokens += len(generation.token_ids)
        return generation

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logprobs of tokens 1..T-1 at temperature 1 under the newest version."""
        async with self._turn:
            return await asyncio.to_thread(_logprobs, self._slots["live"][1], token_ids, 1.0)

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version. The running request ends first, so no completion mixes versions."""
        async with self._turn:
            self._slots[slot] = (snapshot.version, await asyncio.to_thread(_model, snapshot))

    async def pause(self) -> None:
        """Stops starting new requests."""
        self._is_free.clear()

    async def resume(self) -> None:
        """Starts requests again."""
        self._is_free.set()

    def capacity(self) -> Capacity:
        """Reports one slot, because requests run one at a time."""
        is_running = self._turn.locked()
        return Capacity(
            1, int(is_running), self._num_waiting - is_running, self._max_context, self._num_tokens
        )

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Returns when the engine was generating since the last call."""
        spans = tuple(self._spans)
        self._spans = []
        return spans

    async def close(self) -> None:
        """Does nothing: there is no process or connection to close."""

    def _generate(self, request: GenerateRequest) -> Generation:
        version, model = self._serving(request.version)
        prompt = request.token_ids
        sampling = request.sampling
        is_greedy = sampling.temperature == 0
        torch.manual_seed(sampling.seed % 2**63)
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=min(sampling.max_tokens, self._max_context - len(prompt)),
                do_sample=not is_greedy,
                temperature=None if is_greedy else sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                eos_token_id=self._stop_ids or None,
            )
        ids = [int(token) for token in output[0]]
        logprobs = _logprobs(model, ids, sampling.temperature or 1.0)[len(prompt) - 1 :]
        return Generation(
            token_ids=tuple(ids[len(prompt) :]),
            logprobs=tuple(float(value) for value in logprobs),
            versions=(version,) * (len(ids) - len(prompt)),
            finish_reason="stop" if ids[-1] in self._stop_ids else "length",
        )

    def _serving(self, wanted: int) -> tuple[int, Any]:
        """Returns the slot that serves a version; -1 means the newest."""
        for version, model in self._slots.values():
            if wanted in {-1, version}:
                return version, model
        raise RolloutError(f"version {wanted} is not loaded")


def _model(snapshot: WeightSnapshot) -> Any:
    model = empty_causal_lm(snapshot.model_dir)
    install_tensors(model, snapshot.tensors)
    return model


@torch.inference_mode()
def _logprobs(model: Any, token_ids: Sequence[int], temperature: float) -> NDArray[np.float32]:
    """Computes logprobs in a full forward pass, at the sampling temperature and over the whole vocabulary."""
    ids = torch.tensor([list(token_ids)])
    logits = model(ids).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
