"""Reports what running episodes have sampled, and fetches what lost attempts had.

    begin (per episode) --> EpisodeProgress <-- the episode's dialogue adds and recalls
    run (one task)      --> every `heartbeat_s`, one report of what is new in all episodes

An episode that ends before the next report costs nothing. A report that is lost is made up by the next one,
and a dataflow that lost what it had asks for it again.
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
"""What one report carries: a million tokens."""
_MAX_COMPLETIONS = 1024
"""Of one episode in one report."""
_COMPLETION_BYTES = 256
"""What a completion takes beside its columns, about."""
_MAX_REPORTS = 64
"""At a time. What is left waits for the next time."""
_FETCH_S = 10.0
"""Longest time for fetching what an earlier attempt sampled. Without it, the episode starts afresh."""
_NO_SUCH_ROUTE = {404, 405}
"""Statuses of a dataflow that does not know these routes. Version 1 of the protocol allows that."""


class ProgressReports:
    """The progress of the episodes of one service.

    Example: `progress = await reports.begin(lease)`, run the episode with it, `reports.end(lease.id)`.
    An episode that is cancelled and not ended is still reported by `tell`.
    """

    def __init__(self, link: WorkerLink, membership: Membership, *, is_on: bool) -> None:
        """`is_on`: otherwise there is no progress, and nothing is reported or fetched."""
        self._link = link
        self._membership = membership
        self._is_on = is_on
        self._open: dict[str, EpisodeProgress] = {}
        """By lease."""
        self._is_telling = asyncio.Lock()

    async def begin(self, lease: Lease) -> EpisodeProgress | None:
        """The progress of an episode that starts now; None if it keeps none."""
        if not self._is_on or lease.kind != "train":
            return None
        earlier = await self._earlier(lease.id) if lease.attempt else ()
        progress = EpisodeProgress(earlier)
        self._open[lease.id] = progress
        return progress

    def end(self, lease_id: str) -> None:
        """Nothing more is reported of an episode: it has a result, or nobody wants one."""
        self._open.pop(lease_id, None)

    async def run(self) -> None:
        """Reports until it is cancelled."""
        while self._is_on:
            registration = await self._membership.join()
            await asyncio.sleep(registration.heartbeat_s)
            try:
                await self.tell()
            except UnavailableError as err:
                _log.warning("no report of what episodes have sampled: %s", err)

    async def tell(self) -> None:
        """Reports everything that is new. Raises: UnavailableError if the dataflow does not answer."""
        async with self._is_telling:
            for _ in range(_MAX_REPORTS):
                parts = tuple(self._parts())
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
                _log.info("this dataflow keeps nothing of unfinished episodes: %s", err)
                self._turn_off()
                return
            _log.warning("the dataflow refused what %d episodes have sampled: %s", len(parts), err)
            reply = ProgressReply(refused=tuple(part.lease_id for part in parts))
        self._note(parts, reply)

    def _note(self, parts: tuple[Progress, ...], reply: ProgressReply) -> None:
        missing = set(reply.missing)
        refused = set(reply.refused)
        for part in parts:
            progress = self._open.get(part.lease_id)
            if progress is None:
                continue  # it ended meanwhile
            if part.lease_id in refused:
                progress.give_up()
            else:
                is_lost = part.lease_id in missing
                progress.tell(0 if is_lost else part.num_before + len(part.completions))

    def _turn_off(self) -> None:
        self._is_on = False
        for progress in self._open.values():
            progress.give_up()

    def _parts(self) -> Iterator[Progress]:
        """What is new, as much as fits into a report."""
        room = _REPORT_BYTES
        for lease_id, progress in self._open.items():
            num_before, completions = progress.untold()
            if any(_size(completion) > _REPORT_BYTES for completion in completions):
                progress.give_up()  # one of them fits into no report
                continue
            fitting: list[PastCompletion] = []
            for completion in completions[:_MAX_COMPLETIONS]:
                room -= _size(completion)
                if room < 0:
                    break
                fitting.append(completion)
            if fitting:
                yield Progress(lease_id=lease_id, num_before=num_before, completions=tuple(fitting))
            if room < 0:
                return

    async def _earlier(self, lease_id: str) -> tuple[PastCompletion, ...]:
        """What earlier attempts sampled. It is an advantage, not a need: without an answer there is none."""
        try:
            async with asyncio.timeout(_FETCH_S):
                reply = await self._membership.call(lambda me: self._link.earlier_progress(me, lease_id))
        except (UnavailableError, RefusedError, WireError, TimeoutError) as err:
            _log.warning("episode %s starts afresh: %s", lease_id, err or f"no answer within {_FETCH_S} s")
            return ()
        return reply.completions


def _size(completion: PastCompletion) -> int:
    streams = sum(len(stream.data) for stream in completion.streams)
    return len(completion.token_ids) + len(completion.logprobs) + streams + _COMPLETION_BYTES
