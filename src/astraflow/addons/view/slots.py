"""What each slot of a rollout service did, as lanes of episodes that ran at the same time.

The journal records when an episode's result arrived and how long the episode took, but not the slot that it
ran in, since slots are interchangeable. Each episode is therefore put into the lowest lane that was free when
it began.
"""

import heapq
import sqlite3
from typing import Any

from astraflow.addons.view.search import ids_of

__all__ = ["slot_lanes"]

_MAX_EPISODES = 4000
"""If there are more episodes, the newest are shown."""
_LONGEST_S = 3600.0
"""Episodes that end later than this after the shown interval are not searched for."""
_QUERY = """
SELECT e.id, e.at_s - e.duration_s, e.at_s, e.kind, e.reward, t.name
FROM episodes e LEFT JOIN tasks t ON t.id = e.task
WHERE e.id BETWEEN ? AND ? AND e.part = 0 AND e.duration_s > 0 AND e.at_s - e.duration_s <= ?
    AND e.worker IN (SELECT id FROM names WHERE name = ? OR name GLOB ?)
ORDER BY e.id DESC LIMIT ?
"""


def slot_lanes(
    database: sqlite3.Connection, worker: str, begin_s: float, end_s: float
) -> list[dict[str, Any]]:
    """Returns the lanes of a service, which is given by its name, between two times.

    A lane has a `name`, and `episodes` as (row of the index, start, end, `train` or `eval`, reward, task).
    Raises: sqlite3.Error.
    """
    first = _first_after(database, begin_s)
    last = _first_after(database, end_s + _LONGEST_S)
    values = (first, last, end_s, *ids_of(worker), _MAX_EPISODES)
    rows = sorted(database.execute(_QUERY, values), key=lambda row: row[1])
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes: list[list[tuple[object, ...]]] = []
    for number, start, stop, kind, reward, task in rows:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(lanes))
            lanes.append([])
        lane = heapq.heappop(free)
        heapq.heappush(busy, (stop, lane))
        lanes[lane].append((number, start, stop, "eval" if kind else "train", reward, task))
    return [{"name": f"slot {idx + 1}", "episodes": lane} for idx, lane in enumerate(lanes)]


def _first_after(database: sqlite3.Connection, at_s: float) -> int:
    """Returns the first row whose result arrived after a time. Rows are in order of arrival."""
    low = 1
    high = int(database.execute("SELECT max(id) FROM episodes").fetchone()[0] or 0) + 1
    while low < high:
        middle = (low + high) // 2
        row = database.execute(
            "SELECT at_s FROM episodes WHERE id >= ? ORDER BY id LIMIT 1", (middle,)
        ).fetchone()
        if row is not None and row[0] <= at_s:
            low = middle + 1
        else:
            high = middle
    return low
