"""A path, URL or text that can't be right is answered by a command with one sentence, and at once."""

import os
from pathlib import Path

import pytest

from astraflow.cli.main import main

WRONG = {
    "a looping link": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
    "noise": lambda path: path.write_bytes(bytes(range(256))),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
}
COMMANDS = ("status", "audit", "episodes", "report", "sweep", "run", "plan", "doctor", "drop-batch", "eval")
MORE = {"run": ("--dry-run",), "drop-batch": ("actor",)}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr().err
    assert ended.value.code in {1, 2}
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("wrong", WRONG)
def test_a_path_that_is_no_run_and_no_recipe_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    WRONG[wrong](tmp_path / "x")
    for command in COMMANDS:
        more = MORE.get(command, ())
        for place in ("x", str(tmp_path / "x")):
            assert "x" in refused(capsys, command, place, *more), command


@pytest.mark.parametrize("url", ["http://[::1", "http://", "https://:80", "http://x:99999", "ftp://x", "x"])
def test_a_url_that_is_none_is_refused_at_once(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert "is not the URL of a dataflow" in refused(capsys, "join", url)
    if url.startswith("http"):
        for command in ("status", "drop-batch"):
            assert "is not the URL of a dataflow" in refused(capsys, command, url, *MORE.get(command, ()))


def test_a_token_that_no_header_can_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    for content in (b"two\nlines", b"\xff\xfe", b"nul\0"):
        file.write_bytes(content)
        assert "one line of printable UTF-8" in refused(
            capsys, "status", "http://127.0.0.1:9", "--token-file", str(file)
        )
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "two\nlines")
    assert "$ASTRAFLOW_TOKEN must be" in refused(capsys, "join", "http://127.0.0.1:9")


def test_names_that_are_no_unicode_are_shown_with_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/bad\xe9")
    for command in ("status", "audit", "episodes", "run"):
        refused(capsys, command, odd)
