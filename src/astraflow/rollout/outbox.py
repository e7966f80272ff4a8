"""Finished episodes on their way to the dataflow.

The outbox owns a result from the end of its episode until the dataflow's receipt. One request at a time
carries all results that wait. A dataflow that does not answer is asked again for ever, since the leases live
on by heartbeat. Nothing is dropped silently: an invalid result is logged with the dataflow's reason.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from astraflow.errors import UnavailableError, WireError
from astraflow.rollout.membership import Membership, WorkerLink
from astraflow.types import EpisodeResult, EpisodeResults, Failure

__all__ = ["Outbox"]

_log = logging.getLogger(__name__)

_MAX_RESULTS = 256
"""Results of one request: about 20 MB of 8k-token episodes."""

_COALESCE_S = 0.01
"""Longest time that a result waits for others to share its request. Scaled by the share of slots that run:
while all run, several end together; at the end of a batch nothing else comes, so nothing waits."""

_PAUSE_S = 1.0
"""Between attempts; the link's own retries have ended by then."""


class Outbox:
    """Sends results. `run` is the only sender; it is cancelled when nothing more should go out."""

    def __init__(
        self, link: WorkerLink, membership: Membership, *, busy_share: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`busy_share`: share of the slots whose episodes run, so that more results will come soon."""
        self._link = link
        self._busy_share = busy_share
        self._membership = membership
        self._unsent: dict[str, EpisodeResult] = {}
        self._arrived = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def put(self, result: EpisodeResult) -> None:
        """Takes a result over."""
        self._unsent[result.lease_id] = result
        self._emptied.clear()
        self._arrived.set()

    def discard(self, lease_ids: Collection[str]) -> None:
        """Forgets results that nobody wants any more."""
        for lease_id in lease_ids:
            self._unsent.pop(lease_id, None)
        self._settle()

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Leases whose results have no receipt yet."""
        return tuple(self._unsent)

    async def emptied(self) -> None:
        """Returns when everything has a receipt."""
        await self._emptied.wait()

    async def run(self) -> None:
        """Sends for ever."""
        while True:
            await self._arrived.wait()
            await asyncio.sleep(_COALESCE_S * self._busy_share())
            batch = tuple(self._unsent.values())[:_MAX_RESULTS]
            try:
                await self._send(batch)
            except UnavailableError as err:
                _log.warning("%d results wait, the dataflow does not answer: %s", len(self._unsent), err)
                await asyncio.sleep(_PAUSE_S)
            self._settle()

    async def _send(self, batch: tuple[EpisodeResult, ...]) -> None:
        if not batch:
            return
        try:
            receipts = await self._membership.call(
                lambda me: self._link.episodes(EpisodeResults(worker_id=me, results=batch))
            )
        except WireError as err:
            await self._send_apart(batch, err)
            return
        for receipt in receipts.receipts:
            self._unsent.pop(receipt.lease_id, None)
            if receipt.status == "invalid":
                _log.error("the dataflow refused the result of %s: %s", receipt.lease_id, receipt.reason)

    async def _send_apart(self, batch: tuple[EpisodeResult, ...], error: WireError) -> None:
        """A request that is refused whole (too large, say) goes in halves; a single one becomes a failure."""
        if len(batch) != 1:
            middle = len(batch) // 2
            await self._send(batch[:middle])
            await self._send(batch[middle:])
            return
        (result,) = batch
        _log.error("the dataflow refused the result of %s: %s", result.lease_id, error)
        if isinstance(result.outcome, Failure):
            del self._unsent[result.lease_id]
            return
        failure = Failure(error_class=type(error).__name__, message=str(error), is_retryable=False)
        self._unsent[result.lease_id] = EpisodeResult(lease_id=result.lease_id, outcome=failure)

    def _settle(self) -> None:
        if not self._unsent:
            self._arrived.clear()
            self._emptied.set()
