"""Groups that still wait for fates, and what the index must remember about them until then.

If a group began before this process started to read, it is read back: its rows from the index, and the facts
about its episodes from the log.
"""

import contextlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from astraflow.addons.view.log_tail import LogEntry, Position
from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.dataflow.core.commands import EpisodeFacts, RecordResult
from astraflow.dataflow.journal.records import decode_commands, decode_records
from astraflow.errors import JournalError
from astraflow.types import Failure

__all__ = ["LeaseId", "OpenGroup", "OpenGroups", "facts_in", "lease_of", "results_in"]

_LEASE_ID = re.compile(r"(e?)(\d{1,18})\.(\d{1,18})\.(\d{1,18})")
_MAX_OPEN = 20_000
"""Maximum number of groups in memory. Older groups are read back if another record mentions them."""

Fate = tuple[int, int | None, int]
"""(id of the fate's name, step counted from 1, staleness)."""


class LeaseId(NamedTuple):
    """The parts of a lease's id."""

    kind: int
    group_id: int
    episode_idx: int
    attempt: int


def lease_of(lease_id: str) -> LeaseId | None:
    """Parses the id of a lease; returns None if the dataflow doesn't issue such ids."""
    match = _LEASE_ID.fullmatch(lease_id)
    if match is None:
        return None
    return LeaseId(EVAL if match[1] else TRAIN, int(match[2]), int(match[3]), int(match[4]))


@dataclass(slots=True)
class OpenGroup:
    """A group of training episodes, or an evaluation round."""

    task: int | None = None
    good: set[int] = field(default_factory=set[int])
    """Episodes that have a result."""
    facts: dict[int, EpisodeFacts] = field(default_factory=dict[int, EpisodeFacts])
    rows: dict[str, list[tuple[int, int, int]]] = field(
        default_factory=dict[str, "list[tuple[int, int, int]]"]
    )
    """Policy -> (row, episode, position of the trajectory in it)."""
    fates: dict[str, Fate] = field(default_factory=dict[str, Fate])
    undecided: set[str] | None = None
    """Policies that still wait for their fate; None if unknown."""


class OpenGroups:
    """The groups that are still in memory. Example: `groups.get(TRAIN, 17).good`."""

    def __init__(self, database: sqlite3.Connection, entry_at: Callable[[Position], LogEntry | None]) -> None:
        self._database = database
        self._entry_at = entry_at
        self._open: dict[tuple[int, int], OpenGroup] = {}

    def begin(self, group_id: int, task: int, admitted: set[str]) -> None:
        """Adds a group that was drawn."""
        self._put(TRAIN, group_id, OpenGroup(task=task, undecided=admitted))

    def get(self, kind: int, group_id: int) -> OpenGroup:
        """Returns a group, which is read back if it isn't in memory."""
        group = self._open.get((kind, group_id))
        if group is None:
            group = self._read_back(kind, group_id)
            self._put(kind, group_id, group)
        return group

    def decided(self, group_id: int, policy: str) -> None:
        """Notes that a policy's fate is known. After the last fate, the group is dropped from memory."""
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
        places: set[Position] = set()
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
    """Returns the facts about a group's training episodes in one log entry; empty if it can't be read."""
    facts: dict[int, EpisodeFacts] = {}
    for lease, outcome in results_in(entry):
        if (lease.kind, lease.group_id) == (TRAIN, group_id) and isinstance(outcome, EpisodeFacts):
            facts.setdefault(lease.episode_idx, outcome)
    return facts


def results_in(entry: LogEntry | None) -> Iterator[tuple[LeaseId, EpisodeFacts | Failure]]:
    """Yields the results in one entry of the log; nothing if it can't be read."""
    if entry is None:
        return
    with contextlib.suppress(JournalError):
        commands = [each for record in decode_records(entry.data) for each in decode_commands(record)]
        results = [command for command in commands if isinstance(command, RecordResult)]
        yield from ((lease, r.outcome) for r in results if (lease := lease_of(r.lease_id)) is not None)
