"""A file that a user names is read with bounds, and what isn't a regular file is refused at once."""

import os
import socket
from pathlib import Path

import pytest

from astraflow.errors import DataError
from astraflow.models.stop_ids import declared_stop_ids
from astraflow.models.weight_files import check_weight_files
from astraflow.tasks.config import JsonlSourceConfig
from astraflow.tasks.sources import make_source
from astraflow.user_input.user_files import format_path, is_there, json_value, read_file


def test_what_is_no_file_is_named_by_its_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    told = {
        tmp_path: "is a folder; expected a file",
        tmp_path / "pipe": "is a pipe; expected a file",
        Path("/dev/zero"): "is a device; expected a file",
        tmp_path / "nowhere": "cannot be read: No such file",
        tmp_path / "broken": "cannot be read: No such file",
        tmp_path / "loop": "cannot be read: Too many levels of symbolic links",
        tmp_path / ("x" * 300): "cannot be read: File name too long",
        tmp_path / "a\0b": "cannot be read: embedded null byte",
    }
    for path, problem in told.items():
        with pytest.raises(DataError, match=problem):
            read_file(path, "prices")


def test_a_socket_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with pytest.raises(DataError, match="is a socket"):
            read_file(Path("s"), "prices")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_file(file, "prices", max_bytes=5) == b"12345"
    with pytest.raises(DataError, match="has more than 4 bytes"):
        read_file(file, "prices", max_bytes=4)


def test_a_path_that_cannot_be_one_is_not_there() -> None:
    assert not is_there(Path("x" * 5000))
    assert not is_there(Path("a\0b"))
    assert is_there(Path("/"))


def test_a_long_or_hidden_path_is_shown_in_short() -> None:
    assert format_path(Path("a/b c")) == "a/b c"
    assert format_path(Path("a\nb")) == r"'a\nb'"
    assert len(format_path(Path("x" * 5000))) == 300


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b'{"a": 1,\n "b": }', "FILE, line 2 is not valid JSON"),
        (b'{"a": 1,\n "b": "\xff"}', "FILE, line 2 is not UTF-8"),
        ("[" * 100_000, "FILE is not usable: its JSON is nested too deeply"),
        ("1" * 5000, "FILE is not usable: Exceeds the limit"),
    ],
)
def test_a_json_text_that_cannot_be_read_is_refused_with_its_line(text: str | bytes, told: str) -> None:
    with pytest.raises(DataError, match=told):
        json_value(text, "FILE")


def sources_of(path: Path) -> None:
    make_source(JsonlSourceConfig(path=str(path)), name="s")


def test_a_task_file_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, told in (
        (tmp_path / "pipe", "is a pipe"),
        (tmp_path, "is a folder"),
        (Path("/dev/zero"), "device"),
    ):
        with pytest.raises(DataError, match=told):
            sources_of(path)
    for name in ("nowhere", "x" * 5000, "a\0b"):
        with pytest.raises(DataError, match="does not exist") as caught:
            sources_of(tmp_path / name)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("how", ["deep", "pipe"])
def test_a_file_of_a_model_that_cannot_be_read_is_refused_at_once(
    tmp_path: Path, name: str, how: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / name
    if how == "deep":
        file.write_text('{"a": ' + "[" * 100_000)
    else:
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    read = check_weight_files if name.startswith("model") else declared_stop_ids
    with pytest.raises(DataError, match=r"nested too deeply|is a pipe"):
        read(tmp_path)
