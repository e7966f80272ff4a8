import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from astraflow.addons.view.commands import Output, show_episode, show_episodes
from astraflow.addons.view.terminal import print_table
from astraflow.addons.view.trace_formats import rows_of
from astraflow.cli.main import main
from astraflow.errors import DataError
from drivers.view_runs import RunWriter


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = RunWriter(tmp_path / "run")
    run.group(0, [0.0, 1.0])
    run.fail("0.0.1", "worse \x1b[2J than expected")
    run.transcript(0, 1.0, "hello")
    run.close()
    return tmp_path / "run"


def test_episodes_are_listed_and_shown_in_full(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_episodes(run_dir, {"reward": "1"}, Output("table", None, 20))
    listed = capsys.readouterr()
    assert "sums/0" in listed.out
    assert listed.out.count("\n") == 2
    assert "recipe cannot be read" in listed.err
    show_episode(run_dir, 2)
    shown = capsys.readouterr().out
    assert "reward 1" in shown
    assert "hello" in shown
    with pytest.raises(DataError, match="no episode with id 99"):
        show_episode(run_dir, 99)


def test_no_escape_reaches_the_terminal(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_episode(run_dir, 3)
    assert "\x1b[2J" not in capsys.readouterr().out
    row = {
        "id": 1,
        "kind": "train",
        "group": 1,
        "episode": 0,
        "attempt": 0,
        "task": "\x1b[2Jt",
        "policy": "p\x07",
    }
    row |= dict.fromkeys(
        ("oldest_version", "newest_version", "reward", "advantage", "tokens", "finish", "fate")
    )
    file = io.StringIO()
    print_table(
        [row | {"error": "\x1b]0;x\x07", "completion": "[red]a\x1b[1m"}], Console(file=file, width=200)
    )
    assert "\x1b" not in file.getvalue()
    assert "\x07" not in file.getvalue()
    assert "[red]a" in file.getvalue()


def test_episodes_are_written_as_jsonl_and_parquet(run_dir: Path, tmp_path: Path) -> None:
    for form in ("jsonl", "parquet"):
        show_episodes(run_dir, {"error": "none"}, Output(form, tmp_path / f"out.{form}", 20))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    written = {"messages", "metrics"}  # which Parquet has as JSON
    assert lines == [
        {key: json.loads(value) if key in written else value for key, value in row.items()} for row in table
    ]
    assert [row["reward"] for row in lines] == [1.0, 0.0]
    assert all(row["completion"] and row["completion"] in row["text"] for row in lines)
    assert lines[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert lines[1]["metrics"] == {"turns": 1.0, "reward/exact": 0.0}


@pytest.mark.parametrize("form", ["atif", "trace", "messages"])
def test_episodes_are_exported_as_traces_with_their_tokens(run_dir: Path, tmp_path: Path, form: str) -> None:
    show_episodes(run_dir, {"error": "none"}, Output(form, tmp_path / "out.jsonl", 20))
    documents = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rows = [row for document in documents for row in rows_of(document)]
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert [row["id"] for row in rows] == ["run/train/0.1.0/0", "run/train/0.0.0/0"]
    for row in rows:
        _, answer = row["messages"]
        assert (answer["prompt_token_ids"], answer["token_ids"], answer["logprobs"]) == (
            [0, 1],
            [2, 3],
            [-0.5, -2],
        )


def test_the_command_passes_its_filters_on(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["episodes", str(run_dir), "--error", "any", "--format", "jsonl"])
    assert ended.value.code == 0
    assert [json.loads(line)["error"] for line in capsys.readouterr().out.splitlines()] == ["timeout"]


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        show_episodes(tmp_path, {}, Output("table", None, 20))
