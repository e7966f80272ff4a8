import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.types import TensorInfo
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.delta import encoder, layout
from astraflow.weights.delta.delta import apply_delta, parse_delta
from astraflow.weights.delta.encoder import HEADER_BYTES, encode_blocks, encode_header, encode_trailer
from astraflow.weights.delta.kernels import NUMPY
from astraflow.weights.delta.planes import Kernel
from astraflow.weights.manifest import (
    ITEM_BYTES,
    TensorBytes,
    VersionDigest,
    digest_of,
    lay_out,
    pack,
)

pytestmark = pytest.mark.timeout(120)  # the first use compiles
jit = pytest.importorskip("astraflow.addons.fast_deltas.compiled", reason="numba is not installed")

# Infinities, quiet and signalling NaNs with payloads, -0.0, +0.0, denormals, the largest number, one.
_PATTERNS = {
    "float32": [0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x80000000, 0, 1, 0x807FFFFF],
    "float16": [0x7C00, 0xFC00, 0x7E01, 0x7C01, 0xFFFF, 0x8000, 0, 1, 0x83FF, 0x7BFF, 0x3C00],
    "bfloat16": [0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF, 0x8000, 0, 1, 0x807F, 0x7F7F, 0x3F80],
}


@dataclass
class Pair:
    """Two versions of one table."""

    tensors: tuple[TensorInfo, ...]
    base: NDArray[np.uint8]
    new: NDArray[np.uint8]

    def digest(self, buffer: NDArray[np.uint8]) -> str:
        return digest_of(buffer)

    def encoded(self, kernel: Kernel = NUMPY) -> bytes:
        digests = {"base_digest": self.digest(self.base), "digest": self.digest(self.new)}
        header = encode_header(self.tensors, **digests)
        blocks = [*encode_blocks(self.base, self.new, self.tensors, kernel=kernel)]
        return b"".join([header, *blocks, encode_trailer(self.tensors, len(blocks))])

    def applied(self, data: bytes, kernel: Kernel = NUMPY) -> NDArray[np.uint8]:
        buffer = self.base.copy()
        apply_delta(parse_delta(data, self.tensors), buffer, kernel=kernel)
        return buffer


@st.composite
def words(draw: st.DrawFn, dtype: str, size: int) -> NDArray[np.uint8]:
    """Special patterns at drawn places of random bits."""
    bits = 8 * ITEM_BYTES[dtype]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    data = random.integers(0, 1 << bits, size, dtype=f"u{bits // 8}")
    for word in draw(st.lists(st.sampled_from(_PATTERNS[dtype]), max_size=8)):
        if size:
            data[draw(st.integers(0, size - 1))] = word
    return data


@st.composite
def changed(draw: st.DrawFn, dtype: str, old: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """From nothing to everything changed, by small steps, large ones, or to any pattern."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0.0, 0.002, 0.02, 0.2, 0.5, 1.0]))
    where = random.random(old.size) < density
    new = old.copy()
    match draw(st.sampled_from(["ulp", "small", "any", "special"])):
        case "ulp":
            new[where] += random.choice(np.array([1, -1]).astype(old.dtype), int(where.sum()))
        case "small":
            new[where] += random.integers(0, 600, int(where.sum()), dtype=old.dtype)
        case "any":
            new[where] = draw(words(dtype, int(where.sum())))
        case _:
            new[where] = random.choice(np.array(_PATTERNS[dtype], old.dtype), int(where.sum()))
    return new


_SHAPES = ((), (0,), (1,), (3, 7), (1025,), (300, 17), (70_001,))
_SMALL = _SHAPES[:-1]
"""For tests that cut tables into small parts: the largest still has hundreds of them."""


@st.composite
def pairs(draw: st.DrawFn, shapes: tuple[tuple[int, ...], ...] = _SHAPES) -> Pair:
    """Tables of several dtypes and odd sizes, empty tensors and scalars among them."""
    before: list[HostTensor] = []
    after: list[HostTensor] = []
    for idx in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = draw(st.sampled_from(shapes))
        old = draw(words(dtype, math.prod(shape)))
        before.append(HostTensor(f"t{idx}", shape, dtype, old.view(np.uint8)))
        after.append(HostTensor(f"t{idx}", shape, dtype, draw(changed(dtype, old)).view(np.uint8)))
    return Pair(lay_out(before), pack(before), pack(after))


@settings(deadline=None, max_examples=80)
@given(pairs())
def test_any_pair_comes_back_bit_for_bit(pair: Pair) -> None:
    data = pair.encoded()
    for kernel in (NUMPY, jit):
        assert pair.applied(data, kernel).tobytes() == pair.new.tobytes()


@settings(deadline=None, max_examples=60)
@given(pairs())
def test_a_delta_tells_which_elements_it_touches(pair: Pair) -> None:
    patched = pair.base.copy()
    for idx, positions in parse_delta(pair.encoded(), pair.tensors).changed():
        tensor = pair.tensors[idx]
        span, width = slice(tensor.offset, tensor.offset + tensor.num_bytes), ITEM_BYTES[tensor.dtype]
        assert positions.size
        assert (np.diff(positions) > 0).all()
        patched[span].view(f"u{width}")[positions] = pair.new[span].view(f"u{width}")[positions]
    assert patched.tobytes() == pair.new.tobytes()


@settings(deadline=None, max_examples=40)
@given(pairs(_SMALL), st.integers(1, 4))
def test_the_bytes_depend_neither_on_the_kernel_nor_on_threads(pair: Pair, num_threads: int) -> None:
    with (
        ThreadPoolExecutor(num_threads) as pool,
        mock.patch.object(encoder, "shared_threads", return_value=pool),
        mock.patch.object(layout, "BLOCK_ELEMENTS", 16),  # enough blocks that threads take turns
    ):
        data = pair.encoded(NUMPY)
        assert data == pair.encoded(jit)
    assert pair.applied(data).tobytes() == pair.new.tobytes()


@settings(deadline=None, max_examples=80)
@given(
    st.tuples(pairs(_SMALL), st.sampled_from([8, 64, 1024]))
    | st.tuples(pairs(), st.sampled_from([1024, 1 << 19]))
)
def test_a_base_that_advances_becomes_the_new_version(case: tuple[Pair, int]) -> None:
    """Read from where its tensors lie, in parts, also where a block turns out dense on the way."""
    pair, part = case
    tensors = tensors_of_table(pair.tensors, pair.new)
    for kernel in (NUMPY, jit):
        base, scattered = pair.base.copy(), TensorBytes(pair.tensors, tensors)
        hashed = VersionDigest(scattered)
        with mock.patch.object(encoder, "SEGMENT_BYTES", part):
            pieces = [
                *encode_blocks(base, scattered, pair.tensors, kernel=kernel, hashed=hashed, is_advancing=True)
            ]
        trailer = encode_trailer(pair.tensors, len(pieces))
        assert b"".join(pieces) + trailer == pair.encoded()[HEADER_BYTES:]
        assert base.tobytes() == pair.new.tobytes()
        assert hashed.hexdigest() == pair.digest(pair.new)


@given(pairs(), st.data())
def test_bytes_in_tensors_are_those_of_the_version(pair: Pair, data: st.DataObject) -> None:
    scattered = TensorBytes(pair.tensors, tensors_of_table(pair.tensors, pair.new))
    assert scattered.nbytes == pair.new.nbytes
    start = data.draw(st.integers(0, pair.new.nbytes))
    end = data.draw(st.integers(start, pair.new.nbytes))
    if start < end:
        assert scattered[start:end].tobytes() == pair.new[start:end].tobytes()


def tensors_of_table(table: tuple[TensorInfo, ...], version: NDArray[np.uint8]) -> list[HostTensor]:
    """Each tensor in memory of its own."""
    return [
        HostTensor(t.name, t.shape, t.dtype, version[t.offset : t.offset + t.num_bytes].copy()) for t in table
    ]


@settings(deadline=None, max_examples=60)
@given(st.tuples(pairs(_SMALL), st.sampled_from([8, 64])) | st.tuples(pairs(), st.just(1024)))
def test_the_bytes_do_not_depend_on_the_parts_in_which_changes_are_sought(case: tuple[Pair, int]) -> None:
    pair, part = case
    expected = pair.encoded()
    with mock.patch.object(encoder, "SEGMENT_BYTES", part):
        assert pair.encoded(NUMPY) == pair.encoded(jit) == expected


@settings(deadline=None, max_examples=50)
@given(pairs())
def test_equal_versions_cost_nothing(pair: Pair) -> None:
    pair.new = pair.base
    data = pair.encoded()
    assert len(data) < 150
    assert parse_delta(data, pair.tensors).blocks == ()


@settings(deadline=None, max_examples=100)
@given(pairs(), st.data())
def test_damaged_bytes_are_always_noticed(pair: Pair, data: st.DataObject) -> None:
    good = pair.encoded()
    bad = bytearray(good)
    match data.draw(st.sampled_from(["flip", "cut", "append", "move"])):
        case "flip":
            bad[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            del bad[data.draw(st.integers(0, len(good) - 1)) :]
        case "append":
            bad += data.draw(st.binary(min_size=1, max_size=50))
        case _:
            del bad[data.draw(st.integers(0, len(good) - 1))]
    with pytest.raises(WeightsError):
        pair.applied(bytes(bad))


@settings(deadline=None, max_examples=100)
@given(pairs(), st.data())
def test_damage_with_a_right_checksum_gives_no_wrong_tensor(pair: Pair, data: st.DataObject) -> None:
    """As an encoder with a bug would write it: both kernels must stay in bounds, and the digest decides."""
    good = pair.encoded()
    bad = bytearray(good)
    start = _HEADER_BYTES
    if len(good) > start + _BLOCK_BYTES + 8:  # the first block, not the trailer alone
        num_bytes = int.from_bytes(good[start + 32 : start + 36], "little")
        end = start + _BLOCK_BYTES + num_bytes
        for _ in range(data.draw(st.integers(1, 4))):
            idx = data.draw(st.integers(start, end - 1))
            if idx not in range(start + 32, start + _BLOCK_BYTES):
                bad[idx] = data.draw(st.integers(0, 255))
        checksum = xxhash.xxh3_64(bytes(bad[start : start + 36]))
        checksum.update(bytes(bad[start + _BLOCK_BYTES : end]))
        bad[start + 36 : start + 44] = checksum.intdigest().to_bytes(8, "little")
    for kernel in (NUMPY, jit):
        try:
            result = pair.applied(bytes(bad), kernel)
        except WeightsError:
            continue
        assert result.tobytes() == pair.new.tobytes()


_HEADER_BYTES = 56
_BLOCK_BYTES = 44


@settings(deadline=None, max_examples=50)
@given(pairs(), st.integers(0, 2**32))
def test_a_wrong_base_gives_no_wrong_tensor(pair: Pair, seed: int) -> None:
    data = pair.encoded()
    other = pair.base.copy()
    if not other.size or not pair.tensors[0].num_bytes:
        return
    other[seed % pair.tensors[0].num_bytes] ^= 1
    with pytest.raises(WeightsError, match="hash to"):
        apply_delta(parse_delta(data, pair.tensors), other, kernel=NUMPY)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300), pairs())
def test_noise_is_no_delta(noise: bytes, pair: Pair) -> None:
    for data in (noise, b"AFDELTA1" + noise):
        with pytest.raises(WeightsError):
            parse_delta(data, pair.tensors)
