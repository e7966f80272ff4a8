"""Busy spans and slots of services, and events, over time: for the page, and as a trace for Perfetto."""

import heapq
import sqlite3
from typing import Any

import msgspec

from astraflow.addons.view.search import ids_of

__all__ = ["between", "loads", "newest_happenings", "perfetto", "slot_lanes"]

_MAX_SPANS = 4000
_LARGE_PART = 0.2
_MAX_MET = 50_000
"""Maximum number of spans examined for a small part of the run."""
_MAX_LOADS = 2000
_MAX_HAPPENINGS = 500
_NUM_NEWEST = 30
_NUM_RESTARTS = 20
_MAX_TRACED = 500_000
_QUIET = "kind IN ('take', 'commit', 'publish')"
"""Events that occur at each step, which the list of news leaves out."""
_EARLIER = (
    "SELECT step FROM happenings AS earlier WHERE earlier.id < happenings.id AND step IS NOT NULL "
    "ORDER BY id DESC LIMIT 1"
)
_HAPPENINGS = f"SELECT at_s, kind, who, coalesce(step, ({_EARLIER})) AS step, version, text FROM happenings"
"""Events that are not about a step, such as restarts, belong to the newest step before them."""
_MAX_LANE_EPISODES = 4000
"""If there are more episodes, the newest are shown."""
_LONGEST_S = 3600.0
"""Episodes that end later than this after the shown interval are not searched for."""
_LANE_EPISODES = """
SELECT e.id, e.at_s - e.duration_s, e.at_s, e.kind, e.reward, t.name
FROM episodes e LEFT JOIN tasks t ON t.id = e.task
WHERE e.id BETWEEN ? AND ? AND e.part = 0 AND e.duration_s > 0 AND e.at_s - e.duration_s <= ?
    AND e.worker IN (SELECT id FROM names WHERE name = ? OR name GLOB ?)
ORDER BY e.id DESC LIMIT ?
"""


def between(database: sqlite3.Connection, begin_s: float | None, end_s: float | None) -> dict[str, Any]:
    """Returns lanes with their spans, and events, between two times; by default, for the whole run.

    If there are more spans than a screen can show, only the longest are returned. `begin_s` and `end_s` in
    the result are those of the whole run.
    """
    first, last = _extent(database)
    begin = first if begin_s is None else begin_s
    end = last if end_s is None else end_s
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for source, kind, start, stop in _longest_spans(database, begin, end, whole_s=last - first):
        lanes.setdefault(source, []).append((kind, start, stop))
    return {
        "begin_s": first,
        "end_s": last,
        "lanes": [{"name": name, "spans": sorted(lanes[name], key=lambda s: s[1])} for name in sorted(lanes)],
        "happenings": _happenings_between(database, begin, end),
    }


def _happenings_between(database: sqlite3.Connection, begin: float, end: float) -> list[dict[str, Any]]:
    """Returns the newest unusual events, and, evenly thinned out, those of each step."""
    within = "at_s BETWEEN ? AND ?"
    count = f"SELECT count(*) FROM happenings WHERE {within} AND {_QUIET}"
    every = 1 + database.execute(count, (begin, end)).fetchone()[0] // _MAX_HAPPENINGS
    unusual = f"{_HAPPENINGS} WHERE {within} AND NOT {_QUIET} ORDER BY at_s DESC, id DESC LIMIT ?"
    quiet = f"{_HAPPENINGS} WHERE {within} AND {_QUIET} AND id % ? = 0"
    rows = [
        *reversed(database.execute(unusual, (begin, end, _MAX_HAPPENINGS)).fetchall()),
        *database.execute(quiet, (begin, end, every)),
    ]
    return sorted([dict(row) for row in rows], key=lambda row: row["at_s"])


def _longest_spans(
    database: sqlite3.Connection, begin: float, end: float, *, whole_s: float
) -> list[tuple[str, str, float, float]]:
    """Returns the longest spans that overlap `[begin, end]`, up to `_MAX_SPANS`.

    If the interval is a large part of the run, nearly all of the longest spans overlap it. If it is a small
    part, few spans begin in it. Each case has its own index, so neither query reads all spans.
    """
    columns = "SELECT source, kind, start_s, end_s FROM spans"
    if end - begin > _LARGE_PART * whole_s:
        query = f"{columns} WHERE start_s <= ? AND end_s >= ? ORDER BY end_s - start_s DESC LIMIT ?"
        return database.execute(query, (end, begin, _MAX_SPANS)).fetchall()
    # A span that overlaps the interval begins at most the length of the longest span before it.
    longest = database.execute("SELECT max(end_s - start_s) FROM spans").fetchone()[0] or 0.0
    query = (
        f"SELECT * FROM ({columns} INDEXED BY spans_start WHERE start_s BETWEEN ? AND ? AND end_s >= ? "
        "LIMIT ?) ORDER BY end_s - start_s DESC LIMIT ?"
    )
    values = (begin - longest, end, begin, _MAX_MET, _MAX_SPANS)
    return database.execute(query, values).fetchall()


def _extent(database: sqlite3.Connection) -> tuple[float, float]:
    # `end_s` has no index, so the last end is taken from the 100 spans that started last.
    row = database.execute(
        "SELECT min(at_s), max(at_s) FROM (SELECT min(start_s) AS at_s FROM spans UNION ALL "
        "SELECT end_s FROM (SELECT end_s FROM spans ORDER BY start_s DESC LIMIT 100) UNION ALL "
        "SELECT at_s FROM happenings WHERE id = 1 UNION ALL "
        "SELECT at_s FROM happenings WHERE id = (SELECT max(id) FROM happenings))"
    ).fetchone()
    return float(row[0] or 0.0), float(row[1] or 0.0)


def newest_happenings(database: sqlite3.Connection) -> list[dict[str, Any]]:
    """Returns the newest joins, leaves, evaluations, and similar events, newest first.

    The newest restarts are always among them, however much has happened since.
    """
    newest = f"SELECT id FROM happenings WHERE NOT {_QUIET} ORDER BY id DESC LIMIT ?"
    restarts = "SELECT id FROM happenings WHERE kind = 'restart' ORDER BY id DESC LIMIT ?"
    query = (
        f"{_HAPPENINGS} WHERE id IN "
        f"(SELECT id FROM ({newest}) UNION SELECT id FROM ({restarts})) ORDER BY id DESC"
    )
    return [dict(row) for row in database.execute(query, (_NUM_NEWEST, _NUM_RESTARTS))]


def slot_lanes(
    database: sqlite3.Connection, worker: str, begin_s: float, end_s: float
) -> list[dict[str, Any]]:
    """Returns what each slot of a service, which is given by its name, did between two times.

    The journal records when an episode's result arrived and how long the episode took, but not the slot that
    it ran in, since slots are interchangeable. Each episode is therefore put into the lowest lane that was
    free when it began.

    A lane has a `name`, and `episodes` as (row of the index, start, end, `train` or `eval`, reward, task).
    Raises: sqlite3.Error.
    """
    first = _first_after(database, begin_s)
    last = _first_after(database, end_s + _LONGEST_S)
    values = (first, last, end_s, *ids_of(worker), _MAX_LANE_EPISODES)
    rows = sorted(database.execute(_LANE_EPISODES, values), key=lambda row: row[1])
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


def loads(database: sqlite3.Connection) -> list[dict[str, Any]]:
    """Returns how long services took to fetch and install the newest versions, oldest first."""
    query = (
        "SELECT source, start_s, end_s FROM spans WHERE kind = 'load' AND id > "
        "(SELECT max(id) FROM spans) - ? ORDER BY id DESC LIMIT ?"
    )
    rows = database.execute(query, (_MAX_MET, _MAX_LOADS)).fetchall()
    return [{"worker": row[0], "at_s": row[2], "seconds": row[2] - row[1]} for row in reversed(rows)]


def perfetto(database: sqlite3.Connection) -> bytes:
    """Encodes all spans and events in the JSON format of Chrome's trace viewer, which Perfetto opens."""
    lanes: dict[str, int] = {}
    events: list[dict[str, object]] = []

    def lane(name: str) -> int:
        return lanes.setdefault(name, len(lanes) + 1)

    query = "SELECT source, kind, start_s, end_s FROM spans ORDER BY start_s LIMIT ?"
    for source, kind, start, stop in database.execute(query, (_MAX_TRACED,)):
        span = {"name": kind, "ph": "X", "ts": start * 1e6, "dur": (stop - start) * 1e6}
        events.append({**span, "pid": 1, "tid": lane(source)})
    query = "SELECT at_s, kind, who, step, version, text FROM happenings ORDER BY id LIMIT ?"
    for at_s, kind, who, step, version, text in database.execute(query, (_MAX_TRACED,)):
        args = {"step": step, "version": version, "text": text}
        moment = {"name": f"{kind} {who}", "ph": "i", "s": "t", "ts": at_s * 1e6, "pid": 1}
        events.append({**moment, "tid": lane("events"), "args": args})
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": name}}
        for name, number in lanes.items()
    ]
    return msgspec.json.encode({"traceEvents": [*names, *events]})
