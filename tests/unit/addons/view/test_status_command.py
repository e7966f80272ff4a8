"""`astraflow status`, as its users call it."""

from pathlib import Path

import pytest

from astraflow.cli.main import main


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(("status", *arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_what_is_no_run_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(str(tmp_path)) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_nobody_at_a_url_is_a_failure_not_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("http://127.0.0.1:9") == 1
    assert "Is the service running, healthy, and reachable?" in capsys.readouterr().err


def test_a_file_of_certificates_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "ca.pem")
    assert status("https://127.0.0.1:9", "--ca-file", missing) == 2
    assert f"--ca-file {missing} is not a file" in capsys.readouterr().err
