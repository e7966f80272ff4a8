"""Groups whose fates are not all known: what the index must remember of them until then.

A group that was not begun while this process looked is read back: its rows from the index, and the facts of
its episodes from the log.
"""

import contextlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from astraflow.addons.view.log_tail import LogEntry, Place
from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.dataflow.core.commands import EpisodeFacts, RecordResult
from astraflow.dataflow.journal.records import decode_commands, decode_records
from astraflow.errors import JournalError
from astraflow.types import Failure

__all__ = ["Lease", "OpenGroup", "OpenGroups", "facts_in", "lease_of", "results_in"]

_LEASE_ID = re.compile(r"(e?)(\d{1,18})\.(\d{1,18})\.(\d{1,18})")
_MAX_OPEN = 20_000
"""Groups that are remembered; older ones are read back if anything is still heard of them."""

Fate = tuple[int, int | None, int]
"""(id of the fate's name, step as people count, staleness)."""


class Lease(NamedTuple):
    """What the id of a lease says."""

    kind: int
    group_id: int
    episode_idx: int
    attempt: int


def lease_of(lease_id: str) -> Lease | None:
    """The parts of an id; None if it is none that the dataflow gives."""
    match = _LEASE_ID.fullmatch(lease_id)
    if match is None:
        return None
    return Lease(EVAL if match[1] else TRAIN, int(match[2]), int(match[3]), int(match[4]))


@dataclass(slots=True)
class OpenGroup:
    """A group of training episodes, or an evaluation round."""

    task: int | None = None
    good: set[int] = field(default_factory=set[int])
    """Episodes with a result."""
    facts: dict[int, EpisodeFacts] = field(default_factory=dict[int, EpisodeFacts])
    rows: dict[str, list[tuple[int, int, int]]] = field(
        default_factory=dict[str, "list[tuple[int, int, int]]"]
    )
    """Policy -> (row, episode, position of the trajectory in it)."""
    fates: dict[str, Fate] = field(default_factory=dict[str, Fate])
    undecided: set[str] | None = None
    """Policies whose fates are to come; None: unknown."""


class OpenGroups:
    """Example: `groups.get(TRAIN, 17).good`."""

    def __init__(self, database: sqlite3.Connection, entry_at: Callable[[Place], LogEntry | None]) -> None:
        self._database = database
        self._entry_at = entry_at
        self._open: dict[tuple[int, int], OpenGroup] = {}

    def begin(self, group_id: int, task: int, admitted: set[str]) -> None:
        """A group was drawn."""
        self._put(TRAIN, group_id, OpenGroup(task=task, undecided=admitted))

    def get(self, kind: int, group_id: int) -> OpenGroup:
        """A group, read back if need be."""
        group = self._open.get((kind, group_id))
        if group is None:
            group = self._read_back(kind, group_id)
            self._put(kind, group_id, group)
        return group

    def decided(self, group_id: int, policy: str) -> None:
        """A fate was booked; the group is forgotten after the last one."""
        group = self._open.get((TRAIN, group_id))
        if group is not None and group.undecided is not None:
            group.undecided.discard(policy)
            if not group.undecided:
                del self._open[TRAIN, group_id]

    def _put(self, kind: int, group_id: int, group: OpenGroup) -> None:
        if len(self._open) >= _MAX_OPEN:
            del self._open[next(iter(self._open))]
        self._open[kind, group_id] = group

    def _read_back(self, kind: int, group_id: int) -> OpenGroup:
        group = OpenGroup()
        if kind == TRAIN:
            row = self._database.execute("SELECT task FROM groups WHERE id = ?", (group_id,)).fetchone()
            group.task = row[0] if row else None
        query = (
            "SELECT e.id, e.episode_idx, e.part, n.name, e.log_segment, e.log_offset, e.error IS NULL "
            "FROM episodes e LEFT JOIN names n ON n.id = e.policy WHERE e.group_id = ? AND e.kind = ?"
        )
        places: set[Place] = set()
        for row_id, idx, part, policy, segment, offset, is_good in self._database.execute(
            query, (group_id, kind)
        ):
            if not is_good:
                continue
            group.good.add(idx)
            places.add((segment, offset))
            if policy is not None:
                group.rows.setdefault(policy, []).append((row_id, idx, part))
        if kind == TRAIN:
            for place in sorted(places):
                group.facts |= facts_in(self._entry_at(place), group_id)
        return group


def facts_in(entry: LogEntry | None, group_id: int) -> dict[int, EpisodeFacts]:
    """The facts of a group's training episodes in one entry of the log; none if it cannot be read."""
    found: dict[int, EpisodeFacts] = {}
    for lease, outcome in results_in(entry):
        if (lease.kind, lease.group_id) == (TRAIN, group_id) and isinstance(outcome, EpisodeFacts):
            found.setdefault(lease.episode_idx, outcome)
    return found


def results_in(entry: LogEntry | None) -> Iterator[tuple[Lease, EpisodeFacts | Failure]]:
    """The results in one entry of the log; none if it cannot be read."""
    if entry is None:
        return
    with contextlib.suppress(JournalError):
        commands = [each for record in decode_records(entry.data) for each in decode_commands(record)]
        results = [command for command in commands if isinstance(command, RecordResult)]
        yield from ((lease, r.outcome) for r in results if (lease := lease_of(r.lease_id)) is not None)
