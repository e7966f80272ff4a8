import msgspec
import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.types import Chunk, FileInfo, Manifest
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.manifest import (
    ALIGNMENT,
    SEGMENT_BYTES,
    VersionDigest,
    build_manifest,
    check_digest,
    check_file_name,
    check_manifest,
    check_policy_name,
    cut,
    digest_of,
    lay_out,
    pack,
    plan_path,
    tensors_of,
)
from drivers.weight_fakes import make_host_tensor, make_weights


def make_manifest(chunk_bytes: int = 4096) -> Manifest:
    return build_manifest("actor", 3, make_weights(), chunk_bytes=chunk_bytes)


def test_tensors_lie_aligned_and_come_back_bit_equal() -> None:
    weights = make_weights()
    manifest, buffer = make_manifest(), pack(weights)
    assert all(t.offset % ALIGNMENT == 0 for t in manifest.tensors)
    check_digest(manifest, buffer)
    for given, back in zip(weights, tensors_of(manifest, buffer), strict=True):
        assert (back.name, back.shape, back.dtype) == (given.name, given.shape, given.dtype)
        assert back.data.tobytes() == given.data.tobytes()


def test_chunks_cover_the_bytes_once() -> None:
    assert cut(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert cut(0, 4) == []
    manifest = make_manifest(4096)
    assert [c.num_bytes for c in manifest.chunks[:-1]] == [4096] * (len(manifest.chunks) - 1)
    assert manifest.num_bytes == pack(make_weights()).nbytes


def some_bytes(num_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)


@pytest.mark.parametrize("num_bytes", [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, 20 * SEGMENT_BYTES + 5])
def test_the_digest_is_the_hash_of_the_hashes_of_each_half_mebibyte(num_bytes: int) -> None:
    data = some_bytes(num_bytes)
    parts = [data[start : start + 2**19].tobytes() for start in range(0, num_bytes, 2**19)]
    expected = xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_128_digest(part) for part in parts))
    assert digest_of(data) == expected


@pytest.mark.parametrize("step", [4096, SEGMENT_BYTES, 3 * SEGMENT_BYTES // 2, 7 * SEGMENT_BYTES])
def test_the_digest_is_the_same_whatever_the_ranges_and_their_order(step: int) -> None:
    data = some_bytes(5 * SEGMENT_BYTES + 3)
    digest = VersionDigest(data)
    for start, end in reversed(cut(data.nbytes, step)):
        digest.take(start, end)
    assert digest.hexdigest() == digest_of(data)


def test_the_digest_shows_a_change_of_any_byte() -> None:
    data = some_bytes(2 * SEGMENT_BYTES + 1)
    before = digest_of(data)
    for position in (0, SEGMENT_BYTES - 1, SEGMENT_BYTES, data.nbytes - 1):
        data[position] ^= 1
        assert digest_of(data) != before
        data[position] ^= 1


def test_a_change_of_any_byte_of_a_version_is_found() -> None:
    buffer = pack(make_weights())
    check_digest(make_manifest(), buffer)
    buffer[5000] ^= 1
    with pytest.raises(WeightsError, match="'actor' version 3: the tensors hash to"):
        check_digest(make_manifest(), buffer)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (HostTensor("w", (3,), "float32", np.zeros(8, np.uint8)), "'w': 8 bytes, but shape"),
        (HostTensor("w", (2,), "int8", np.zeros(2, np.uint8)), "dtype 'int8' is not one of"),
        (HostTensor("w", (-2, -2), "float16", np.zeros(8, np.uint8)), "'w': 8 bytes, but shape"),
        (HostTensor("w", (2, 1), "float16", np.zeros((2, 2), np.uint8)), "data must be uint8"),
    ],
)
def test_a_tensor_that_disagrees_with_itself_is_named(tensor: HostTensor, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        lay_out([tensor])


def test_a_tensor_name_comes_once() -> None:
    with pytest.raises(WeightsError, match="'w' comes twice"):
        lay_out([make_host_tensor("w"), make_host_tensor("w")])


def test_scalars_and_empty_tensors_are_tensors() -> None:
    weights = [make_host_tensor("a", ()), make_host_tensor("b", (0, 4)), make_host_tensor("c", (1,))]
    manifest = build_manifest("actor", 0, weights, chunk_bytes=4096)
    check_digest(manifest, pack(weights))
    assert [t.num_bytes for t in manifest.tensors] == [4, 0, 4]


def test_a_manifest_that_disagrees_with_itself_is_refused() -> None:
    good = make_manifest()
    first = good.tensors[0]
    overlapping = (first, msgspec.structs.replace(good.tensors[1], offset=64))
    reshaped = (msgspec.structs.replace(first, shape=(99, 99)), *good.tensors[1:])
    bad_file = FileInfo(name="../config.json", chunk=good.chunks[0])
    cases = [
        ({"tensors": reshaped}, "'layer.0': .* shape"),
        ({"tensors": overlapping}, "overlaps"),
        ({"chunks": good.chunks[:-1]}, "num_bytes says"),
        ({"chunks": good.chunks[:-1], "num_bytes": 4096 * (len(good.chunks) - 1)}, "the tensors need"),
        ({"chunks": (Chunk(hash="../../x", num_bytes=1),), "num_bytes": 1}, "expected 32 hexadecimal digits"),
        ({"files": (bad_file,)}, "cannot be published"),
        ({"policy": "../actor"}, "policy name"),
    ]
    check_manifest(good)
    for change, message in cases:
        with pytest.raises(WeightsError, match=message):
            check_manifest(msgspec.structs.replace(good, **change))


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0b", "a b", "x" * 200])
def test_policy_names_are_folder_names(name: str) -> None:
    with pytest.raises(WeightsError, match="policy name"):
        check_policy_name(name)
    assert check_policy_name("actor-2.b_c") == "actor-2.b_c"


@pytest.mark.parametrize("name", ["model.py", "pytorch_model.bin", "a.pkl", "../config.json", ".json", "x"])
def test_only_files_that_are_read_and_never_run_travel(name: str) -> None:
    with pytest.raises(WeightsError, match="cannot be published"):
        check_file_name(name)
    assert check_file_name("chat_template.jinja") == "chat_template.jinja"


def delta(version: int, base: int, num_bytes: int) -> Manifest:
    return msgspec.structs.replace(
        make_manifest(), version=version, kind="delta", base=base, num_bytes=num_bytes
    )


def full(version: int, num_bytes: int) -> Manifest:
    return msgspec.structs.replace(make_manifest(), version=version, num_bytes=num_bytes)


def test_the_cheapest_path_is_taken() -> None:
    manifests = [full(0, 1000), delta(1, 0, 10), delta(2, 1, 10), full(2, 1000), delta(3, 2, 10)]

    def path(*held: int) -> list[tuple[int, str]]:
        return [(m.version, m.kind) for m in plan_path(manifests, held)]

    assert path(1) == [(2, "delta"), (3, "delta")]
    assert path(3) == []
    assert path() == [(2, "full"), (3, "delta")]
    assert [m.version for m in plan_path([full(2, 15), delta(3, 2, 10), full(3, 20)], [])] == [3]


def test_a_delta_without_its_base_is_no_path() -> None:
    with pytest.raises(WeightsError, match="version 3 is a delta on 2, which no path reaches"):
        plan_path([delta(3, 2, 10)], [])
    with pytest.raises(WeightsError, match="no manifests"):
        plan_path([], [1])
