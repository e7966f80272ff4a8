import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.addons.view.filters import Range, filter_of
from astraflow.addons.view.index import RunIndex
from astraflow.addons.view.search import all_found, group_rows, search
from astraflow.addons.view.stored_episodes import StoredEpisodes
from astraflow.addons.view.token_text import TokenText
from astraflow.addons.view.word_search import WordSearch
from astraflow.errors import ConfigError
from drivers.talk_runs import said, save_tokenizer, talk
from drivers.view_runs import RunWriter


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    run = RunWriter(tmp_path)
    for group in range(10):
        run.group(group, [group / 10, 1.0], version=group, fate="trained" if group % 2 else "stale")
    run.close()
    with RunIndex(tmp_path) as index:
        index.refresh()
        with contextlib.closing(index.reader()) as reader:
            yield reader


@pytest.mark.parametrize(
    ("filters", "groups"),
    [
        ({"reward": "0.1..0.3"}, {1, 2, 3}),
        ({"reward": "..0"}, {0}),
        ({"version": "8.."}, {8, 9}),
        ({"task": "sums/4"}, {4}),
        ({"task": "sums/*", "fate": "trained"}, {1, 3, 5, 7, 9}),
        ({"task": "none"}, set()),
        ({"step": "4"}, {3}),
        ({"worker": "rollout-0", "group": "7"}, {7}),
        ({"worker": "rollout"}, set()),
        ({"policy": "actor", "finish": "length"}, set()),
        ({"policy": "nobody"}, set()),
        ({"tokens": "4", "role": "actor", "fate": "stale", "reward": "0.8"}, {8}),
    ],
)
def test_all_filters_must_pass(
    database: sqlite3.Connection, filters: dict[str, str], groups: set[int]
) -> None:
    found = search(database, filter_of(filters), longest_s=60.0)
    assert {row["group"] for row in found.rows} == groups


def test_a_search_goes_on_where_it_stopped(database: sqlite3.Connection) -> None:
    wanted = filter_of({"reward": "1"})
    first = search(database, wanted, limit=4)
    second = search(database, wanted, limit=100, before=first.next_before, longest_s=60.0)
    assert [row["group"] for row in (*first.rows, *second.rows)] == list(range(9, -1, -1))
    assert second.next_before is None
    assert [row["group"] for row in all_found(database, wanted, limit=7)] == list(range(9, 2, -1))


def test_a_search_without_time_still_moves_on(database: sqlite3.Connection) -> None:
    found = search(database, filter_of({"reward": "7"}), longest_s=0.0)
    assert found.rows == []
    assert found.next_before is None or found.next_before < found.num_episodes


def test_a_group_is_shown_in_its_order(database: sqlite3.Connection) -> None:
    assert [(row["episode"], row["reward"]) for row in group_rows(database, "train", 3)] == [
        (0, 0.3),
        (1, 1.0),
    ]


@pytest.mark.parametrize(
    ("filters", "problem"),
    [
        ({"reward": "high"}, "reward = 'high' is not a range"),
        ({"reward": "1..0"}, "is not a range"),
        ({"reward": ".."}, "is not a range"),
        ({"fate": "trainde"}, 'did you mean "trained"'),
        ({"tasks": "a"}, "'tasks' is not a filter"),
        ({"group": "1; DROP TABLE episodes"}, "is not the number"),
        ({"task": "x" * 5000}, "too many"),
    ],
)
def test_a_wrong_filter_is_named(filters: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        filter_of(filters)


def test_words_are_found_in_what_was_said_however_long_it_takes(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run")
    run.draw(0, size=3)
    for idx, words in enumerate(("So I carry one.", "I forgot", '100 % of \\_ "CARRY"')):
        run.play(f"0.{idx}.0", talk("What is 8 + 7?", said(words)))
    run.fail("0.3.0", "it could not carry on")
    run.close()
    save_tokenizer(tmp_path / "run", tmp_path / "model", "actor")
    with RunIndex(tmp_path / "run") as index:
        index.refresh()
        texts = TokenText(index.folder)
        with (
            contextlib.closing(index.reader()) as reader,
            StoredEpisodes(reader, index.folder.journal) as stored,
        ):
            read = WordSearch(reader, stored, texts)
            whole = search(reader, filter_of({"text": "carry"}), longest_s=60.0, words=read)
            assert [row["episode"] for row in whole.rows] == [3, 2, 0]
            assert [*whole.matches.values()][-1].endswith("8 + 7?So I carry one.")
            found = list(
                all_found(reader, filter_of({"text": "Carry", "error": "none"}), limit=9, words=read)
            )
            assert [row["episode"] for row in found] == [2, 0]
            for text, num in (('" OR body MATCH "x', 0), ("%", 1), ("\\_", 1), ("*", 0)):
                assert len(search(reader, filter_of({"text": text}), longest_s=60.0, words=read).rows) == num
            # Without time, each search looks at one episode and says where to go on.
            first = search(reader, filter_of({"text": "forgot"}), longest_s=0.0, words=read)
            assert (first.rows, first.next_before) == ([], 4)


def test_a_range_is_inclusive() -> None:
    assert Range.parse("reward", "0.5..1") == Range(0.5, 1.0)
    assert Range.parse("reward", "-1") == Range(-1.0, -1.0)
