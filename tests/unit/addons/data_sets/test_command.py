"""`astraflow data`, as its users call it."""

from pathlib import Path

import pytest

from astraflow.cli.main import main
from drivers.published_rows import write_published


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_list_has_a_line_for_each_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("deepscaler        math    40,315 problems")
    assert all(len(line) <= 110 for line in lines)


def test_a_data_set_is_prepared_and_says_how_many_rows_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_published("deepscaler", Path("published"))
    assert run("data", "prepare", "deepscaler", "--from", "published", "--verify") == 0
    assert capsys.readouterr().out.splitlines() == [
        "agentica-org/DeepScaleR-Preview-Dataset: deepscaler.json",
        "data/deepscaler/train.jsonl: 2 tasks, split train",
        "  1 rows left out: it has no answer",
        "data/deepscaler: all checksums agree",
    ]
    assert run("data", "prepare", "deepscaler") == 0
    assert capsys.readouterr().out.splitlines()[0] == "deepscaler: data/deepscaler is up to date"


def test_one_folder_for_two_data_sets_and_an_unknown_name_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("data", "prepare", "aime24", "aime25", "--out", "x") == 2
    assert "--out names the folder of one data set" in capsys.readouterr().err
    assert run("data", "prepare", "aime23") == 2
    assert "'aime23' is not a known data set; did you mean" in capsys.readouterr().err
