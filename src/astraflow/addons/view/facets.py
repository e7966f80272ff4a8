"""How many of the newest episodes have each value of a few columns: the counts on the page's filters.

Counts cover the newest episodes only, so that they take the same time for a run of millions of episodes.
"""

import sqlite3
from collections import Counter
from collections.abc import Mapping
from typing import Any

from astraflow.addons.view.schema import EVAL, TRAIN

__all__ = ["facets"]

_NUM_COUNTED = 20_000
_QUERY = """
SELECT e.kind, CASE WHEN e.kind = :train AND e.fate IS NULL AND e.error IS NULL THEN 'live' ELSE f.name END,
    e.reward, n.name, x.name, w.name, p.name, e.num
FROM (SELECT kind, fate, error, finish, worker, policy,
        CASE WHEN reward <= 0 THEN '..0' WHEN reward < 1 THEN '0.000001..0.999999' WHEN reward >= 1
        THEN '1..' END AS reward, count(*) AS num
    FROM episodes NOT INDEXED WHERE id > :after GROUP BY 1, 2, 3, 4, 5, 6, 7) e
LEFT JOIN names f ON f.id = e.fate LEFT JOIN names n ON n.id = e.finish LEFT JOIN names x ON x.id = e.error
LEFT JOIN names w ON w.id = e.worker LEFT JOIN names p ON p.id = e.policy
"""
_COLUMNS = ("kind", "fate", "reward", "finish", "error", "worker", "policy")


def facets(database: sqlite3.Connection, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Counts the newest episodes by each column, under the values chosen for the *other* columns.

    Raises: sqlite3.Error.
    """
    newest = int(database.execute("SELECT max(id) FROM episodes").fetchone()[0] or 0)
    counts = {column: Counter[str]() for column in _COLUMNS}
    wanted = {column: chosen[column] for column in _COLUMNS if chosen.get(column)}
    for row in database.execute(_QUERY, {"train": TRAIN, "after": newest - _NUM_COUNTED}):
        values: dict[str, str | None] = dict(
            zip(_COLUMNS, ("eval" if row[0] == EVAL else "train", *row[1:-1]), strict=True)
        )
        for column in _COLUMNS:
            others = all(_has(values, name, value) for name, value in wanted.items() if name != column)
            if others and (value := values[column]) is not None:
                counts[column][value] += row[-1]
    return {
        "num_counted": min(newest, _NUM_COUNTED),
        "counts": {column: found.most_common(12) for column, found in counts.items()},
    }


def _has(values: Mapping[str, str | None], column: str, wanted: str) -> bool:
    if column == "error" and wanted in {"any", "none"}:
        return (values[column] is None) == (wanted == "none")
    if column == "worker":
        return values[column] == wanted or str(values[column]).startswith(f"{wanted}.")
    # A range that is none of the three counted ones can't be applied to the counts.
    return values[column] == wanted or (column == "reward" and wanted not in _REWARDS)


_REWARDS = {"..0", "0.000001..0.999999", "1.."}
