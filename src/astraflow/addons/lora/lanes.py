"""The lane of an engine that several policies share: one base, and an adapter per policy and weight slot.

A slot is named `POLICY.NUMBER/live` or `POLICY.NUMBER/pinned`, since a policy may have several views. It has
an adapter from the first version in it on. So one lane serves what would otherwise be two lanes per policy,
and its batch mixes requests of all adapters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from astraflow.addons.lora.factors import Adapters, AdapterWeights
from astraflow.errors import RolloutError
from astraflow.models.adapters import is_adapter
from astraflow.protocols import TokenScores
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.cache import CacheShape, KvCache, Stretch
from astraflow.rollout.engines.forward import Forward
from astraflow.rollout.engines.jobs import Job
from astraflow.rollout.engines.lane import Lane
from astraflow.rollout.engines.lanes import Lanes
from astraflow.types import Media
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["AdapterLanes"]


class _AdaptedForward:
    """A `Forward` that computes each row with the adapter that the cache names for it."""

    def __init__(self, inner: Forward, adapters: Adapters) -> None:
        self._inner = inner
        self._chosen = adapters.chosen

    @property
    def cache_shape(self) -> CacheShape:
        """That of the base."""
        return self._inner.cache_shape

    @property
    def vocab_size(self) -> int:
        """That of the base."""
        return self._inner.vocab_size

    def refresh(self) -> None:
        """Does nothing: a new version of an adapter changes no parameter of the base."""

    def prefill(
        self, tokens: Tensor, rows: Tensor, cache: KvCache, media: Sequence[Media] | None = None
    ) -> None:
        """Stores keys and values of prefixes [B, T] in the cache's rows."""
        self._chosen.choose(cache.adapters[rows.cpu().numpy()])
        self._inner.prefill(tokens, rows, cache, media)

    def extend(self, tokens: Tensor, stretch: Stretch, cache: KvCache) -> None:
        """Stores keys and values of tokens [B, T] that follow prefixes in the cache."""
        self._chosen.choose(cache.adapters[stretch.rows.cpu().numpy()])
        self._inner.extend(tokens, stretch, cache)

    def decode(self, tokens: Tensor, positions: NDArray[np.int64], cache: KvCache) -> Tensor:
        """One step: logits [B, V]."""
        self._chosen.choose(cache.adapters[: len(positions)])
        return self._inner.decode(tokens, positions, cache)

    def sequence_logits(self, tokens: Tensor) -> Iterator[Tensor]:
        """Logits of one sequence, with the adapter that was chosen before."""
        return self._inner.sequence_logits(tokens)


class AdapterLanes(Lanes):
    """The lane of all adapters of one base. The adapters among the first snapshot's tensors are ignored.

    Example: `lanes.install("0/live", lanes.adapters.read(tensors, "..."), version=3)`.
    """

    adapters: Adapters
    """Set when the model is built."""

    def __init__(self, config: TorchEngineConfig, snapshot: WeightSnapshot) -> None:
        plain = tuple(tensor for tensor in snapshot.tensors if not is_adapter(tensor.name))
        super().__init__(config, replace(snapshot, tensors=plain, changes=None))
        self.lane.versions.clear()
        self._numbers: dict[str, int] = {}
        """The adapter in each slot."""
        self._free: list[int] = []
        """Adapters of views that were closed."""

    @property
    def lane(self) -> Lane:
        """The only lane."""
        return self.live.lane

    def adapt(self, model: PreTrainedModel, forward: Forward) -> Forward:
        """Returns a forward that computes with adapters."""
        self.adapters = Adapters(model, forward)
        return _AdaptedForward(forward, self.adapters)

    def version_in(self, slot: str) -> int:
        """The version in a slot; -1 if there is none."""
        return self.lane.versions[self._numbers[slot]] if slot in self._numbers else -1

    def is_held(self, name: str) -> bool:
        """Whether requests for exactly the slot's version run or wait."""
        number = self._numbers.get(name)
        return any(job.version >= 0 and job.adapter == number for job in self.lane.jobs)

    def install(self, slot: str, weights: AdapterWeights, version: int) -> None:
        """Puts a version into a slot. The slot's running requests continue on it."""
        if slot in self._numbers:
            number = self._numbers[slot]
            self.lane.replace(partial(self.adapters.write, number, weights), version, number)
            return
        if self._free:
            number = self._free.pop()
            self.adapters.write(number, weights)
            self.lane.versions[number] = version
        else:
            number = self.adapters.add(weights)
            self.lane.versions.append(version)
        self._numbers[slot] = number

    def submit(self, job: Job, *, changing: frozenset[str]) -> None:
        """Queues a request with the adapter that its policy and version name.

        Raises: RolloutError (retryable) if the version is in no slot of the policy.
        """
        live, pinned = (f"{job.policy}/{name}" for name in ("live", "pinned"))
        # As in `Lanes.lane_for`, a holder of the pinned slot doesn't delay the next live version.
        exact = [slot for slot in (pinned, live) if self.version_in(slot) == job.version]
        usable = [live] if job.version < 0 else [slot for slot in exact if slot not in changing]
        if not usable or usable[0] not in self._numbers:
            raise RolloutError(
                f"version {job.version} of {_policy_of(job.policy)!r} is in no slot: live is version "
                f"{self.version_in(live)}, pinned is {self.version_in(pinned)}; load it into the pinned slot "
                "first"
            )
        job.use(self._numbers[usable[0]])
        self.lane.submit(job)

    def score(self, slot: str, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of a sequence with the adapter in a slot."""
        self.adapters.chosen.choose(np.array([self._numbers[slot]]))
        return self.lane.score(token_ids)

    def score_top(self, slot: str, token_ids: Sequence[int], num: int, temperature: float) -> TokenScores:
        """Scores a sequence with the adapter in a slot, with the `num` most likely tokens in each place."""
        self.adapters.chosen.choose(np.array([self._numbers[slot]]))
        return self.lane.score_top(token_ids, num, temperature)

    def remove(self, view: str) -> None:
        """Removes a view's adapters. Its requests fail."""
        for job in [job for job in self.lane.jobs if job.policy == view]:
            self.lane.drop(job)
            job.resolve(RolloutError(f"the engine of {_policy_of(view)!r} was closed"))
        for slot in [slot for slot in self._numbers if slot.rpartition("/")[0] == view]:
            number = self._numbers.pop(slot)
            self.lane.recompute(number)  # forgets its prefixes
            self._free.append(number)


def _policy_of(view: str) -> str:
    return view.rpartition(".")[0]
