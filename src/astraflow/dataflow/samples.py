"""Keeps the messages of some episodes, so that people can read what the policies say before and after."""

from pathlib import Path

import msgspec

from astraflow.dataflow.core.commands import LeaseView, PayloadRef
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.journal import Journal
from astraflow.dataflow.records import JournalReader, SampleRow
from astraflow.dataflow.segments import SegmentReader
from astraflow.dataflow.tasks import TaskLookup
from astraflow.types import Episode, EpisodeResult, Failure, LeaseKind, Message

__all__ = ["SampleKeeper", "load_samples"]

_EVERY_GROUP = 50
"""Of training, the episodes of every 50th group are kept; of evaluation, all."""
_NOWHERE = PayloadRef(0, 0, 0)


class SampleKeeper:
    """Stores messages next to the payloads, with an index row."""

    def __init__(self, core: Core, journal: Journal, lookup: TaskLookup) -> None:
        self._core = core
        self._journal = journal
        self._lookup = lookup

    def row_of(self, result: EpisodeResult) -> SampleRow | None:
        """The index row, yet without a place, of a result that is one of those to be read.

        Its lease must still be out: ask before the result is recorded.
        """
        episode = result.outcome
        if isinstance(episode, Failure) or not episode.messages:
            return None
        lease = self._core.lease(result.lease_id)
        if lease is None or not _is_to_be_read(lease):
            return None
        policy, version = _made_by(lease, episode)
        return SampleRow(
            kind=lease.kind,
            group_id=lease.group_id,
            task_id=self._lookup.task(lease).id,
            policy=policy,
            version=version,
            score=episode.score,
            ref=_NOWHERE,
        )

    def keep(self, row: SampleRow, messages: tuple[Message, ...]) -> None:
        """Keeps the messages of an accepted result."""
        ref = self._journal.store(msgspec.msgpack.encode(messages))
        self._journal.note_sample(msgspec.structs.replace(row, ref=ref))


def _is_to_be_read(lease: LeaseView) -> bool:
    return lease.kind == "eval" or lease.group_id % _EVERY_GROUP == 0


def _made_by(lease: LeaseView, episode: Episode) -> tuple[str, int]:
    """Policy and version of an episode: the first pinned, or the oldest of its first trajectory."""
    if lease.pinned:
        return lease.pinned[0].policy, lease.pinned[0].versions[0]
    for trajectory in episode.trajectories:
        return trajectory.policy, min((span.version for span in trajectory.versions), default=-1)
    return "", -1


def load_samples(folder: Path, kind: LeaseKind) -> list[tuple[SampleRow, tuple[Message, ...]]]:
    """The kept episodes of a journal folder with their messages, in order of arrival.

    Raises: JournalError.
    """
    with JournalReader(folder) as reader:
        rows = reader.samples(kind)
    segments = SegmentReader(folder / "segments")
    try:
        return [(row, JournalReader.messages(row.data or segments.read(row.ref))) for row in rows]
    finally:
        segments.close()
