"""Cuts a batch into slices, one per rank, and a slice into pages, and encodes one of them.

Slices are balanced by their cost of computation, and hold whole groups. A page holds as many samples of a
slice as fit into the body of one reply. Stored token columns are copied without decoding them.
"""

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec

from astraflow import wire
from astraflow.dataflow.api import WHOLE_SLICE
from astraflow.dataflow.core.commands import BatchView, PayloadRef
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
"""Most bytes of a page's samples, as they are stored. JSON takes a third more, and a body may have 256 MiB. A
longer sample gets its own page."""
_SAMPLE_BYTES = 1024
"""Upper bound for the fields of a sample other than its trajectory and advantages."""
_ADVANTAGE_BYTES = 32

_EVEN_TOKENS = 24_576
"""Length at which attention costs as much as the rest of a layer: 12 times the width of a model of 1.7
billion parameters. A wrong value only makes the slices less balanced."""


def sample_cost(num_tokens: int) -> float:
    """Cost of computing a sample, in tokens of a short sample. Attention grows with the square of the
    length."""
    return num_tokens + num_tokens**2 / _EVEN_TOKENS


def slice_indices(
    costs: Sequence[float], world: int, groups: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Positions of each rank's samples, in ascending order. The same input gives the same slices.

    Groups are assigned in descending order of cost, each to the rank with the lowest cost so far. So the most
    expensive rank exceeds the mean by at most one group.
    `groups`: the group of each sample. The samples of a group stay together, because they may share a prefix
    and because episodes are weighed as a whole. By default, each sample is its own group.
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
    """The positions of each page's samples: as many as have at most `limit` bytes together, or one that has
    more. There is at least one page. The same input gives the same pages."""
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
    """Which part of a batch is requested, and in which encoding."""

    rank: int
    world: int
    media_type: str
    page: int = WHOLE_SLICE
    """From 0, or `WHOLE_SLICE`."""
    page_bytes: int = PAGE_BYTES
    says_zeroed: bool = False
    """Whether samples carry `zeroed_by`; trainers that don't ask for it may refuse unknown fields."""


def encode_slice(
    view: BatchView,
    read: Callable[[Sequence[PayloadRef]], Sequence[bytes | memoryview]],
    request: SliceRequest,
    *,
    state: RunState,
) -> bytes:
    """Encodes a `BatchReply` with one rank's slice, or a page of it. The same view gives the same bytes.

    For msgpack, stored trajectories are copied without decoding. Run it in a thread, because it reads files.
    Raises: WireError if the slice has no such page.
    """
    groups = [sample.group_id for sample in view.samples]
    slices = slice_indices([sample_cost(sample.num_tokens) for sample in view.samples], request.world, groups)
    chosen = [view.samples[idx] for idx in slices[request.rank]]
    num_pages = 1
    if request.page != WHOLE_SLICE:
        most = [s.payload.length + _SAMPLE_BYTES + _ADVANTAGE_BYTES * len(s.advantages) for s in chosen]
        pages = page_ranges(most, request.page_bytes)
        num_pages = len(pages)
        if not 0 <= request.page < num_pages:
            raise WireError(f"page {request.page} does not exist: the slice has {num_pages}, counted from 0")
        chosen = [chosen[idx] for idx in pages[request.page]]
    payloads = read([sample.payload for sample in chosen])
    trajectory = _splice if request.media_type == wire.MSGPACK else partial(wire.decode, item_type=Trajectory)
    batch = Batch(
        policy=view.policy,
        step=view.step,
        rank=request.rank,
        world=request.world,
        trainer_version=view.trainer_version,
        samples=tuple(
            [
                Sample(
                    group_id=sample.group_id,
                    episode_idx=sample.episode_idx,
                    task_id=sample.task_id,
                    trajectory=trajectory(payload),
                    advantages=tuple([AdvantageSpan(*span) for span in sample.advantages]),
                    zeroed_by=sample.zeroed_by if request.says_zeroed else "",
                )
                for sample, payload in zip(chosen, payloads, strict=True)
            ]
        ),
        totals=view.totals,
        staleness_mean=view.staleness_mean,
        staleness_max=view.staleness_max,
        is_redo=view.is_redo,
    )
    return wire.encode(BatchReply(batch=batch, state=state, num_pages=num_pages), request.media_type)


def _splice(payload: bytes | memoryview) -> Trajectory:
    """Encoded bytes in place of a trajectory. The encoder copies them; nothing else may use them."""
    return cast("Trajectory", msgspec.Raw(payload))
