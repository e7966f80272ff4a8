"""Long polls: a request checks the run's state, waits for a change, and checks again.

A poll ends when it finds something, at its deadline, when the run is over, when the service stops, or when
the caller hangs up. Only a command changes what a poll finds, and the dispatcher wakes polls after each one.
"""

import asyncio
import contextlib
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from astraflow.dataflow.api import MAX_WAIT_S
from astraflow.dataflow.service.dispatcher import Dispatcher
from astraflow.dataflow.service.waiting import WaitList, wait_until
from astraflow.types import Wait

__all__ = ["LongPolls", "wait_for_disconnect"]

_FoundT = TypeVar("_FoundT")
_CHANCE_SLACK_S = 0.01
"""A service checks this long after its chance, so that it isn't early by the difference of two clocks."""


class LongPolls:
    """The long polls of one run's requests. `stop` ends them all.

    Example: `await polls.poll("evals", look, wait_s=25.0, request=request)`.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.waits = WaitList()
        self._is_stopping = False

    def stop(self) -> None:
        """Lets every long poll answer now, because the service ends."""
        self._is_stopping = True
        self._dispatcher.wake_all()

    async def poll(
        self,
        topic: str,
        look: Callable[[], _FoundT | None],
        *,
        wait_s: float,
        request: Request,
        wait: Callable[[], Wait] | None = None,
    ) -> _FoundT | None:
        """Returns what `look` finds; None if it has found nothing by the end of the poll.

        `look` is called again after each wake-up of the topic. Meanwhile, `wait` is in the list of waits.
        """
        deadline_s = self._deadline_s(wait_s)
        with _HangUp(request) as hang_up:
            while True:
                # Taken before the look, so that no wake-up between the look and the wait is missed.
                event = self._dispatcher.topics.next(topic)
                result = look()
                if result is not None or self._is_over:
                    return result
                hang_up.watch()
                with self.waits.entry(wait) if wait is not None else contextlib.nullcontext():
                    if not await wait_until(event, deadline_s) or hang_up.is_gone:
                        return None

    async def poll_leases(
        self,
        look: Callable[[], _FoundT | None],
        *,
        worker_id: str,
        kind: Callable[[], Hashable],
        wait_s: float,
        request: Request,
        wait: Callable[[], Wait],
    ) -> _FoundT | None:
        """Like `poll`, for leases, which go to the requests that have waited longest.

        Services of the same `kind` can run the same leases. A service also checks again when time alone may
        bring it a lease, because a service that was set aside gets one from time to time.
        """
        queue = self._dispatcher.lease_queue
        deadline_s = self._deadline_s(wait_s)
        number = queue.new_number()
        with _HangUp(request) as hang_up:
            while True:
                queue.serve_if_due()
                result = look()
                if result is not None or self._is_over:
                    return result
                with self.waits.entry(wait), queue.waiter(worker_id, kind(), look, number=number) as waiter:
                    hang_up.watch(partial(queue.remove, waiter))
                    # The service may have to check for leases again even if nothing changed.
                    now_s = self._dispatcher.clock()
                    chance_s = self._dispatcher.core.next_chance_s(worker_id, now_s) - now_s
                    again_s = self._dispatcher.loop.time() + chance_s + _CHANCE_SLACK_S
                    await wait_until(waiter.event, min(deadline_s, again_s))
                if waiter.is_served:
                    return waiter.result()
                if self._dispatcher.loop.time() >= deadline_s or hang_up.is_gone:
                    return None

    def _deadline_s(self, wait_s: float) -> float:
        """When a poll ends, on the loop's clock. An invalid length counts as the maximum."""
        length_s = wait_s if 0 <= wait_s <= MAX_WAIT_S else MAX_WAIT_S
        return self._dispatcher.loop.time() + length_s

    @property
    def _is_over(self) -> bool:
        """Whether all polls should end."""
        return self._is_stopping or self._dispatcher.core.state in {"finished", "failed"}


class _HangUp:
    """Detects that the caller of a request has hung up, from `watch` to the end of the block."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> "_HangUp":
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def is_gone(self) -> bool:
        """Whether the caller is known to have hung up."""
        return self._task is not None and self._task.done()

    def watch(self, then: Callable[[], None] = lambda: None) -> None:
        """Starts to listen; calls `then` when the caller hangs up."""
        if self._task is None:
            task = wait_for_disconnect(self._request)
            self._task = asyncio.get_running_loop().create_task(task, name="hang-up")
        self._task.add_done_callback(lambda _: then())


async def wait_for_disconnect(request: Request) -> None:
    """Returns once the caller hangs up. After a request's body, no other message can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
