"""Runs parts of an episode at once; none outlives the episode."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["in_parallel"]

_ResultT = TypeVar("_ResultT")


async def in_parallel(parts: Iterable[Coroutine[Any, Any, _ResultT]]) -> list[_ResultT]:
    """The results in order. When one fails the others are cancelled, unlike with `asyncio.gather`.

    Raises: ExceptionGroup of what failed.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in parts]
    return [task.result() for task in tasks]
