"""Waits for the first of several events, tasks, and calls."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_unless", "wait_for_any", "wait_for_done_or_set"]

_T = TypeVar("_T")


async def wait_for_any(*events: asyncio.Event) -> None:
    """Returns when at least one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def run_unless(call: Coroutine[Any, Any, _T], event: asyncio.Event) -> _T | None:
    """Runs a call and returns its result, or cancels it and returns None if the event is set first."""
    task = asyncio.ensure_future(call)
    try:
        await wait_for_done_or_set(task, event)
        return task.result() if task.done() else None
    finally:
        task.cancel()


async def wait_for_done_or_set(task: "asyncio.Future[Any]", event: asyncio.Event) -> None:
    """Returns when the task is done or the event is set. The task keeps running."""
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
