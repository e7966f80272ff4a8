"""Versions of the weights as folders for a server."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from astraflow.addons.inference_servers.weights_folder import WeightsFolder
from astraflow.errors import UnfitVersionError, WeightsError
from astraflow.models.adapters import peft_names
from astraflow.models.weight_files import check_weight_files, weight_paths
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.snapshot import read_safetensors

FINITE = {"float32": 0x7F7F_FFFF, "bfloat16": 0x7F7F, "float16": 0x7BFF}
INFINITE = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}


@pytest.fixture(autouse=True)
def own_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of other tests are not found."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def tensor(value: int, dtype: str, name: str = "w") -> HostTensor:
    """Three values with these bits, the last with its sign set."""
    kind = np.uint32 if dtype == "float32" else np.uint16
    bits = np.array([0, value, value], kind)
    bits[2] |= kind(1 << (8 * bits.itemsize - 1))
    return HostTensor(name, (3,), dtype, bits.view(np.uint8))


def snapshot(folder: Path, version: int, *tensors: HostTensor) -> WeightSnapshot:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    return WeightSnapshot("actor", version, tensors, folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_version_is_written_whole_and_one_with_infinite_values_is_not(dtype: str, tmp_path: Path) -> None:
    first = snapshot(tmp_path / "model", 0, tensor(FINITE[dtype], dtype))
    folder = WeightsFolder("test", first, parent=str(tmp_path))
    path = folder.write(first)
    assert (path / "config.json").read_text() == "{}"
    (read,) = read_safetensors(path / "model.safetensors")
    assert (read.dtype, read.data.tobytes()) == (dtype, first.tensors[0].data.tobytes())
    with pytest.raises(WeightsError, match=r"version 1 of 'actor': tensor w .*2 .*not finite"):
        folder.write(snapshot(tmp_path / "model", 1, tensor(INFINITE[dtype], dtype)))
    newer = folder.write(snapshot(tmp_path / "model", 2, tensor(1, dtype)))
    folder.keep_only(newer)
    assert [p.name for p in folder.path.iterdir()] == ["version-2"]
    folder.remove()
    assert not folder.path.exists()


@pytest.mark.parametrize("dtype", FINITE)
@pytest.mark.parametrize("is_negative", [False, True])
@pytest.mark.parametrize("above", [0, 1, 0x7F])
@pytest.mark.parametrize("place", [0, (1 << 22) - 1, 1 << 22, -1])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    dtype: str, is_negative: bool, above: int, place: int, tmp_path: Path
) -> None:
    kind = np.dtype("<u4" if dtype == "float32" else "<u2")
    largest = FINITE[dtype] | (is_negative << (8 * kind.itemsize - 1))
    values = np.full((1 << 22) + 5, largest, kind)  # more than a thread takes at a time
    whole = HostTensor("w", values.shape, dtype, values.view(np.uint8))
    small = snapshot(tmp_path / "model", 0, tensor(0, dtype, "first"), whole)
    folder = WeightsFolder("test", small, parent=str(tmp_path))
    values[place] += kind.type(1 + above)  # infinity, or NaN
    with pytest.raises(UnfitVersionError, match="tensor w holds 1 values that are not finite"):
        folder.write(small)
    assert not list(folder.path.iterdir())


def test_a_large_version_is_in_several_files_that_services_share(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = {"a": 100, "b": 66_000_000, "c": 3, "d": 70_000_000, "none": 0}
    bits = {name: rng.integers(0, 0x7F80, size // 2, np.uint16) for name, size in sizes.items()}
    tensors = [HostTensor(name, part.shape, "bfloat16", part.view(np.uint8)) for name, part in bits.items()]
    first = snapshot(tmp_path / "model", 0, *tensors)
    (tmp_path / "model" / "config.json").write_text('{"dtype": "float32"}')
    folders = [WeightsFolder("test", first, parent=str(tmp_path)) for _ in range(2)]
    paths, others = (weight_paths(folder.write(first)) for folder in folders)
    assert len(paths) == min(os.cpu_count() or 1, 2)
    assert check_weight_files(paths[0].parent).keys() == bits.keys()
    found = {read.name: read for path in paths for read in read_safetensors(path)}
    assert all(np.array_equal(found[tensor.name].data, tensor.data) for tensor in tensors)
    assert json.loads((paths[0].parent / "config.json").read_text()) == {"dtype": "bfloat16"}
    assert [p.stat().st_ino for p in paths] == [p.stat().st_ino for p in others]


def test_a_server_reads_adapters_merged_in_the_dtype_of_their_weights(tmp_path: Path) -> None:
    down, up = peft_names("w.weight")
    ones = np.ones(4, "<f4").view(np.uint8)
    factors = [HostTensor(name, shape, "float32", ones) for name, shape in ((down, (2, 2)), (up, (2, 2)))]
    base = HostTensor("w.weight", (2, 2), "bfloat16", np.zeros(8, np.uint8))
    first = snapshot(tmp_path / "model", 0, base, *factors)
    path = WeightsFolder("test", first, parent=str(tmp_path)).write(first)
    (read,) = read_safetensors(path / "model.safetensors")
    assert (read.name, read.dtype) == ("w.weight", "bfloat16")
    assert read.data.view("<u2").tolist() == [0x4000] * 4  # 2 in bfloat16


def test_another_architecture_is_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    first = snapshot(tmp_path / "model", 0, tensor(1, "float32"))
    folder = WeightsFolder("test", first, parent=str(tmp_path))
    other = snapshot(tmp_path / "model", 1, tensor(1, "float32"), tensor(1, "float32", "more"))
    with pytest.raises(WeightsError, match=r"'more' .*\(3,\), expected none \(1 tensors"):
        folder.write(other)


def test_services_of_a_machine_share_the_bytes_of_a_version(tmp_path: Path) -> None:
    first = snapshot(tmp_path / "model", 0, tensor(1, "float32"))
    folders = [WeightsFolder("test", first, parent=str(tmp_path)) for _ in range(3)]
    files = [folder.write(first) / "model.safetensors" for folder in folders[:2]]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    folders[0].remove()
    assert read_safetensors(files[1])[0].data.tobytes() == first.tensors[0].data.tobytes()
    third = folders[2].write(first) / "model.safetensors"
    assert third.stat().st_ino == files[1].stat().st_ino  # found although the first writer is gone
    for folder in folders[1:]:
        folder.remove()
    again = WeightsFolder("test", first, parent=str(tmp_path)).write(first)
    assert (again / "model.safetensors").stat().st_nlink == 1


def test_other_bytes_or_another_config_are_not_shared(tmp_path: Path) -> None:
    first = snapshot(tmp_path / "model", 0, tensor(1, "float32"))
    folder = WeightsFolder("test", first, parent=str(tmp_path))
    other = WeightsFolder("test", first, parent=str(tmp_path))
    path = folder.write(first)
    changed = other.write(snapshot(tmp_path / "model", 0, tensor(2, "float32")))
    assert (path / "model.safetensors").stat().st_nlink == 1
    assert (
        read_safetensors(changed / "model.safetensors")[0].data.tobytes() != first.tensors[0].data.tobytes()
    )
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 3}')
    assert (other.write(first) / "config.json").read_text() == '{"vocab_size": 3}'
    assert (path / "config.json").read_text() == "{}"
