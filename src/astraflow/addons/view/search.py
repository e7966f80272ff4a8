"""Finds episodes in an index, newest first, in bounded time.

A run may have millions of episodes, and a filter may match none of them. A search therefore scans the rows in
windows until it has enough results or its time is up. It reports where it stopped, and the caller continues
from there. Groups and tasks are looked up by index. Words are looked for in the episodes themselves.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from astraflow.addons.view.filters import EpisodeFilter, Range
from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.addons.view.word_search import WordSearch

__all__ = [
    "EpisodeDict",
    "SearchPage",
    "all_found",
    "choices",
    "group_rows",
    "ids_of",
    "row_of",
    "rows_of",
    "search",
]

_WINDOW = 20_000
"""Number of rows scanned between two checks of the time."""
_SELECT = """
SELECT e.id, CASE e.kind WHEN 1 THEN 'eval' ELSE 'train' END AS kind, e.group_id AS "group",
    e.episode_idx AS episode, e.attempt, e.part, e.at_s, e.duration_s, t.name AS task, p.name AS policy,
    r.name AS role, w.name AS worker,
    e.reward, e.score, e.advantage, e.tokens, e.trained_tokens, e.turns, e.oldest AS oldest_version,
    e.newest AS newest_version, f.name AS finish, x.name AS error, a.name AS fate, e.step, e.staleness
FROM episodes e
LEFT JOIN tasks t ON t.id = e.task LEFT JOIN names p ON p.id = e.policy LEFT JOIN names r ON r.id = e.role
LEFT JOIN names w ON w.id = e.worker LEFT JOIN names f ON f.id = e.finish LEFT JOIN names x ON x.id = e.error
LEFT JOIN names a ON a.id = e.fate
"""

EpisodeDict = dict[str, Any]
"""One episode as the page, JSONL and Parquet show it."""


@dataclass(frozen=True, slots=True)
class SearchPage:
    """The result of one search."""

    rows: list[EpisodeDict]
    next_before: int | None
    """Pass this as `before` to continue the search; None if all rows were searched."""
    num_episodes: int
    """Number of rows in the index."""
    matches: dict[int, str] = field(default_factory=dict[int, str])
    """Episode -> a line with the words that were looked for."""


@dataclass(slots=True)
class _Conditions:
    parts: list[str] = field(default_factory=list[str])
    values: list[object] = field(default_factory=list[object])
    is_indexed: bool = False
    """Whether one of the conditions finds its rows by an index, so that no windows are needed."""

    def add(self, part: str, *values: object) -> None:
        self.parts.append(part)
        self.values += values


def search(
    database: sqlite3.Connection,
    filters: EpisodeFilter,
    *,
    before: int | None = None,
    limit: int = 50,
    longest_s: float = 0.05,
    words: WordSearch | None = None,
) -> SearchPage:
    """Finds episodes with row numbers below `before`, newest first. Raises: sqlite3.Error.

    `words` looks for words; without it, no episode has any.
    """
    deadline_s = time.monotonic() + longest_s
    newest = int(database.execute("SELECT max(id) FROM episodes").fetchone()[0] or 0)
    upper = newest if before is None else min(newest, before - 1)
    conditions = _conditions(database, filters)
    window = newest if conditions.is_indexed else _WINDOW
    # If a condition has a selective index, use it. Otherwise, keep SQLite from using an index, because a
    # window must be a bounded scan of rows.
    order = "" if conditions.is_indexed else " NOT INDEXED"
    query = (
        f"SELECT e.id FROM episodes e{order} WHERE "
        f"{' AND '.join(['e.id BETWEEN ? AND ?', *conditions.parts])} ORDER BY e.id DESC"
    )
    ids: list[int] = []
    matches: dict[int, str] = {}
    while upper > 0 and len(ids) < limit:
        lower = max(1, upper - window + 1)
        last = lower
        for (episode_id,) in database.execute(query, (lower, upper, *conditions.values)):
            if filters.text:
                matches[episode_id] = words.line(episode_id, filters.text) if words else ""
            if not filters.text or matches[episode_id]:
                ids.append(episode_id)
            # Reading what was said takes time, so a search for words may end within a window.
            if len(ids) >= limit or (filters.text and time.monotonic() > deadline_s):
                last = episode_id
                break
        upper = last - 1
        if time.monotonic() > deadline_s:
            break
    lines = {episode_id: line for episode_id, line in matches.items() if line}
    return SearchPage(rows_of(database, ids), upper + 1 if upper > 0 else None, newest, lines)


def all_found(
    database: sqlite3.Connection, filters: EpisodeFilter, *, limit: int, words: WordSearch | None = None
) -> Iterator[EpisodeDict]:
    """Yields up to `limit` episodes, newest first, however long it takes. Raises: sqlite3.Error."""
    before: int | None = None
    while limit > 0:
        page = search(database, filters, before=before, limit=min(limit, 500), words=words)
        yield from page.rows
        limit -= len(page.rows)
        before = page.next_before
        if before is None:
            return


def row_of(database: sqlite3.Connection, episode_id: int) -> EpisodeDict | None:
    """Returns one episode; None if no episode has this id."""
    return next(iter(rows_of(database, [episode_id])), None)


def group_rows(
    database: sqlite3.Connection, kind: str, group_id: int, *, limit: int = 512
) -> list[EpisodeDict]:
    """Returns the episodes of a group in order, up to `limit`."""
    query = (
        "SELECT id FROM episodes WHERE group_id = ? AND kind = ? ORDER BY episode_idx, attempt, part LIMIT ?"
    )
    code = EVAL if kind == "eval" else TRAIN
    return rows_of(database, [row[0] for row in database.execute(query, (group_id, code, limit))])


def choices(database: sqlite3.Connection) -> dict[str, list[str]]:
    """Returns the choices for filters: the names that occur in some columns."""
    names_of: dict[str, list[str]] = {}
    for column in ("policy", "role", "worker", "error"):
        # This takes one lookup per name; a DISTINCT would read all episodes.
        query = f"SELECT name FROM names WHERE id IN (SELECT value FROM seen WHERE name = '{column}')"
        names_of[column] = sorted(row[0] for row in database.execute(query))
    return names_of


def rows_of(database: sqlite3.Connection, ids: Sequence[int]) -> list[EpisodeDict]:
    """Returns the episodes with these ids, in the order of `ids`."""
    if not ids:
        return []
    query = f"{_SELECT} WHERE e.id IN ({', '.join('?' * len(ids))})"
    rows = {row[0]: dict(row) for row in database.execute(query, ids)}
    return [rows[idx] for idx in ids if idx in rows]


def _conditions(database: sqlite3.Connection, filters: EpisodeFilter) -> _Conditions:
    conditions = _Conditions()
    if filters.group:
        conditions.add("e.group_id = ?", int(filters.group))
        conditions.is_indexed = True
    if filters.kind:
        conditions.add("e.kind = ?", EVAL if filters.kind == "eval" else TRAIN)
    for column, name in (("policy", filters.policy), ("role", filters.role), ("finish", filters.finish)):
        if name:
            conditions.add(f"e.{column} = ?", _id_of(database, name))
    if filters.worker:
        conditions.add(
            "e.worker IN (SELECT id FROM names WHERE name = ? OR name GLOB ?)", *ids_of(filters.worker)
        )
    _add_task(database, conditions, filters.task)
    _add_ends(database, conditions, filters)
    _add_ranges(conditions, filters)
    return conditions


def _add_task(database: sqlite3.Connection, conditions: _Conditions, task: str) -> None:
    if task.endswith("*"):
        # All names from the prefix up to its last possible continuation.
        conditions.add(
            "e.task IN (SELECT id FROM tasks WHERE name >= ? AND name < ?)",
            task[:-1],
            task[:-1] + "\U0010ffff",
        )
    elif task:
        row = database.execute("SELECT id FROM tasks WHERE name = ?", (task,)).fetchone()
        conditions.add("e.task = ?", row[0] if row else -1)
        conditions.is_indexed = True


def _add_ends(database: sqlite3.Connection, conditions: _Conditions, filters: EpisodeFilter) -> None:
    if filters.fate == "live":
        conditions.add("e.fate IS NULL AND e.kind = ?", TRAIN)
    elif filters.fate:
        conditions.add("e.fate = ?", _id_of(database, filters.fate))
    match filters.error:
        case "":
            pass
        case "any":
            conditions.add("e.error IS NOT NULL")
        case "none":
            conditions.add("e.error IS NULL")
        case name:
            conditions.add("e.error = ?", _id_of(database, name))


def _add_ranges(conditions: _Conditions, filters: EpisodeFilter) -> None:
    named: list[tuple[str, Range | None]] = [
        ("reward", filters.reward),
        ("advantage", filters.advantage),
        ("tokens", filters.tokens),
        ("step", filters.step),
    ]
    for column, limits in named:
        if limits is not None:
            conditions.add(f"e.{column} BETWEEN ? AND ?", limits.low, limits.high)
    if filters.version is not None:
        conditions.add("e.newest >= ? AND e.oldest <= ?", filters.version.low, filters.version.high)


def _id_of(database: sqlite3.Connection, name: str) -> int:
    """Returns the id of a name; -1, which no row has, if the name is unknown."""
    row = database.execute("SELECT id FROM names WHERE name = ?", (name,)).fetchone()
    return int(row[0]) if row else -1


def ids_of(worker: str) -> tuple[str, str]:
    """Returns a service's id and a pattern for the ids of services with this name."""
    escaped = "".join(f"[{char}]" if char in "*?[" else char for char in worker)
    return worker, f"{escaped}.*"
