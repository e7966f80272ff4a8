import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from astraflow.errors import DataError
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.snapshot import (
    model_files,
    read_model,
    read_safetensors,
    snapshot_to_folder,
    write_safetensors,
)
from drivers.weight_fakes import make_host_tensor, make_weights
from drivers.weight_files import make_weights as make_model_weights
from drivers.weight_files import write_model_folder


def by_name(tensors: tuple[HostTensor, ...] | list[HostTensor]) -> dict[str, tuple[object, ...]]:
    return {t.name: (t.shape, t.dtype, t.data.tobytes()) for t in tensors}


def make_snapshot(folder: Path) -> WeightSnapshot:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    return WeightSnapshot("actor", 3, tuple(make_weights()), folder)


def test_a_file_comes_back_bit_equal(tmp_path: Path) -> None:
    weights = [*make_weights(), make_host_tensor("scalar", ()), make_host_tensor("none", (0, 3))]
    write_safetensors(tmp_path / "a.safetensors", weights)
    assert by_name(read_safetensors(tmp_path / "a.safetensors")) == by_name(weights)


def test_the_bytes_follow_the_published_format(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", make_weights())
    data = (tmp_path / "a.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert 8 + length + spans[-1][1] == len(data)
    assert all(header[t.name]["data_offsets"][0] % 4 == 0 for t in make_weights() if t.dtype == "float32")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 10**9),
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 62) + b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(62),
        struct.pack("<Q", 62)
        + b'{"w":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}'.ljust(62)
        + b"x" * 8,
    ],
)
def test_a_broken_file_is_a_data_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.safetensors"):
        read_safetensors(tmp_path / "a.safetensors")


def test_a_missing_file_or_model_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_safetensors(tmp_path / "absent.safetensors")
    with pytest.raises(DataError, match=r"has no config\.json"):
        read_model(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, list[HostTensor]]:
    """A model folder, and its tensors in the order of their names."""
    folder = write_model_folder(tmp_path / "model")
    return folder, sorted(make_model_weights().values(), key=lambda t: t.name)


def test_a_model_in_several_files_is_read_whole(model: tuple[Path, list[HostTensor]]) -> None:
    folder, weights = model
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model-1.safetensors", weights[:2])
    write_safetensors(folder / "model-2.safetensors", weights[2:])
    index = {"weight_map": {t.name: f"model-{1 if t in weights[:2] else 2}.safetensors" for t in weights}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert by_name(read_model(folder)) == by_name(weights)


def test_only_the_weights_of_a_checkpoint_folder_are_read(model: tuple[Path, list[HostTensor]]) -> None:
    folder, weights = model
    write_safetensors(folder / "optimizer-00001-of-00001.safetensors", [make_host_tensor("exp_avg", (2,))])
    assert [t.name for t in read_model(folder)] == [t.name for t in weights]


def test_of_two_layouts_of_one_model_the_one_that_the_index_names_is_read(
    model: tuple[Path, list[HostTensor]],
) -> None:
    folder, weights = model
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    write_safetensors(folder / "consolidated.safetensors", weights)
    index = {"weight_map": {t.name: "model-00001-of-00001.safetensors" for t in weights}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [t.name for t in read_model(folder)] == [t.name for t in weights]


def test_a_tied_weight_that_is_stored_twice_is_read_once(model: tuple[Path, list[HostTensor]]) -> None:
    folder, weights = model
    head = replace(weights[0], name="lm_head.weight")
    write_safetensors(folder / "model.safetensors", [*weights, head])
    assert by_name(read_model(folder)) == by_name(weights)


def test_a_snapshot_becomes_a_model_folder(tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "files")
    snapshot_to_folder(snapshot, tmp_path / "out" / "model")
    assert by_name(read_safetensors(tmp_path / "out" / "model" / "model.safetensors")) == by_name(
        make_weights()
    )
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert config == {"dtype": "float32"}  # the weights have several, of which it is the widest
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model"]


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exists; choose a new folder"):
        snapshot_to_folder(make_snapshot(tmp_path / "files"), tmp_path)


def test_only_small_plain_files_travel(tmp_path: Path) -> None:
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "x.py",
        "model.safetensors.index.json",
    ):
        (tmp_path / name).write_text("")
    (tmp_path / "folder.json").mkdir()
    assert set(model_files(tmp_path)) == {"config.json", "tokenizer.json"}
