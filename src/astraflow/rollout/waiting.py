"""Waits for events, tasks and calls, whichever comes first."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["done_or_set", "first_of", "unless"]

_T = TypeVar("_T")


async def first_of(*events: asyncio.Event) -> None:
    """Returns when at least one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def unless(call: Coroutine[Any, Any, _T], event: asyncio.Event) -> _T | None:
    """Returns what `call` returns, or None if the event is set first; the call is then cancelled."""
    task = asyncio.ensure_future(call)
    try:
        await done_or_set(task, event)
        return task.result() if task.done() else None
    finally:
        task.cancel()


async def done_or_set(task: "asyncio.Future[Any]", event: asyncio.Event) -> None:
    """Returns when the task is done or the event is set; the task continues."""
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
