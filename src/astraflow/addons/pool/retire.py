"""Retires a rollout service: asks the dataflow to let it leave, as a pool that sizes itself does, and waits.

The dataflow gives the service no further leases, and tells it with its next heartbeat to leave. The service
sends the results of its episodes and ends with `RETIRED_CODE`, so its supervisor doesn't start it again.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError, DataError, ServiceError, UnavailableError
from astraflow.recipe.access import needs_tokens
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.client import ServiceClient, check_url
from astraflow.types import WorkerStatus
from astraflow.user_input.mistakes import hint

__all__ = ["Retired", "retire_service"]

_PATIENCE_S = 2.0
_EVERY_S = 0.5
"""Time between two looks at whether the service has left. Each repeats the request, because a dataflow that
restarted has forgotten it."""


@dataclass(frozen=True)
class Retired:
    """A service that has left, and the names of those that stay."""

    name: str
    stay: tuple[str, ...]


async def retire_service(
    where: str, service: str, *, wait_s: float, token: str = "", ca_file: str = ""
) -> Retired:
    """Retires a service of a live run. `where`: its folder or URL. `service`: its name or id in the status.

    Raises: ConfigError if no service, or more than one, has that name; DataError if the run isn't live;
    ServiceError if the service is still there after `wait_s`; UnavailableError; RefusedError.
    """
    url = where
    if where.startswith(("http://", "https://")):
        check_url(where)
    else:
        folder = RunFolder(Path(where))
        recipe = folder.load_recipe()
        url = folder.load_record().url
        token = token or (folder.token("admin") if needs_tokens(recipe) else "")
        ca_file = ca_file or recipe.dataflow.tls.ca_file
    calls = ServiceClient(url, token=token, patience_s=_PATIENCE_S, ca_file=ca_file)
    try:
        client = DataflowClient(calls)
        status = await client.status()
        if status.state != "running":
            raise DataError(f"{where}: the run is {status.state}; its services end without being retired")
        return await _retire(client, _find(status.workers, service), wait_s)
    finally:
        await calls.close()


def _find(workers: tuple[WorkerStatus, ...], service: str) -> WorkerStatus:
    found = [worker for worker in workers if service in {worker.name, worker.id}]
    if not found:
        known = [worker.name for worker in workers]
        raise ConfigError(f"rollout service {service!r} isn't part of the run{hint(service, known)}")
    if len(found) > 1:
        ids = ", ".join(worker.id for worker in found)
        raise ConfigError(f"{len(found)} rollout services are called {service!r}; name one by its id: {ids}")
    return found[0]


async def _retire(client: DataflowClient, worker: WorkerStatus, wait_s: float) -> Retired:
    deadline_s = time.monotonic() + wait_s
    num_leases = worker.num_leases
    while True:
        with suppress(UnavailableError):  # a dataflow that restarts is asked again
            await client.ask_to_leave(worker.id)
            workers = (await client.status()).workers
            there = [each for each in workers if each.id == worker.id]
            if not there:
                return Retired(worker.name, tuple(each.name for each in workers if not each.is_draining))
            num_leases = there[0].num_leases
        if time.monotonic() >= deadline_s:
            raise ServiceError(
                f"{worker.name} was asked to leave and still runs {num_leases} episodes after {wait_s:g} s; "
                "it leaves when they end, so repeat the command with a larger --wait-s"
            )
        await asyncio.sleep(_EVERY_S)
