import json
import logging
from pathlib import Path

import pytest

from astraflow.addons.trackers.row_feed import RowFeed, num_waiting


def write(path: Path, *steps: int) -> None:
    with path.open("ab") as file:
        for step in steps:
            file.write(json.dumps({"step": step}).encode() + b"\n")


def steps(feed: RowFeed) -> list[int]:
    return [row["step"] for row in feed.rows()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "metrics.jsonl", 1, 2)
    return tmp_path / "metrics.jsonl"


def test_rows_come_until_they_are_taken_and_then_never_again(path: Path, tmp_path: Path) -> None:
    feed = RowFeed(path, tmp_path)
    assert steps(feed) == steps(feed) == [1, 2]
    feed.advance()
    assert steps(feed) == []
    write(path, 3)
    assert steps(feed) == [3]
    again = RowFeed(path, tmp_path)
    assert steps(again) == [3]
    assert num_waiting(path, tmp_path) == 1
    again.advance()
    assert num_waiting(path, tmp_path) == 0


def test_a_tracker_that_is_named_later_gets_all_rows(path: Path, tmp_path: Path) -> None:
    RowFeed(path, tmp_path).rows()
    (tmp_path / "new").mkdir()
    assert steps(RowFeed(path, tmp_path / "new")) == [1, 2]


def test_a_line_that_is_still_being_written_waits(path: Path, tmp_path: Path) -> None:
    feed = RowFeed(path, tmp_path)
    with path.open("ab") as file:
        file.write(b'{"step"')
    assert steps(feed) == [1, 2]
    feed.advance()
    with path.open("ab") as file:
        file.write(b": 3}\n")
    assert steps(feed) == [3]


def test_many_rows_come_in_parts(path: Path, tmp_path: Path) -> None:
    write(path, *range(3, 251))
    feed = RowFeed(path, tmp_path)
    found: list[int] = []
    sizes: list[int] = []
    while part := steps(feed):
        feed.advance()
        found += part
        sizes.append(len(part))
    assert (found, sizes) == ([*range(1, 251)], [100, 100, 50])


def test_a_file_that_was_made_again_is_read_from_its_beginning(path: Path, tmp_path: Path) -> None:
    feed = RowFeed(path, tmp_path)
    feed.rows()
    feed.advance()
    path.unlink()
    write(path, 1)
    assert steps(feed) == [1]
    assert num_waiting(tmp_path / "nothing.jsonl", tmp_path) == 0


def test_names_without_end_are_bounded_and_said(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with path.open("ab") as file:
        for n in range(50):
            row = {"step": n} | {f"episode/task-{n}-{k}": 1.0 for k in range(100)}
            file.write(json.dumps(row).encode() + b"\n")
    feed = RowFeed(path, tmp_path)
    with caplog.at_level(logging.WARNING):
        names = {name for row in feed.rows() for name in row}
    assert len(names) == 2000
    assert [record.message for record in caplog.records if "more than 2000 names" in record.message] != []
    assert len(caplog.records) == 1
