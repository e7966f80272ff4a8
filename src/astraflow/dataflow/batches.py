"""Cuts a batch into token-balanced slices and encodes one, token columns spliced in as they were stored."""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from astraflow import wire
from astraflow.dataflow.core.commands import BatchView, PayloadRef, SampleView
from astraflow.types import AdvantageSpan, Batch, BatchReply, BatchTotals, Item, RunState, Sample, Trajectory

__all__ = ["encode_slice", "slice_indices"]


class _RawSample(Item, frozen=True, kw_only=True):
    """A `Sample` whose trajectory is already encoded; same fields in the same order."""

    group_id: int
    episode_idx: int
    task_id: str
    trajectory: msgspec.Raw
    advantages: tuple[AdvantageSpan, ...]


class _RawBatch(Item, frozen=True, kw_only=True):
    """A `Batch` of raw samples; same fields in the same order."""

    policy: str
    step: int
    rank: int
    world: int
    trainer_version: int
    samples: tuple[_RawSample, ...]
    totals: BatchTotals
    staleness_mean: float
    staleness_max: int
    is_redo: bool


class _RawBatchReply(Item, frozen=True, kw_only=True):
    """A `BatchReply` of a raw batch."""

    batch: _RawBatch
    state: RunState
    waits_for: str = ""


def slice_indices(num_tokens: Sequence[int], world: int) -> list[list[int]]:
    """Positions of the samples of each rank: longest first, to the rank with the fewest tokens so far.

    Deterministic; each rank's positions ascend. The largest rank exceeds the mean by at most one sample.
    """
    ranks: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, 0, rank) for rank in range(world)]
    for idx in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        tokens, num_samples, rank = heapq.heappop(loads)
        ranks[rank].append(idx)
        heapq.heappush(loads, (tokens + num_tokens[idx], num_samples + 1, rank))
    return [sorted(indices) for indices in ranks]


def encode_slice(
    view: BatchView,
    read: Callable[[Sequence[PayloadRef]], Sequence[bytes | memoryview]],
    *,
    rank: int,
    world: int,
    state: RunState,
    media_type: str,
) -> bytes:
    """A `BatchReply` with one rank's slice, encoded: the same bytes for the same view.

    As msgpack the stored trajectories are spliced in undecoded. Reads files: run it in a thread.
    """
    indices = slice_indices([sample.num_tokens for sample in view.samples], world)[rank]
    chosen = [view.samples[idx] for idx in indices]
    head: dict[str, Any] = {
        "policy": view.policy,
        "step": view.step,
        "rank": rank,
        "world": world,
        "trainer_version": view.trainer_version,
        "totals": view.totals,
        "staleness_mean": view.staleness_mean,
        "staleness_max": view.staleness_max,
        "is_redo": view.is_redo,
    }
    payloads = read([sample.payload for sample in chosen])
    if media_type == wire.MSGPACK:
        raw = tuple(map(_raw_sample, chosen, payloads))
        return wire.encode(_RawBatchReply(batch=_RawBatch(samples=raw, **head), state=state))
    samples = tuple(map(_sample, chosen, payloads))
    return wire.encode(BatchReply(batch=Batch(samples=samples, **head), state=state), media_type)


def _advantages(view: SampleView) -> tuple[AdvantageSpan, ...]:
    return tuple([AdvantageSpan(*span) for span in view.advantages])


def _raw_sample(view: SampleView, payload: bytes | memoryview) -> _RawSample:
    return _RawSample(
        group_id=view.group_id,
        episode_idx=view.episode_idx,
        task_id=view.task_id,
        trajectory=msgspec.Raw(payload),
        advantages=_advantages(view),
    )


def _sample(view: SampleView, payload: bytes | memoryview) -> Sample:
    return Sample(
        group_id=view.group_id,
        episode_idx=view.episode_idx,
        task_id=view.task_id,
        trajectory=wire.decode(payload, Trajectory),
        advantages=_advantages(view),
    )
