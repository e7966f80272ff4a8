"""Lists the tasks of a host for a task source: all at once, with a host that runs only for that."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from astraflow import wire
from astraflow.addons.agents.hosts.config import MAX_TASKS, HostConfig, HostedSourceConfig
from astraflow.addons.agents.hosts.messages import HostedSpec, HostedTask, Refusal, TaskPage
from astraflow.addons.agents.hosts.process import HostLostError, HostProcess
from astraflow.errors import ConfigError, DataError
from astraflow.tasks.sources import ListSource
from astraflow.types import Task

__all__ = ["hosted_source", "list_hosted_tasks"]

_PAGE = 1024
"""Number of tasks in one request."""
_MAX_DATA_BYTES = 4 * 1024 * 1024
"""Largest size of a task's data, which is sent as JSON text with the task."""


def hosted_source(config: HostedSourceConfig, host: HostConfig, *, name: str) -> ListSource:
    """Makes the source of a host's tasks. Raises: like `list_hosted_tasks`."""
    tasks = list_hosted_tasks(host, split=config.split, skip=config.skip, limit=config.limit or MAX_TASKS + 1)
    if len(tasks) > MAX_TASKS:
        raise DataError(
            f"the host of {host.serve!r} has more than {MAX_TASKS:,} tasks, or infinitely many; set `limit` "
            f"to 1 to {MAX_TASKS:,}"
        )
    return ListSource(
        Task(
            id=f"{name}/{task.id}",
            source=name,
            prompt=task.prompt,
            spec=msgspec.json.encode(HostedSpec(task.data)).decode(),
        )
        for task in tasks
    )


def list_hosted_tasks(config: HostConfig, *, split: str, skip: int, limit: int) -> Sequence[HostedTask]:
    """Lists the tasks of a split: `limit` of them, after the first `skip`. Blocks.

    Raises: ConfigError if the host cannot be started or has no matching tasks; DataError if it cannot list
    its tasks, or they are invalid.
    """
    # It uses a separate thread, because an event loop may be running in the caller's.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _list_tasks(config, split, skip, limit)).result()


async def _list_tasks(config: HostConfig, split: str, skip: int, limit: int) -> list[HostedTask]:
    process, _ = await HostProcess.start(config, lists=True)
    tasks: list[HostedTask] = []
    try:
        while len(tasks) < limit:
            # The host continues where the last page ended; it applies `skip` to the first page only.
            question = {"split": split, "skip": skip, "limit": min(_PAGE, limit - len(tasks))}
            async with asyncio.timeout(config.open_timeout_s):
                answer = await process.ask("tasks", json.dumps(question).encode())
            page = _decode_page(answer.kind, answer.body)
            tasks += page.tasks
            if page.is_last or not page.tasks:
                break
    except TimeoutError as err:
        raise DataError(
            f"the host of {config.serve!r} did not list its tasks within open_timeout_s = "
            f"{config.open_timeout_s:g}"
        ) from err
    except HostLostError as err:
        raise DataError(f"the host of {config.serve!r} did not list its tasks: {err}") from err
    finally:
        await process.close()
    if not tasks:
        raise ConfigError(
            f"the host of {config.serve!r} has no tasks for split {split!r} after skipping {skip}; choose "
            "another split or a smaller skip"
        )
    _check_tasks(tasks, config)
    return tasks


def _decode_page(kind: str, body: bytes) -> TaskPage:
    try:
        if kind == "failed":
            refusal = msgspec.json.decode(body, type=Refusal)
            raise DataError(f"the host cannot list its tasks: {refusal.error_class}: {refusal.message}")
        return wire.decode_foreign_json(body, TaskPage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise DataError(f"the host's answer is not a list of tasks: {err}") from err


def _check_tasks(tasks: Sequence[HostedTask], config: HostConfig) -> None:
    ids = sorted(task.id for task in tasks)
    if repeated := next((one for one, other in itertools.pairwise(ids) if one == other), ""):
        raise DataError(f"the host of {config.serve!r} has two tasks with the id {repeated!r}")
    for task in tasks:
        if len(bytes(task.data)) > _MAX_DATA_BYTES:
            raise DataError(
                f"task {task.id!r} of the host has more than {_MAX_DATA_BYTES} bytes of data; put a "
                "reference to the rest into the data, and load the rest in the host"
            )
