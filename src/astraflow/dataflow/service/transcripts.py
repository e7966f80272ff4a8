"""Transcripts: the messages of some episodes, stored so that people can read how the policies change."""

import msgspec

from astraflow.dataflow.core.commands import LeaseView, PayloadRef
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.journal.journal_db import TranscriptRow
from astraflow.dataflow.service.task_lookup import TaskLookup
from astraflow.types import Episode, EpisodeResult, Failure, Message, lease_kind

__all__ = ["TranscriptKeeper"]

_EVERY_GROUP = 50
"""The episodes of every 50th training group are stored, and all episodes of evaluations."""
_NOWHERE = PayloadRef(0, 0, 0)
"""Placeholder in a row until its messages are stored."""


class TranscriptKeeper:
    """Stores messages together with the payloads, and a row that says to which episode they belong."""

    def __init__(self, core: Core, journal: Journal, lookup: TaskLookup) -> None:
        self._core = core
        self._journal = journal
        self._lookup = lookup

    def row_of(self, result: EpisodeResult) -> TranscriptRow | None:
        """The row of a result whose messages are to be stored, still without their place; None for others.

        The lease must still be live, so call this before the result is recorded.
        """
        episode = result.outcome
        if isinstance(episode, Failure) or not episode.messages:
            return None
        # Most results are skipped without a look-up.
        group_id = result.lease_id.partition(".")[0]
        is_eval = lease_kind(result.lease_id) == "eval"
        if not is_eval and not (group_id.isdecimal() and int(group_id) % _EVERY_GROUP == 0):
            return None
        lease = self._core.lease(result.lease_id)
        if lease is None:
            return None
        policy, version = _find_maker(lease, episode)
        return TranscriptRow(
            kind=lease.kind,
            group_id=lease.group_id,
            task_id=self._lookup.task(lease).id,
            policy=policy,
            version=version,
            score=episode.score,
            ref=_NOWHERE,
        )

    def keep(self, row: TranscriptRow, messages: tuple[Message, ...]) -> None:
        """Stores the messages of an accepted result, with the row that `row_of` returned."""
        ref = self._journal.store(msgspec.msgpack.encode(messages))
        self._journal.note_transcript(msgspec.structs.replace(row, ref=ref))


def _find_maker(lease: LeaseView, episode: Episode) -> tuple[str, int]:
    """Policy and version behind an episode: the first pinned one, or the oldest of its first trajectory."""
    if lease.pinned:
        return lease.pinned[0].policy, lease.pinned[0].versions[0]
    if not episode.trajectories:
        return "", -1
    first = episode.trajectories[0]
    return first.policy, min((span.version for span in first.versions), default=-1)
