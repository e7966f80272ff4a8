"""Threads that write the journal: one job at a time, one wake-up of the event loop for each."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

__all__ = ["JobFailedError", "JournalThread"]

Job = Callable[[], Exception | None]


class JobFailedError(RuntimeError):
    """A job raised instead of returning its error; its trace is on standard error, and the thread is gone."""


class _Call(NamedTuple):
    job: Job
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Exception | None]


class JournalThread:
    """Runs jobs that block, in order. `await run(job)` is the error that the job returns, or None.

    Owns its thread from construction to `close`.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_gone = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Job) -> Exception | None:
        """What the job returns. A cancelled caller does not stop the job."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Exception | None] = loop.create_future()
        self._calls.put(_Call(job, loop, answer))
        if self._is_gone:
            self._refuse_all()
        return await answer

    def close(self) -> None:
        """Ends the thread after the jobs that it has."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                error: Exception | None = JobFailedError("the journal's thread failed")
                try:
                    error = call.job()
                finally:
                    call.loop.call_soon_threadsafe(_answer, call.answer, error)
        finally:
            self._is_gone = True
            self._refuse_all()

    def _refuse_all(self) -> None:
        """Answers those who came when the thread was gone, or going."""
        with contextlib.suppress(Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None:
                    error = JobFailedError("the journal's thread is gone")
                    call.loop.call_soon_threadsafe(_answer, call.answer, error)


def _answer(answer: asyncio.Future[Exception | None], error: Exception | None) -> None:
    if not answer.done():
        answer.set_result(error)
