"""Cuts a batch into slices, one per rank, and a slice into pages, and encodes one of them.

Slices are balanced by what they cost to compute, and hold whole groups. A page holds as many samples of a
slice as fit into the body of one answer. Token columns are copied as they were stored.
"""

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from astraflow import wire
from astraflow.dataflow.api import WHOLE_SLICE
from astraflow.dataflow.core.commands import BatchView, PayloadRef, SampleView
from astraflow.errors import WireError
from astraflow.types import AdvantageSpan, Batch, BatchReply, RunState, Sample, Trajectory

__all__ = [
    "PAGE_BYTES",
    "SliceRequest",
    "encode_slice",
    "page_ranges",
    "sample_cost",
    "slice_indices",
]

PAGE_BYTES = 64 * 1024 * 1024
"""Bytes of a page's samples as they are stored. In JSON they are a third more, and a body may be 256 MiB; a
sample that is longer has a page of its own."""
_SAMPLE_BYTES = 1024
"""More than the fields of a sample beside its trajectory and its advantages."""
_ADVANTAGE_BYTES = 32

_EVEN_TOKENS = 24_576
"""Length at which attention costs as much as all else in a layer: 12 times the width of a model of 1.7
billion parameters. A wrong number costs balance, nothing else."""


def sample_cost(num_tokens: int) -> float:
    """What a sample costs to compute, in tokens of a short one: attention grows with the square of the
    length."""
    return num_tokens + num_tokens**2 / _EVEN_TOKENS


def slice_indices(
    costs: Sequence[float], world: int, groups: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Positions of the samples of each rank; they ascend. The same input gives the same slices.

    Groups are given out by cost, the dearest first, each to the rank with the least so far: the dearest rank
    exceeds the mean by at most one group.
    `groups`: for each sample, the group that it belongs to. The samples of a group stay together: they may
    share a prefix, and episodes are weighed whole. By default each sample is a group.
    """
    members: dict[Hashable, list[int]] = {}
    for idx in range(len(costs)):
        members.setdefault(idx if groups is None else groups[idx], []).append(idx)
    sizes = [(sum(costs[i] for i in own), own) for own in members.values()]
    ranks: list[list[int]] = [[] for _ in range(world)]
    loads = [(0.0, 0, rank) for rank in range(world)]
    for size, own in sorted(sizes, key=lambda sized: (-sized[0], sized[1])):
        load, num_samples, rank = heapq.heappop(loads)
        ranks[rank].extend(own)
        heapq.heappush(loads, (load + size, num_samples + len(own), rank))
    return [sorted(indices) for indices in ranks]


def page_ranges(sizes: Sequence[int], limit: int) -> list[range]:
    """The samples of each page, by position: as many as have at most `limit` bytes together, or one that has
    more. There is one page at least. The same input gives the same pages."""
    pages: list[range] = []
    start = 0
    num_bytes = 0
    for idx, size in enumerate(sizes):
        if idx > start and num_bytes + size > limit:
            pages.append(range(start, idx))
            start = idx
            num_bytes = 0
        num_bytes += size
    return [*pages, range(start, len(sizes))]


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """What of a batch is asked for, and how it is to be encoded."""

    rank: int
    world: int
    media_type: str
    page: int = WHOLE_SLICE
    """From 0, or `WHOLE_SLICE`."""
    page_bytes: int = PAGE_BYTES


def encode_slice(
    view: BatchView,
    read: Callable[[Sequence[PayloadRef]], Sequence[bytes | memoryview]],
    request: SliceRequest,
    *,
    state: RunState,
) -> bytes:
    """A `BatchReply` with one rank's slice, or a page of it, encoded: the same bytes for the same view.

    In msgpack the stored trajectories are copied without decoding them. Reads files: run it in a thread.
    Raises: WireError if the slice has no such page.
    """
    world = request.world
    media_type = request.media_type
    groups = [sample.group_id for sample in view.samples]
    slices = slice_indices([sample_cost(sample.num_tokens) for sample in view.samples], world, groups)
    chosen = [view.samples[idx] for idx in slices[request.rank]]
    num_pages = 1
    if request.page != WHOLE_SLICE:
        pages = page_ranges([_stored_bytes(sample) for sample in chosen], request.page_bytes)
        num_pages = len(pages)
        if not 0 <= request.page < num_pages:
            raise WireError(f"page {request.page} of a slice of {num_pages} pages; they count from 0")
        chosen = [chosen[idx] for idx in pages[request.page]]
    payloads = read([sample.payload for sample in chosen])
    trajectory = _spliced if media_type == wire.MSGPACK else _decoded
    batch = Batch(
        policy=view.policy,
        step=view.step,
        rank=request.rank,
        world=world,
        trainer_version=view.trainer_version,
        samples=tuple(
            [
                Sample(
                    group_id=sample.group_id,
                    episode_idx=sample.episode_idx,
                    task_id=sample.task_id,
                    trajectory=trajectory(payload),
                    advantages=tuple([AdvantageSpan(*span) for span in sample.advantages]),
                )
                for sample, payload in zip(chosen, payloads, strict=True)
            ]
        ),
        totals=view.totals,
        staleness_mean=view.staleness_mean,
        staleness_max=view.staleness_max,
        is_redo=view.is_redo,
    )
    return wire.encode(BatchReply(batch=batch, state=state, num_pages=num_pages), media_type)


def _stored_bytes(sample: SampleView) -> int:
    """What a sample takes in an answer, or a little more."""
    return sample.payload.length + _SAMPLE_BYTES + _ADVANTAGE_BYTES * len(sample.advantages)


def _spliced(payload: bytes | memoryview) -> Trajectory:
    """Bytes that the encoder copies where it expects a trajectory; they have no other use."""
    return cast("Trajectory", msgspec.Raw(payload))


def _decoded(payload: bytes | memoryview) -> Trajectory:
    return wire.decode(payload, Trajectory)
