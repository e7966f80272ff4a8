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
from astraflow.addons.view.said import Said
from astraflow.addons.view.schema import EVAL, TRAIN

__all__ = ["EpisodeDict", "Found", "all_found", "choices", "group_rows", "ids_of", "row_of", "rows_of", "search"]

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
class Found:
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
    wanted: EpisodeFilter,
    *,
    before: int | None = None,
    limit: int = 50,
    longest_s: float = 0.05,
    said: Said | None = None,
) -> Found:
    """Finds episodes with row numbers below `before`, newest first. Raises: sqlite3.Error.

    `said` finds words; without it, no episode has any.
    """
    deadline_s = time.monotonic() + longest_s
    newest = int(database.execute("SELECT max(id) FROM episodes").fetchone()[0] or 0)
    upper = newest if before is None else min(newest, before - 1)
    conditions = _conditions(database, wanted)
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
            if wanted.text:
                matches[episode_id] = said.line(episode_id, wanted.text) if said else ""
            if not wanted.text or matches[episode_id]:
                ids.append(episode_id)
            # Reading what was said takes time, so a search for words may end within a window.
            if len(ids) >= limit or (wanted.text and time.monotonic() > deadline_s):
                last = episode_id
                break
        upper = last - 1
        if time.monotonic() > deadline_s:
            break
    shown = {episode_id: line for episode_id, line in matches.items() if line}
    return Found(rows_of(database, ids), upper + 1 if upper > 0 else None, newest, shown)


def all_found(
    database: sqlite3.Connection, wanted: EpisodeFilter, *, limit: int, said: Said | None = None
) -> Iterator[EpisodeDict]:
    """Yields up to `limit` episodes, newest first, however long it takes. Raises: sqlite3.Error."""
    before: int | None = None
    while limit > 0:
        found = search(database, wanted, before=before, limit=min(limit, 500), said=said)
        yield from found.rows
        limit -= len(found.rows)
        before = found.next_before
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
    found: dict[str, list[str]] = {}
    for column in ("policy", "role", "worker", "error"):
        # This takes one lookup per name; a DISTINCT would read all episodes.
        query = f"SELECT name FROM names WHERE id IN (SELECT value FROM seen WHERE name = '{column}')"
        found[column] = sorted(row[0] for row in database.execute(query))
    return found


def rows_of(database: sqlite3.Connection, ids: Sequence[int]) -> list[EpisodeDict]:
    """Returns the episodes with these ids, in the order of `ids`."""
    if not ids:
        return []
    query = f"{_SELECT} WHERE e.id IN ({', '.join('?' * len(ids))})"
    rows = {row[0]: dict(row) for row in database.execute(query, ids)}
    return [rows[idx] for idx in ids if idx in rows]


def _conditions(database: sqlite3.Connection, wanted: EpisodeFilter) -> _Conditions:
    found = _Conditions()
    if wanted.group:
        found.add("e.group_id = ?", int(wanted.group))
        found.is_indexed = True
    if wanted.kind:
        found.add("e.kind = ?", EVAL if wanted.kind == "eval" else TRAIN)
    for column, name in (("policy", wanted.policy), ("role", wanted.role), ("finish", wanted.finish)):
        if name:
            found.add(f"e.{column} = ?", _id_of(database, name))
    if wanted.worker:
        found.add("e.worker IN (SELECT id FROM names WHERE name = ? OR name GLOB ?)", *ids_of(wanted.worker))
    _add_task(database, found, wanted.task)
    _add_ends(database, found, wanted)
    _add_ranges(found, wanted)
    return found


def _add_task(database: sqlite3.Connection, found: _Conditions, task: str) -> None:
    if task.endswith("*"):
        # All names from the prefix up to its last possible continuation.
        found.add(
            "e.task IN (SELECT id FROM tasks WHERE name >= ? AND name < ?)",
            task[:-1],
            task[:-1] + "\U0010ffff",
        )
    elif task:
        row = database.execute("SELECT id FROM tasks WHERE name = ?", (task,)).fetchone()
        found.add("e.task = ?", row[0] if row else -1)
        found.is_indexed = True


def _add_ends(database: sqlite3.Connection, found: _Conditions, wanted: EpisodeFilter) -> None:
    if wanted.fate == "live":
        found.add("e.fate IS NULL AND e.kind = ?", TRAIN)
    elif wanted.fate:
        found.add("e.fate = ?", _id_of(database, wanted.fate))
    match wanted.error:
        case "":
            pass
        case "any":
            found.add("e.error IS NOT NULL")
        case "none":
            found.add("e.error IS NULL")
        case name:
            found.add("e.error = ?", _id_of(database, name))


def _add_ranges(found: _Conditions, wanted: EpisodeFilter) -> None:
    named: list[tuple[str, Range | None]] = [
        ("reward", wanted.reward),
        ("advantage", wanted.advantage),
        ("tokens", wanted.tokens),
        ("step", wanted.step),
    ]
    for column, limits in named:
        if limits is not None:
            found.add(f"e.{column} BETWEEN ? AND ?", limits.low, limits.high)
    if wanted.version is not None:
        found.add("e.newest >= ? AND e.oldest <= ?", wanted.version.low, wanted.version.high)


def _id_of(database: sqlite3.Connection, name: str) -> int:
    """Returns the id of a name; -1, which no row has, if the name is unknown."""
    row = database.execute("SELECT id FROM names WHERE name = ?", (name,)).fetchone()
    return int(row[0]) if row else -1


def ids_of(worker: str) -> tuple[str, str]:
    """Returns a service's id and a pattern for the ids of services with this name."""
    escaped = "".join(f"[{char}]" if char in "*?[" else char for char in worker)
    return worker, f"{escaped}.*"
