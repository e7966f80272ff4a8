"""What each slot of a rollout service did: one lane per episode that ran at the same time as others.

The journal knows when an episode's result came and how long the episode took, not in which slot it ran: slots
are alike. So each episode is put into the lowest lane that was free when it began.
"""

import heapq
import sqlite3
from typing import Any

__all__ = ["slot_lanes"]

_MAX_EPISODES = 4000
"""Of more, the newest are shown."""
_LONGEST_S = 3600.0
"""An episode that ends this long after the shown time is not looked for."""
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
    """Lanes of the service with this name, between two moments: `name`, and `episodes` as (row of the index,
    start, end, `train` or `eval`, reward, task). Raises: sqlite3.Error."""
    escaped = "".join(f"[{char}]" if char in "*?[" else char for char in worker)
    first = _first_after(database, begin_s)
    last = _first_after(database, end_s + _LONGEST_S)
    values = (first, last, end_s, worker, f"{escaped}.*", _MAX_EPISODES)
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
    """The first row whose result came after a moment; rows are in the order in which they came."""
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
