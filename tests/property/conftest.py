"""A service of a run that many examples of a test ask."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from astraflow.dataflow.config import DataflowConfig
from drivers.dataflow_driver import Run, ScriptedTrainer, ScriptedWorker, running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Run]]:
    """A run with a trainer, a version and a worker with leases; its loop."""
    stack = AsyncExitStack()

    async def started() -> Run:
        config = DataflowConfig(lease_timeout_s=1e6)  # nothing happens by itself, however long a test takes
        run = await stack.enter_async_context(running(tmp_path_factory.mktemp("run"), config=config))
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        await worker.lease()
        return run

    with asyncio.Runner() as runner:
        yield runner, runner.run(started())
        runner.run(stack.aclose())
