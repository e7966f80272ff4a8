"""Folders whose weights are not whole."""

import json
from pathlib import Path

import numpy as np
import pytest

from astraflow.errors import DataError
from astraflow.models.weight_files import check_weight_files
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.snapshot import write_safetensors
from drivers.weight_files import NO_TENSORS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two whole files and their index."""
    for idx in (1, 2):
        data = np.arange(64, dtype=np.uint8)
        write_safetensors(
            tmp_path / f"model-{idx}.safetensors", [HostTensor(f"w{idx}", (4, 4), "float32", data)]
        )
    index = {"weight_map": {f"w{idx}": f"model-{idx}.safetensors" for idx in (1, 2)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_whole_files_pass(folder: Path) -> None:
    check_weight_files(folder)
    (folder / "empty.safetensors").write_bytes(NO_TENSORS)
    check_weight_files(folder)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_file_that_is_cut_short_is_named(kept: int, folder: Path) -> None:
    path = folder / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"model-2\.safetensors has \d+ (of \d+ )?bytes"):
        check_weight_files(folder)


def test_a_file_that_the_index_names_and_is_missing_is_named(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(DataError, match=r"lacks model-2\.safetensors, .*index\.json"):
        check_weight_files(folder)


def test_parts_without_an_index_are_refused_as_transformers_would(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(DataError, match=r"it has model-1\.safetensors, model-2\.safetensors, but neither"):
        check_weight_files(folder)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("model-1.safetensors", "version https://git-lfs.github.com/spec/v1\noid 1\n", "git lfs pull"),
        ("model-1.safetensors", "\x03" + "\0" * 7 + "[1]", "the header of its model-1.safetensors is broken"),
        ("model.safetensors.index.json", "{", "its model.safetensors.index.json, line 1 is not valid JSON"),
        ("model.safetensors.index.json", "[]", "its model.safetensors.index.json is broken"),
    ],
)
def test_what_is_no_file_of_weights_is_named(name: str, content: str, problem: str, folder: Path) -> None:
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=problem):
        check_weight_files(folder)


def test_a_folder_without_weights_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \*.safetensors"):
        check_weight_files(tmp_path)
