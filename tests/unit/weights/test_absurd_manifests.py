"""A manifest that cannot be right is refused by name before memory is asked for; the old version stays."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from astraflow.errors import WeightsError
from astraflow.types import Chunk, FileInfo, Manifest, Shortcut, TensorInfo
from astraflow.weights.manifest import check_manifest
from drivers.weight_fakes import make_weights, weight_rig

Change = Callable[[Manifest], Manifest]
HUGE = 1 << 50
HASH = "0" * 32


def replace(manifest: Manifest, **fields: object) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


def of_one_tensor(manifest: Manifest, num_bytes: int, *, name: str = "huge", offset: int = 0) -> Manifest:
    """Agrees with itself: one tensor, in chunks of 2 GiB at most."""
    total, chunk = offset + num_bytes, 1 << 31
    chunks = tuple(Chunk(HASH, min(chunk, total - at)) for at in range(0, total, chunk))
    shape = (num_bytes // 2,)
    tensor = TensorInfo(name=name, shape=shape, dtype="bfloat16", offset=offset, num_bytes=num_bytes)
    return replace(manifest, tensors=(tensor,), chunks=chunks, num_bytes=total, files=())


def huge_tensor(manifest: Manifest) -> Manifest:
    return of_one_tensor(manifest, 1 << 42)


def huge_chunk(manifest: Manifest) -> Manifest:
    return replace(of_one_tensor(manifest, HUGE), chunks=(Chunk(HASH, HUGE),))


def huge_gap(manifest: Manifest) -> Manifest:
    return of_one_tensor(manifest, 2, offset=1 << 36)


def huge_file(manifest: Manifest) -> Manifest:
    info = FileInfo(name="tokenizer.json", chunk=Chunk(HASH, 1 << 40))
    return replace(manifest, files=(info,), num_bytes=manifest.num_bytes + (1 << 40))


def huge_delta(manifest: Manifest) -> Manifest:
    chunks = tuple(Chunk(HASH, 1 << 31) for _ in range(512))
    return replace(manifest, shortcut=Shortcut(base=0, encoding="astraflow-delta-1", chunks=chunks))


def many_empty_chunks(manifest: Manifest) -> Manifest:
    return replace(manifest, chunks=(*manifest.chunks, *(Chunk(HASH, 0) for _ in range(10))))


def many_dimensions(manifest: Manifest) -> Manifest:
    tensor = msgspec.structs.replace(manifest.tensors[0], shape=(1,) * 5000 + manifest.tensors[0].shape)
    return replace(manifest, tensors=(tensor, *manifest.tensors[1:]))


def large_version(manifest: Manifest) -> Manifest:
    return of_one_tensor(manifest, 1 << 28)


ABSURD: list[Change] = [
    huge_tensor, huge_chunk, huge_gap, huge_file, huge_delta, many_empty_chunks, many_dimensions,
]  # fmt: skip


@pytest.mark.parametrize("change", ABSURD, ids=lambda change: str(change.__name__))
async def test_an_absurd_manifest_is_refused_by_name_and_the_version_here_stays(
    tmp_path: Path, change: Change
) -> None:
    async with weight_rig(tmp_path) as rig:
        files = rig.model_files()
        first = await rig.client.publish("actor", 0, make_weights(), files)
        second = await rig.client.publish("actor", 1, make_weights(seed=1), {})
        with pytest.raises(WeightsError, match="'actor' version 1: "):
            await rig.receiver.fetch(change(second))
        assert rig.reader.reads == []
        await rig.receiver.fetch(first)
        rig.reader.reads.clear()
        with pytest.raises(WeightsError, match="'actor' version 1: "):
            await rig.receiver.fetch(change(second))
        assert rig.reader.reads == []
        snapshot = await rig.receiver.fetch(second)
        assert [t.data.tobytes() for t in snapshot.tensors] == [
            t.data.tobytes() for t in make_weights(seed=1)
        ]


async def test_a_version_that_outgrows_the_one_before_is_refused(tmp_path: Path) -> None:
    """It agrees with itself, and would even fit."""
    async with weight_rig(tmp_path) as rig:
        await rig.receiver.fetch(await rig.client.publish("actor", 0, make_weights(), rig.model_files()))
        second = await rig.client.publish("actor", 1, make_weights(seed=1), {})
        rig.reader.reads.clear()
        check_manifest(large_version(second))
        with pytest.raises(WeightsError, match=r"'actor' version 1: .*version 0, which is here"):
            await rig.receiver.fetch(large_version(second))
        assert rig.reader.reads == []


async def test_a_version_that_memory_has_no_room_for_is_refused(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, memory_bytes=20_000) as rig:
        small = await rig.client.publish("actor", 0, make_weights(2), rig.model_files())
        await rig.receiver.fetch(small)
        large = await rig.client.publish("actor", 1, make_weights(20, seed=1), {})
        with pytest.raises(WeightsError, match=r"version 1: \d+ bytes must be fetched into memory"):
            await rig.receiver.fetch(large)
