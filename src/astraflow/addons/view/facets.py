"""How many of the newest episodes have each value of a few columns: the counts on the page's filters.

The index has a row per sequence in training and a row per episode in evaluation. An episode counts once per
value, however many sequences it has. Counts cover the newest rows only, so that they take the same time for a
run of millions of episodes.
"""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from astraflow.addons.view.schema import EVAL, TRAIN

__all__ = ["facets"]

_NUM_COUNTED = 20_000
_QUERY = """
SELECT e.kind, CASE WHEN e.kind = :train AND e.fate IS NULL AND e.error IS NULL THEN 'live' ELSE f.name END,
    CASE WHEN reward <= 0 THEN '..0' WHEN reward < 1 THEN '0.000001..0.999999' WHEN reward >= 1
        THEN '1..' END, n.name, x.name, w.name, p.name, e.group_id, e.episode_idx, e.attempt
FROM (SELECT * FROM episodes NOT INDEXED WHERE id > :after) e
LEFT JOIN names f ON f.id = e.fate LEFT JOIN names n ON n.id = e.finish LEFT JOIN names x ON x.id = e.error
LEFT JOIN names w ON w.id = e.worker LEFT JOIN names p ON p.id = e.policy
"""
_COLUMNS = ("kind", "fate", "reward", "finish", "error", "worker", "policy")


def facets(database: sqlite3.Connection, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Counts the newest episodes by each column, under the values chosen for the *other* columns.

    Raises: sqlite3.Error.
    """
    newest = int(database.execute("SELECT max(id) FROM episodes").fetchone()[0] or 0)
    episodes_of = {column: defaultdict[str, set[tuple[Any, ...]]](set) for column in _COLUMNS}
    every: set[tuple[Any, ...]] = set()
    filters = {column: chosen[column] for column in _COLUMNS if chosen.get(column)}
    for row in database.execute(_QUERY, {"train": TRAIN, "after": newest - _NUM_COUNTED}):
        values: dict[str, str | None] = dict(
            zip(_COLUMNS, ("eval" if row[0] == EVAL else "train", *row[1:-3]), strict=True)
        )
        episode = (row[0], *row[-3:])
        every.add(episode)
        for column in _COLUMNS:
            others = all(_has(values, name, value) for name, value in filters.items() if name != column)
            if others and (value := values[column]) is not None:
                episodes_of[column][value].add(episode)
    counts = {
        column: Counter({value: len(episodes) for value, episodes in of_values.items()})
        for column, of_values in episodes_of.items()
    }
    return {
        "num_counted": len(every),
        "counts": {column: of_values.most_common(12) for column, of_values in counts.items()},
    }


def _has(values: Mapping[str, str | None], column: str, choice: str) -> bool:
    if column == "error" and choice in {"any", "none"}:
        return (values[column] is None) == (choice == "none")
    if column == "worker":
        return values[column] == choice or str(values[column]).startswith(f"{choice}.")
    # A range that is none of the three counted ones can't be applied to the counts.
    return values[column] == choice or (column == "reward" and choice not in _REWARDS)


_REWARDS = {"..0", "0.000001..0.999999", "1.."}
