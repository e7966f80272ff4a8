"""Sends the results of episodes to the dataflow.

The outbox owns a result from the end of its episode until the dataflow's receipt. One request at a time
carries the results that wait. If the dataflow does not answer, the outbox tries again without end, because
heartbeats keep the leases alive. Nothing is dropped silently: an invalid result is logged with the dataflow's
reason.
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
"""Largest number of results per request: about 20 MB of 8k-token episodes."""

_COALESCE_S = 0.02
"""Longest time that a result waits for others to share its request.

It is scaled by the share of slots that run an episode. While all slots run, several episodes end at about the
same time. At the end of a batch, no other result will come, so nothing waits.
"""

_PAUSE_S = 1.0
"""Pause between two attempts, in addition to the retries of the link itself."""


class Outbox:
    """Holds results until they have a receipt. Only `run` sends; cancel it to stop sending."""

    def __init__(
        self, link: WorkerLink, membership: Membership, *, busy_share: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`busy_share`: returns the share of slots that run an episode; at 1, more results will come soon."""
        self._link = link
        self._busy_share = busy_share
        self._membership = membership
        self._unsent: dict[str, EpisodeResult] = {}
        self._arrived = asyncio.Event()
        self.is_empty = asyncio.Event()
        """Set while every result has a receipt."""
        self.is_empty.set()

    def put(self, result: EpisodeResult) -> None:
        """Accepts a result for sending."""
        self._unsent[result.lease_id] = result
        self.is_empty.clear()
        self._arrived.set()

    def discard(self, lease_ids: Collection[str]) -> None:
        """Drops results of leases that the dataflow no longer wants."""
        for lease_id in lease_ids:
            self._unsent.pop(lease_id, None)
        self._note_if_empty()

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Leases whose results have no receipt yet."""
        return tuple(self._unsent)

    async def run(self) -> None:
        """Sends results until it is cancelled."""
        while True:
            await self._arrived.wait()
            await asyncio.sleep(_COALESCE_S * self._busy_share())
            batch = tuple(self._unsent.values())[:_MAX_RESULTS]
            try:
                await self._send(batch)
            except UnavailableError as err:
                _log.warning("%d results wait; the dataflow does not answer: %s", len(self._unsent), err)
                await asyncio.sleep(_PAUSE_S)
            self._note_if_empty()

    async def _send(self, batch: tuple[EpisodeResult, ...]) -> None:
        if not batch:
            return
        try:
            receipts = await self._membership.call(
                lambda worker_id: self._link.episodes(EpisodeResults(worker_id=worker_id, results=batch))
            )
        except WireError as err:
            await self._send_halves(batch, err)
            return
        for receipt in receipts.receipts:
            self._unsent.pop(receipt.lease_id, None)
            if receipt.status == "invalid":
                _log.error("the dataflow refused the result of %s: %s", receipt.lease_id, receipt.reason)

    async def _send_halves(self, batch: tuple[EpisodeResult, ...], error: WireError) -> None:
        """Sends a batch in halves after the whole request was refused, for example because it was too large.

        A single result that is refused becomes a failure, which is small. If it is a failure already, it is
        dropped.
        """
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

    def _note_if_empty(self) -> None:
        """Wakes those who wait for an empty outbox if no result is left."""
        # Otherwise `_arrived` stays set, so that `run` sends the rest at once.
        if not self._unsent:
            self._arrived.clear()
            self.is_empty.set()
