"""Reports what running episodes have sampled, and fetches what lost attempts had sampled.

    begin (per episode) --> EpisodeProgress <-- the episode's dialogue adds and recalls
    run (one task)      --> every `heartbeat_s`, one report of what is new in all episodes

An episode that ends before the next report costs nothing. The next report makes up for a lost one, and a
dataflow that has lost earlier reports asks for their completions again.
"""

import asyncio
import logging
from collections.abc import Iterator

from astraflow.errors import RefusedError, UnavailableError, WireError
from astraflow.rollout.membership import Membership, WorkerLink
from astraflow.rollout.progress import EpisodeProgress
from astraflow.types import Lease, PastCompletion, Progress, ProgressReply, ProgressReport

__all__ = ["ProgressReports"]

_log = logging.getLogger(__name__)

_REPORT_BYTES = 8 * 1024 * 1024
"""Largest size of a report: a million tokens."""
_MAX_COMPLETIONS = 1024
"""Largest number of completions of one episode in one report."""
_COMPLETION_BYTES = 256
"""Approximate size of a completion without its columns."""
_MAX_REPORTS = 64
"""Largest number of reports in a row. What is left waits for the next heartbeat interval."""
_FETCH_S = 10.0
"""Time limit for fetching what an earlier attempt sampled. After it, the episode samples everything anew."""
_NO_SUCH_ROUTE = {404, 405}
"""Statuses from a dataflow without these routes. They are optional in version 1 of the protocol."""


class ProgressReports:
    """The progress of the running episodes of one service.

    Example: `progress = await reports.begin(lease)`, run the episode with it, `reports.end(lease.id)`.
    `report` still includes an episode that was cancelled but not ended.
    """

    def __init__(self, link: WorkerLink, membership: Membership, *, is_on: bool) -> None:
        """`is_on`: if false, episodes have no progress, and nothing is reported or fetched."""
        self._link = link
        self._membership = membership
        self._is_on = is_on
        self._open: dict[str, EpisodeProgress] = {}
        """By lease id."""
        self._report_lock = asyncio.Lock()

    async def begin(self, lease: Lease) -> EpisodeProgress | None:
        """Begins an episode. Returns: its progress; None if it keeps none."""
        if not self._is_on or lease.kind != "train":
            return None
        earlier = await self._fetch_earlier(lease.id) if lease.attempt else ()
        progress = EpisodeProgress(earlier)
        self._open[lease.id] = progress
        return progress

    def end(self, lease_id: str) -> None:
        """Stops reporting an episode, because it has a result or its result is no longer wanted."""
        self._open.pop(lease_id, None)

    async def run(self) -> None:
        """Reports until it is cancelled."""
        while self._is_on:
            registration = await self._membership.join()
            await asyncio.sleep(registration.heartbeat_s)
            try:
                await self.report()
            except UnavailableError as err:
                _log.warning("the progress of episodes was not reported: %s", err)

    async def report(self) -> None:
        """Reports everything that is new. Raises: UnavailableError if the dataflow does not answer."""
        # Two reports at a time would send the same completions twice.
        async with self._report_lock:
            for _ in range(_MAX_REPORTS):
                parts = tuple(self._collect_parts())
                if not parts or not self._is_on:
                    return
                await self._send(parts)

    async def _send(self, parts: tuple[Progress, ...]) -> None:
        try:
            reply = await self._membership.call(
                lambda me: self._link.tell_progress(me, ProgressReport(parts=parts))
            )
        except (RefusedError, WireError) as err:
            if isinstance(err, RefusedError) and err.status in _NO_SUCH_ROUTE:
                _log.info("this dataflow doesn't store the progress of episodes: %s", err)
                self._is_on = False
                for progress in self._open.values():
                    progress.stop_reporting()
                return
            _log.warning("the dataflow refused the progress of %d episodes: %s", len(parts), err)
            reply = ProgressReply(refused=tuple(part.lease_id for part in parts))
        self._note_reply(parts, reply)

    def _note_reply(self, parts: tuple[Progress, ...], reply: ProgressReply) -> None:
        missing = set(reply.missing)
        refused = set(reply.refused)
        for part in parts:
            progress = self._open.get(part.lease_id)
            if progress is None:
                continue  # it ended meanwhile
            if part.lease_id in refused:
                progress.stop_reporting()
            else:
                is_lost = part.lease_id in missing
                progress.note_reported(0 if is_lost else part.num_before + len(part.completions))

    def _collect_parts(self) -> Iterator[Progress]:
        """As many new completions as fit into one report, by episode."""
        room = _REPORT_BYTES
        for lease_id, progress in self._open.items():
            num_before, completions = progress.unreported()
            if any(_num_bytes(completion) > _REPORT_BYTES for completion in completions):
                progress.stop_reporting()  # one of them is too large for any report
                continue
            fitting: list[PastCompletion] = []
            for completion in completions[:_MAX_COMPLETIONS]:
                room -= _num_bytes(completion)
                if room < 0:
                    break
                fitting.append(completion)
            if fitting:
                yield Progress(lease_id=lease_id, num_before=num_before, completions=tuple(fitting))
            if room < 0:
                return

    async def _fetch_earlier(self, lease_id: str) -> tuple[PastCompletion, ...]:
        """Fetches what earlier attempts sampled. An episode can do without, so a failure returns nothing."""
        try:
            async with asyncio.timeout(_FETCH_S):
                reply = await self._membership.call(lambda me: self._link.earlier_progress(me, lease_id))
        except (UnavailableError, RefusedError, WireError, TimeoutError) as err:
            _log.warning(
                "episode %s starts from the beginning: %s", lease_id, err or f"no answer within {_FETCH_S} s"
            )
            return ()
        return reply.completions


def _num_bytes(completion: PastCompletion) -> int:
    streams = sum(len(stream.data) for stream in completion.streams)
    return len(completion.token_ids) + len(completion.logprobs) + streams + _COMPLETION_BYTES
