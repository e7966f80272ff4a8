from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.core.commands import BatchView, PayloadRef, SampleView
from astraflow.dataflow.service.batch_slices import (
    SliceRequest,
    encode_slice,
    page_ranges,
    sample_cost,
    slice_indices,
)
from astraflow.errors import WireError
from astraflow.types import Batch, BatchReply, BatchTotals
from astraflow.wire import JSON, MSGPACK, decode, encode
from drivers.dataflow_driver import make_trajectory

PAYLOADS = [encode(make_trajectory(seed=seed, num_sampled=seed + 1)) for seed in range(5)]


def read(refs: Sequence[PayloadRef]) -> list[bytes]:
    return [PAYLOADS[ref.segment] for ref in refs]


def make_view() -> BatchView:
    samples = tuple(
        SampleView(
            group_id=idx // 2,
            episode_idx=idx % 2,
            task_id=f"sums/{idx // 2}",
            payload=PayloadRef(idx, 0, len(payload)),
            advantages=((3, 4 + idx, 0.5),),
            num_tokens=4 + idx,
        )
        for idx, payload in enumerate(PAYLOADS)
    )
    totals = BatchTotals(
        num_groups=3,
        num_samples=5,
        num_tokens=30,
        num_trained_tokens=15,
        advantage_sum=7.5,
        advantage_square_sum=3.75,
        reward_sum=5.0,
    )
    return BatchView(
        policy="actor",
        step=4,
        trainer_version=6,
        samples=samples,
        totals=totals,
        staleness_mean=0.5,
        staleness_max=1,
        is_redo=False,
    )


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 9))
def test_slices_partition_the_samples_and_are_balanced(sizes: list[int], world: int) -> None:
    slices = slice_indices(sizes, world)
    assert sorted(idx for indices in slices for idx in indices) == list(range(len(sizes)))
    assert all(indices == sorted(indices) for indices in slices)
    loads = [sum(sizes[idx] for idx in indices) for indices in slices]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 9)), max_size=60), st.integers(1, 9))
def test_a_group_is_never_cut_between_ranks(samples: list[tuple[int, int]], world: int) -> None:
    sizes, groups = [size for size, _ in samples], [group for _, group in samples]
    slices = slice_indices(sizes, world, groups)
    assert sorted(idx for indices in slices for idx in indices) == list(range(len(sizes)))
    ranks = {
        group: [rank for rank, own in enumerate(slices) if any(groups[i] == group for i in own)]
        for group in groups
    }
    assert all(len(own) == 1 for own in ranks.values())
    loads = [sum(sizes[idx] for idx in indices) for indices in slices]
    whole = [sum(size for size, g in samples if g == group) for group in set(groups)]
    assert max(loads) - min(loads) <= max(whole, default=0)


@pytest.mark.parametrize("media_type", [MSGPACK, JSON])
def test_a_slice_decodes_to_the_stored_trajectories(media_type: str) -> None:
    body = encode_slice(make_view(), read, SliceRequest(0, 1, media_type), state="running")
    batch = decode(body, BatchReply, media_type).batch
    assert batch is not None
    assert [encode(sample.trajectory) for sample in batch.samples] == PAYLOADS
    assert [sample.advantages[0].end for sample in batch.samples] == [4, 5, 6, 7, 8]
    assert (batch.totals.num_tokens, batch.trainer_version, batch.staleness_max) == (30, 6, 1)


@pytest.mark.parametrize("media_type", [MSGPACK, JSON])
def test_only_a_trainer_that_asks_hears_what_zeroed_a_sample(media_type: str) -> None:
    view = make_view()
    masked = msgspec.structs.replace(view.samples[1], zeroed_by="filter")
    view = msgspec.structs.replace(view, samples=(view.samples[0], masked, *view.samples[2:]))
    plain, asked = (
        encode_slice(view, read, SliceRequest(0, 1, media_type, says_zeroed=says), state="running")
        for says in (False, True)
    )
    assert b"zeroed_by" not in plain
    batch = decode(asked, BatchReply, media_type).batch
    assert batch is not None
    assert [sample.zeroed_by for sample in batch.samples] == ["", "filter", "", "", ""]
    assert decode(plain, BatchReply, media_type).batch == msgspec.structs.replace(
        batch, samples=tuple(msgspec.structs.replace(sample, zeroed_by="") for sample in batch.samples)
    )


def test_ranks_share_the_batch_and_its_totals_and_the_bytes_stay_the_same() -> None:
    bodies = [
        encode_slice(make_view(), read, SliceRequest(rank, 2, MSGPACK), state="running") for rank in (0, 1, 0)
    ]
    assert bodies[0] == bodies[2]
    first, second = (decode(body, BatchReply).batch for body in bodies[:2])
    assert first is not None
    assert second is not None
    assert len(first.samples) + len(second.samples) == 5
    assert not {s.group_id for s in first.samples} & {s.group_id for s in second.samples}
    assert first.totals == second.totals


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 1500))
def test_pages_partition_a_slice_in_order_and_are_as_long_as_they_may_be(
    sizes: list[int], limit: int
) -> None:
    pages = page_ranges(sizes, limit)
    assert [idx for page in pages for idx in page] == list(range(len(sizes)))
    loads = [sum(sizes[idx] for idx in page) for page in pages]
    assert all(load <= limit or len(page) == 1 for load, page in zip(loads, pages, strict=True))
    assert all(load + sizes[page.stop] > limit for load, page in zip(loads, pages[:-1], strict=False))


def page_of(page: int, *, page_bytes: int) -> tuple[Batch, int]:
    request = SliceRequest(0, 1, MSGPACK, page, page_bytes)
    reply = decode(encode_slice(make_view(), read, request, state="running"), BatchReply)
    assert reply.batch is not None
    return reply.batch, reply.num_pages


def test_the_pages_of_a_slice_make_the_whole_slice() -> None:
    two_samples = 2 * (max(map(len, PAYLOADS)) + 1100)
    pages = [page_of(page, page_bytes=two_samples) for page in range(3)]
    assert [num_pages for _, num_pages in pages] == [3, 3, 3]
    assert [len(batch.samples) for batch, _ in pages] == [2, 2, 1]
    assert [encode(s.trajectory) for batch, _ in pages for s in batch.samples] == PAYLOADS
    assert all(batch.totals.num_samples == 5 for batch, _ in pages)
    assert page_of(0, page_bytes=10**6)[1] == 1
    with pytest.raises(WireError, match="page 3 does not exist: the slice has 3"):
        page_of(3, page_bytes=two_samples)


def test_a_long_sample_weighs_more_than_its_tokens_in_short_ones() -> None:
    sizes = [30_000, *[1_000] * 40]
    slices = slice_indices([sample_cost(size) for size in sizes], 2)
    assert sum(sizes[idx] for idx in slices[0]) < sum(sizes[idx] for idx in slices[1])
    assert 0 in slices[0]
