"""Drops a batch that cannot be trained, in a live run or in the folder of a stopped one.

A stopped run gets the same request as a live one: this module opens the run's dataflow in the current
process, without the other services.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError, DataError, UnavailableError
from astraflow.processes.dataflow_process import make_service
from astraflow.recipe.access import needs_tokens
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.client import MemoryTransport, ServiceClient, check_url
from astraflow.types import DropReply, DropRequest
from astraflow.user_input.mistakes import hint

__all__ = ["DropResult", "drop_batch"]

_PATIENCE_S = 2.0


class DropResult(DropReply, frozen=True, kw_only=True):
    """The reply of the dataflow, and whether the run is live."""

    is_live: bool


async def drop_batch(
    where: str, policy: str, *, step: int, reason: str, token: str = "", ca_file: str = ""
) -> DropResult:
    """Drops the batch of a policy's oldest step that is not committed. `where` is a run folder or a URL.

    `step` is the expected number of that step, counted from 1; 0 accepts any number.
    Raises: ConfigError or DataError for the run; RefusedError if the step has no batch that can be dropped.
    """
    if where.startswith(("http://", "https://")):
        check_url(where)
        return await _ask(where, policy, step=step, reason=reason, token=token, ca_file=ca_file)
    folder = RunFolder(Path(where))
    if folder.is_finished:
        raise DataError(f"{where} is finished; none of its batches can be dropped")
    record = folder.load_record()
    recipe = folder.load_recipe()
    token = token or (folder.token("admin") if needs_tokens(recipe) else "")
    ca_file = ca_file or recipe.dataflow.tls.ca_file
    try:
        return await _ask(record.url, policy, step=step, reason=reason, token=token, ca_file=ca_file)
    except UnavailableError:
        async with _opened(folder) as client:
            return await _drop(client, policy, step=step, reason=reason, is_live=False)


async def _ask(url: str, policy: str, *, step: int, reason: str, token: str, ca_file: str) -> DropResult:
    calls = ServiceClient(url, token=token, patience_s=_PATIENCE_S, ca_file=ca_file)
    try:
        return await _drop(DataflowClient(calls), policy, step=step, reason=reason, is_live=True)
    finally:
        await calls.close()


async def _drop(client: DataflowClient, policy: str, *, step: int, reason: str, is_live: bool) -> DropResult:
    policies = {known.name: known for known in (await client.status()).policies}
    if policy not in policies:
        raise ConfigError(f"policy {policy!r} has no trainer{hint(policy, list(policies))}")
    status = policies[policy]
    request = DropRequest(step=step - 1 if step else status.step, epoch=status.epoch, reason=reason)
    reply = await client.drop_batch(policy, request)
    return DropResult(steps=reply.steps, num_groups=reply.num_groups, is_live=is_live)


@asynccontextmanager
async def _opened(folder: RunFolder) -> AsyncGenerator[DataflowClient]:
    """Opens the dataflow of a stopped run. Raises: JournalError if the journal is in use or damaged."""
    service = make_service(folder, folder.load_recipe())
    await service.start()
    calls = ServiceClient("http://memory", patience_s=_PATIENCE_S, transport=MemoryTransport(service.app))
    try:
        yield DataflowClient(calls)
    finally:
        await calls.close()
        await service.stop()
