"""Ranks that share the bytes of a version: what they publish together is what one publishes alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from astraflow.errors import WeightsError
from astraflow.types import Manifest
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.delta.layout import blocks_of
from astraflow.weights.manifest import ITEM_BYTES, SEGMENT_BYTES, lay_out, span_bytes
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.ranges import (
    RangeJob,
    RangeWriter,
    WrittenRange,
    elements_of_rank,
    range_of,
)
from drivers.weight_fakes import make_host_tensor, trained, weight_rig

WORLDS = (1, 2, 4, 9)


def make_version() -> list[HostTensor]:
    """Four blocks of three widths; no block but the first begins where a segment does."""
    return [
        make_host_tensor("a", (4_300_000,), "bfloat16", seed=1),
        make_host_tensor("b", (7, 43), "bfloat16", seed=2),
        make_host_tensor("c", (1_050_000,), "float32", seed=3),
        make_host_tensor("none", (0, 4), "float32", seed=4),
        make_host_tensor("d", (77,), "float16", seed=5),
    ]


def parts_of(tensors: Sequence[HostTensor], rank: int, world: int) -> list[HostTensor]:
    """What a rank has of a version."""
    elements = elements_of_rank(lay_out(tensors), rank, world)
    parts = []
    for tensor in tensors:
        first, last = elements[tensor.name]
        width = ITEM_BYTES[tensor.dtype]
        parts.append(replace(tensor, data=tensor.data[first * width : last * width], first_idx=first))
    return parts


class RanksInTurn:
    """All ranks of a trainer in this process. Implements `VersionWriter`."""

    def __init__(self, world: int) -> None:
        self.whole: Sequence[HostTensor] = ()
        self.num_ended = 0
        self._writers = [RangeWriter(delta=True, rank=rank, world=world) for rank in range(world)]

    def write_delta(self, job: RangeJob, tensors: Sequence[HostTensor], base: int) -> list[WrittenRange]:
        del tensors
        return [w for writer, own in self._each() for w in writer.write_delta(job, own, base)]

    def write_full(
        self, job: RangeJob, tensors: Sequence[HostTensor], *, is_copied: bool
    ) -> list[WrittenRange]:
        del tensors
        return [w for writer, own in self._each() for w in writer.write_full(job, own, is_copied=is_copied)]

    def end(self) -> None:
        self.num_ended += 1

    def _each(self) -> list[tuple[RangeWriter, list[HostTensor]]]:
        world = len(self._writers)
        return [(writer, parts_of(self.whole, rank, world)) for rank, writer in enumerate(self._writers)]


async def published(folder: Path, world: int, history: Sequence[Sequence[HostTensor]]) -> list[Manifest]:
    """The manifests of versions that so many ranks wrote. The publisher hashes what it gets in full."""
    async with weight_rig(folder, delta=True, full_every=3, chunk_bytes=1 << 22) as rig:
        ranks = RanksInTurn(world)
        incoming = rig.publisher.store.incoming
        client = PublisherClient(rig.service, incoming, delta=True, ranges=ranks, chunk_bytes=1 << 22)
        manifests = []
        for version, tensors in enumerate(history):
            ranks.whole = tensors
            files = {} if version else rig.model_files()
            own = parts_of(tensors, 0, world)
            manifests.append(await client.publish("actor", version, own, files))
        assert ranks.num_ended == len(history)
        assert not list((rig.publisher.store.incoming / "actor").iterdir())
        return manifests


async def test_any_number_of_ranks_publishes_the_bytes_of_one(tmp_path: Path) -> None:
    history = [make_version()]
    while len(history) < 4:
        history.append(trained(history[-1], seed=len(history)))
    history.append([make_host_tensor(t.name, t.shape, t.dtype, seed=99) for t in history[0]])
    found = {}
    for world in WORLDS:
        manifests = await published(tmp_path / str(world), world, history)
        found[world] = [(m.kind, m.base, m.digest, m.tensors, m.chunks, m.shortcut) for m in manifests]
    # A delta that is handed over; one that comes with the full version; one that would be too large.
    assert [kind for kind, *_ in found[1]] == ["full", "delta", "delta", "full", "full"]
    assert [bool(shortcut) for *_, shortcut in found[1]] == [False, False, False, True, False]
    assert all(found[world] == found[1] for world in WORLDS)


@pytest.mark.parametrize("world", range(1, 10))
def test_ranges_share_a_version_without_cutting_a_block(world: int) -> None:
    table = lay_out(make_version())
    ranges = [range_of(table, rank, world) for rank in range(world)]
    assert [own.start for own in ranges] == [0, *(own.end for own in ranges[:-1])]
    assert ranges[-1].end == span_bytes(table)
    blocks = list(blocks_of(table))
    starts = {block.start for block in blocks}
    assert all(own.start in starts for own in ranges if own.end > own.start)
    largest = max(block.end - block.start for block in blocks)
    assert max(own.end - own.start for own in ranges) < span_bytes(table) / world + largest
    assert all(own.end <= own.held_end < own.end + SEGMENT_BYTES for own in ranges)


def test_tensors_of_another_range_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.tmp"
    path.touch()
    writer = RangeWriter(delta=True, rank=1, world=2)
    version = make_version()
    with pytest.raises(
        WeightsError, match=r"tensor 'a' of shape \(4300000,\): 8600000 bytes starting at element 0"
    ):
        writer.write_full(RangeJob("actor", 0, str(path)), version, is_copied=False)
    assert path.stat().st_size == 0


def test_a_delta_needs_the_copy_of_its_base(tmp_path: Path) -> None:
    path = tmp_path / "tmp"
    path.touch()
    writer = RangeWriter(delta=True)
    version = [make_host_tensor("a", (100,), "bfloat16")]
    writer.write_full(RangeJob("actor", 3, str(path)), version, is_copied=False)
    with pytest.raises(WeightsError, match="'actor' version 2, the base of a delta, is not here"):
        writer.write_delta(RangeJob("actor", 4, str(path)), version, 2)
