import asyncio
import math
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.types.host_tensors import HostTensor
from astraflow.weights.manifest import ITEM_BYTES, build_manifest, check_digest, hash_bytes, pack, tensors_of
from astraflow.weights.snapshot import read_safetensors, write_safetensors
from drivers.weight_fakes import weight_rig

# Bit patterns that a detour through a number would change: NaN payloads, signalling NaN, -0.0, denormals.
_PATTERNS = {
    "float32": [0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000],
    "float16": [0x7E01, 0x7C01, 0xFFFF, 0x8000, 0x0001, 0x83FF, 0x7C00],
    "bfloat16": [0x7FC1, 0x7F81, 0xFFFF, 0x8000, 0x0001, 0x807F, 0x7F80],
}


@st.composite
def host_tensors(draw: st.DrawFn) -> list[HostTensor]:
    tensors: list[HostTensor] = []
    for idx in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        size, bits = math.prod(shape), 8 * ITEM_BYTES[dtype]
        word = st.sampled_from(_PATTERNS[dtype]) | st.integers(0, 2**bits - 1)
        words = draw(st.lists(word, min_size=size, max_size=size)) if size <= 64 else [7] * size
        data = np.array(words, dtype=f"<u{bits // 8}").view(np.uint8).reshape(-1)
        tensors.append(HostTensor(f"t{idx}", shape, dtype, data))
    return tensors


def content(tensors: tuple[HostTensor, ...] | list[HostTensor]) -> list[tuple[object, ...]]:
    return [(t.name, t.shape, t.dtype, t.data.tobytes()) for t in tensors]


@given(host_tensors(), st.integers(1, 300))
def test_packing_keeps_every_bit(tensors: list[HostTensor], chunk_bytes: int) -> None:
    manifest, buffer = build_manifest("p", 0, tensors, chunk_bytes=chunk_bytes), pack(tensors)
    check_digest(manifest, buffer)
    assert content(tensors_of(manifest, buffer)) == content(tensors)
    data = pack(tensors).tobytes()
    segments = [data[start : start + 512 * 1024] for start in range(0, len(data), 512 * 1024)]
    assert manifest.digest == hash_bytes(b"".join(bytes.fromhex(hash_bytes(part)) for part in segments))


@given(host_tensors())
def test_safetensors_files_keep_every_bit(tensors: list[HostTensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_safetensors(path, tensors)
        assert sorted(content(read_safetensors(path))) == sorted(content(tensors))


@settings(max_examples=25, deadline=None)
@given(st.lists(host_tensors(), min_size=1, max_size=3))
def test_every_version_arrives_as_it_was_published(versions: list[list[HostTensor]]) -> None:
    async def transfer(folder: Path) -> None:
        async with weight_rig(folder, keep=1) as rig:
            for number, tensors in enumerate(versions):
                files = {} if number else rig.model_files()
                manifest = await rig.client.publish("actor", number, tensors, files)
                await rig.client.forget("actor", [])
                snapshot = await rig.receiver.fetch(manifest)
                assert content(snapshot.tensors) == content(tensors)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(transfer(Path(folder)))
