import json
import struct
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
    with pytest.raises(DataError, match=r"has no \*\.safetensors"):
        read_model(tmp_path)


def test_a_model_in_several_files_is_read_whole(tmp_path: Path) -> None:
    weights = make_weights()
    write_safetensors(tmp_path / "model-1.safetensors", weights[:2])
    write_safetensors(tmp_path / "model-2.safetensors", weights[2:])
    assert [t.name for t in read_model(tmp_path)] == [t.name for t in weights]


def test_only_the_weights_of_a_checkpoint_folder_are_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", make_weights())
    write_safetensors(tmp_path / "optimizer-00001-of-00001.safetensors", [make_host_tensor("exp_avg", (2,))])
    assert [t.name for t in read_model(tmp_path)] == sorted(t.name for t in make_weights())


def test_of_two_layouts_of_one_model_the_one_that_the_index_names_is_read(tmp_path: Path) -> None:
    weights = sorted(make_weights(), key=lambda t: t.name)
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", weights)
    write_safetensors(tmp_path / "consolidated.safetensors", weights)
    index = {"weight_map": {t.name: "model-00001-of-00001.safetensors" for t in weights}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [t.name for t in read_model(tmp_path)] == [t.name for t in weights]


def test_a_snapshot_becomes_a_model_folder(tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "files")
    snapshot_to_folder(snapshot, tmp_path / "out" / "model")
    assert by_name(list(read_model(tmp_path / "out" / "model"))) == by_name(make_weights())
    assert (tmp_path / "out" / "model" / "config.json").read_text() == "{}"
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
