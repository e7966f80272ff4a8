import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.view import schema
from astraflow.addons.view.facets import facets
from astraflow.addons.view.filters import filter_of
from astraflow.addons.view.index import RunIndex
from astraflow.addons.view.search import search
from astraflow.addons.view.stored_episodes import StoredEpisodes
from astraflow.addons.view.timeline import between
from astraflow.addons.view.token_text import TokenText
from astraflow.addons.view.word_search import WordSearch
from astraflow.dataflow.journal.journal_db import make_insert
from drivers.view_runs import WORKER, RunWriter


def rows_of(run_dir: Path, **filters: str) -> list[dict[str, Any]]:
    with RunIndex(run_dir) as index:
        assert index.refresh()
        with contextlib.closing(index.reader()) as database:
            with StoredEpisodes(database, index.folder.journal) as stored:
                words = WordSearch(database, stored, TokenText(index.folder))
                found = search(database, filter_of(filters), limit=1000, longest_s=60.0, words=words)
            assert found.next_before is None
            return found.rows


def notes_of(run_dir: Path) -> list[str]:
    with RunIndex(run_dir) as index:
        index.refresh()
        with contextlib.closing(index.reader()) as database:
            return [row[0] for row in database.execute("SELECT text FROM notes")]


def seen(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in reversed(rows)]


def test_each_trajectory_is_a_row_with_its_fate(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.group(0, [0.0, 1.0], version=3)
    run.group(1, [0.5, 0.5], fate="filtered")
    run.group(2, [1.0], fate=None)
    run.close()
    rows = rows_of(tmp_path)
    assert seen(rows, "task", "episode", "reward", "fate", "step") == [
        ("sums/0", 0, 0.0, "trained", 1),
        ("sums/0", 1, 1.0, "trained", 1),
        ("sums/1", 0, 0.5, "filtered", None),
        ("sums/1", 1, 0.5, "filtered", None),
        ("sums/2", 0, 1.0, None, None),
    ]
    assert rows[-1] == rows[-1] | {
        "kind": "train",
        "policy": "actor",
        "worker": WORKER,
        "newest_version": 3,
        "tokens": 4,
        "trained_tokens": 2,
        "finish": "stop",
        "staleness": 1,
        "duration_s": 0.25,
    }


def test_a_live_run_is_followed_by_one_process_after_another(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.draw(0)
    run.result("0.0.0", reward=0.25)
    run.flush()
    with RunIndex(tmp_path) as index:
        assert index.refresh()
        run.result("0.1.0", reward=0.75)
        run.flush()
        assert index.refresh()
        filled = index.path.open("rb")
    # A process that begins now knows the group only from the index.
    run.result("0.1.0", reward=0.75)  # sent again
    run.decide(0, "trained", step=4)
    run.close()
    assert seen(rows_of(tmp_path), "episode", "reward", "fate", "step") == [
        (0, 0.25, "trained", 5),
        (1, 0.75, "trained", 5),
    ]
    with filled:
        assert os.fstat(filled.fileno()).st_nlink == 1, "the index was built again"


def test_failed_attempts_are_rows_with_their_words(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.draw(0)
    run.fail("0.0.0", "the sandbox died of <script>", error_class="sandbox")
    run.result("0.0.1", reward=1.0)
    run.close()
    assert seen(rows_of(tmp_path, error="any"), "error", "attempt", "worker") == [("sandbox", 0, WORKER)]
    assert seen(rows_of(tmp_path, text="died of <script>"), "error") == [("sandbox",)]
    assert seen(rows_of(tmp_path, error="none"), "reward") == [(1.0,)]


def test_evaluations_get_task_policy_and_text_from_their_messages(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.eval_result("e0.0.0", 1.0)
    run.eval_result("e0.1.0", 0.0)
    run.transcript(0, 1.0, "Calculate 1 + 1.", kind="eval", task="heldout/a")
    run.transcript(0, 0.0, "Calculate 2 + 2.", kind="eval", task="heldout/b")
    run.close()
    assert seen(rows_of(tmp_path, kind="eval"), "task", "policy", "score", "newest_version") == [
        ("heldout/a", "actor", 1.0, 3),
        ("heldout/b", "actor", 0.0, 3),
    ]
    assert seen(rows_of(tmp_path, text="2 + 2"), "task") == [("heldout/b",)]
    assert seen(rows_of(tmp_path, text="+"), "task") == [("heldout/a",), ("heldout/b",)]


def test_damage_is_noted_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    for group in range(4):
        run.group(group, [0.0, 1.0])
        run.flush()
    run.close()
    path = run.segments / "00000000.seg"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(8)
    path.write_bytes(data)
    shown = {row["group"] for row in rows_of(tmp_path)}
    assert {0, 3} <= shown < {0, 1, 2, 3}
    assert any("damaged from byte" in note for note in notes_of(tmp_path))


def test_an_index_of_another_version_or_run_or_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.group(0, [1.0])
    run.close()
    path = tmp_path / "view" / "index.sqlite"
    expected = rows_of(tmp_path)
    for statement in (
        "UPDATE meta SET value = '0' WHERE key = 'version'",
        "UPDATE meta SET value = 'x' WHERE key = 'run_id'",
    ):
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(statement)
            database.execute("DELETE FROM episodes")
            database.commit()
        assert rows_of(tmp_path) == expected
    path.write_bytes(b"no database at all, and longer than a header of SQLite would be: " * 40)
    assert rows_of(tmp_path) == expected


def test_a_log_that_a_crash_cut_is_read_again(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.group(0, [1.0])
    run.flush()
    path = run.segments / "00000000.seg"
    shorter = path.read_bytes()
    run.group(1, [1.0])
    run.close()
    assert len(rows_of(tmp_path)) == 2
    path.write_bytes(shorter)
    assert seen(rows_of(tmp_path), "group") == [(0,)]


def test_a_log_that_ends_without_records_is_read_again(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.group(0, [0.5])
    run.flush()
    run.flush(is_forced=True)
    run.close()
    assert len(rows_of(tmp_path)) == 1
    assert len(rows_of(tmp_path)) == 1  # by a new viewer, which checks where the log ended


def test_two_viewers_of_one_run_see_the_same(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.group(0, [1.0])
    run.flush()
    with RunIndex(tmp_path) as first, RunIndex(tmp_path) as second:
        assert first.refresh()
        assert second.refresh()
        run.group(1, [1.0])
        run.close()
        assert second.refresh()
        assert first.refresh()
        with contextlib.closing(first.reader()) as database:
            assert search(database, filter_of({})).num_episodes == 2


def test_a_place_that_cannot_be_a_folder_gives_a_temporary_index(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.group(0, [1.0])
    run.close()
    (tmp_path / "view").write_text("in the way")
    assert len(rows_of(tmp_path)) == 1
    assert any("temporary" in note for note in notes_of(tmp_path))


def test_a_missing_database_leaves_the_episodes(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.group(0, [1.0])
    run.close()
    path = tmp_path / "journal" / "journal.sqlite"
    path.rename(tmp_path / "away")
    assert len(rows_of(tmp_path)) == 1
    assert any("journal.sqlite is missing" in note for note in notes_of(tmp_path))
    # A live run has its database a moment after its log: then nothing is wrong any more.
    (tmp_path / "away").rename(path)
    assert not any("journal.sqlite" in note for note in notes_of(tmp_path))


def test_the_longest_spans_of_a_part_of_the_run_are_found(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    for second in range(100):
        values = ("rollout-0", "generate", float(second), second + 0.5)
        run.tables.execute(*make_insert("telemetry", values))
    run.tables.execute(*make_insert("telemetry", ("trainer actor", "wait:dataflow", 40.0, 60.0)))
    run.close()
    with RunIndex(tmp_path) as index:
        index.refresh()
        with contextlib.closing(index.reader()) as database:
            whole = between(database, None, None)
            part = between(database, 50.2, 52.1)
    assert [(lane["name"], len(lane["spans"])) for lane in whole["lanes"]] == [
        ("rollout-0", 100),
        ("trainer actor", 1),
    ]
    assert part["lanes"] == [
        {
            "name": "rollout-0",
            "spans": [("generate", 50.0, 50.5), ("generate", 51.0, 51.5), ("generate", 52.0, 52.5)],
        },
        {"name": "trainer actor", "spans": [("wait:dataflow", 40.0, 60.0)]},
    ]


def counted(run_dir: Path, **chosen: str) -> dict[str, Any]:
    with RunIndex(run_dir) as index:
        index.refresh()
        with contextlib.closing(index.reader()) as database:
            found = facets(database, chosen)
    return {"num": found["num_counted"], **{name: dict(value) for name, value in found["counts"].items()}}


def test_each_filter_is_counted_under_the_values_of_the_others(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.flush()
    assert counted(tmp_path)["num"] == 0
    run.group(0, [0.0, 0.5, 1.0])
    run.group(1, [-1.0, 0.25], fate="stale")
    run.draw(2)
    run.fail("2.0.0", "it took too long")
    run.close()
    every = counted(tmp_path)
    assert every["num"] == 6
    assert every["kind"] == {"train": 6}
    assert every["fate"] == {"trained": 3, "stale": 2}
    assert every["reward"] == {"..0": 2, "0.000001..0.999999": 2, "1..": 1}
    assert (every["finish"], every["policy"]) == ({"stop": 5}, {"actor": 5})
    assert every["worker"] == {WORKER: 6}
    assert list(every["error"].values()) == [1]
    stale = counted(tmp_path, fate="stale")
    assert (stale["fate"], stale["reward"]) == (every["fate"], {"..0": 1, "0.000001..0.999999": 1})
    failed = counted(tmp_path, error="any")
    assert (failed["fate"], failed["kind"], failed["error"]) == ({}, {"train": 1}, every["error"])
    assert counted(tmp_path, error="none")["kind"] == {"train": 5}
    # A service is chosen with or without the suffix that each of its starts adds.
    for worker in (WORKER, WORKER.partition(".")[0]):
        assert counted(tmp_path, worker=worker)["kind"] == {"train": 6}
    assert counted(tmp_path, worker="rollout")["kind"] == {}
    # Only the three counted ranges narrow the other counts.
    assert counted(tmp_path, reward="1..")["kind"] == {"train": 1}
    assert counted(tmp_path, reward="0.3..0.6")["kind"] == {"train": 6}
    assert counted(tmp_path, kind="eval")["fate"] == {}


def test_an_index_that_another_program_locks_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_BUSY_TIMEOUT_S", 0.01)
    run = RunWriter(tmp_path)
    run.group(0, [0.0])
    run.close()
    assert len(rows_of(tmp_path)) == 1
    path = tmp_path / "view" / "index.sqlite"
    before = path.stat().st_ino
    with contextlib.closing(sqlite3.connect(path)) as other, RunIndex(tmp_path) as index:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            index.refresh()
    assert path.stat().st_ino == before
