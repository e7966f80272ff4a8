"""Ready searches: the episodes and tasks that people look for first.

Each looks at the newest episodes only, so that it takes the same time for a run of millions of episodes.
"""

import sqlite3
from collections.abc import Callable, Mapping

from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.addons.view.search import EpisodeDict, rows_of
from astraflow.errors import ConfigError

__all__ = ["READY", "ready"]

_NUM_NEWEST = 100_000
"""Episodes that a ready search looks at."""
_NUM_SHOWN = 50
_REASONS = {
    "filtered": "a filter dropped its group, for example because all rewards in it are equal",
    "stale": "its group was too old when a batch was taken",
    "evicted": "the table was full, or its batch was dropped",
    "failed": "too few episodes of its group succeeded",
    "unadmitted": "the policy had no ticket for its group",
    "unused": "the policy sampled nothing in its group",
    "cancelled": "the run ended first",
}
"""What fates mean."""
_MIN_TIMES = 2
"""A task that was played less often says nothing about change."""


def ready(database: sqlite3.Connection, name: str) -> list[EpisodeDict]:
    """Returns the episodes of a ready search, the most telling first; each has a `note` that says why.

    Raises: ConfigError if there is no such search; sqlite3.Error.
    """
    if name not in READY:
        raise ConfigError(f"{name[:100]!r} is none of {', '.join(READY)}")
    newest = int(database.execute("SELECT max(id) FROM episodes").fetchone()[0] or 0)
    notes = READY[name](database, newest - _NUM_NEWEST)
    return [{**row, "note": notes[row["id"]]} for row in rows_of(database, list(notes))]


def _notes(database: sqlite3.Connection, condition: str, order: str, note: str, after: int) -> dict[int, str]:
    query = (
        f"SELECT id, {note} FROM episodes NOT INDEXED WHERE id > ? AND {condition} ORDER BY {order} LIMIT ?"
    )
    return dict(database.execute(query, (after, _NUM_SHOWN)).fetchall())


def _longest(database: sqlite3.Connection, after: int) -> dict[int, str]:
    return _notes(database, "tokens IS NOT NULL", "tokens DESC, id DESC", "tokens || ' tokens'", after)


def _strange(database: sqlite3.Connection, after: int) -> dict[int, str]:
    """Failed, cut off, or with a reward far from what its group led to expect."""
    condition = f"(error IS NOT NULL OR (kind = {TRAIN} AND abs(advantage) >= 2) OR "
    condition += "finish IN (SELECT id FROM names WHERE name IN ('length', 'abort')))"
    note = "CASE WHEN error IS NOT NULL THEN 'failed' WHEN abs(advantage) >= 2 THEN "
    note += "'unlike the rest of its group' ELSE 'cut off' END"
    return _notes(database, condition, "id DESC", note, after)


def _across_versions(database: sqlite3.Connection, after: int) -> dict[int, str]:
    note = "'versions ' || oldest || ' to ' || newest"
    return _notes(database, "oldest < newest", "id DESC", note, after)


def _discarded(database: sqlite3.Connection, after: int) -> dict[int, str]:
    """Episodes of groups that weren't trained on, with the reason."""
    condition = "fate IN (SELECT id FROM names WHERE name NOT IN ('trained', 'live'))"
    note = "(SELECT name FROM names WHERE names.id = fate)"
    fates = _notes(database, condition, "id DESC", note, after)
    return {idx: f"{fate}: {_REASONS[fate]}" if fate in _REASONS else fate for idx, fate in fates.items()}


def _worst(database: sqlite3.Connection, after: int) -> dict[int, str]:
    """The newest episode of each task, by the mean reward of all of them."""
    query = (
        "SELECT max(id), avg(reward) AS mean, count(*) AS num FROM episodes NOT INDEXED WHERE id > ? AND "
        "reward IS NOT NULL AND task IS NOT NULL GROUP BY task HAVING num >= ? "
        "ORDER BY mean, num DESC LIMIT ?"
    )
    rows = database.execute(query, (after, _MIN_TIMES, _NUM_SHOWN))
    return {row[0]: f"mean {row[1]:.2f} of {row[2]} times" for row in rows}


def _improved(database: sqlite3.Connection, after: int) -> dict[int, str]:
    """The newest episode of each task, by the rise from the first score of the task to its last."""
    query = (
        "SELECT b.id, a.reward, b.reward FROM (SELECT min(id) AS first, max(id) AS last FROM episodes "
        "NOT INDEXED WHERE id > ? AND reward IS NOT NULL AND task IS NOT NULL AND kind = ? GROUP BY task) t "
        "JOIN episodes a ON a.id = t.first JOIN episodes b ON b.id = t.last WHERE b.reward > a.reward "
        "ORDER BY b.reward - a.reward DESC, b.id DESC LIMIT ?"
    )
    for kind in (EVAL, TRAIN):
        rows = database.execute(query, (after, kind, _NUM_SHOWN)).fetchall()
        if rows:
            return {row[0]: f"{row[1]:.3g} at first, now {row[2]:.3g}" for row in rows}
    return {}


READY: Mapping[str, Callable[[sqlite3.Connection, int], dict[int, str]]] = {
    "improved": _improved,
    "worst": _worst,
    "longest": _longest,
    "strange": _strange,
    "versions": _across_versions,
    "discarded": _discarded,
}
