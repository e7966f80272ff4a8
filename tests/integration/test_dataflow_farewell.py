"""What rollout services hear last, and of a version that they load while they ask for leases."""

import asyncio
from pathlib import Path

from astraflow.dataflow.config import DataflowConfig
from astraflow.types import Heartbeat, LeaseRequest, Load, ServedVersions
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, running


def serves(*versions: int) -> tuple[ServedVersions, ...]:
    return (ServedVersions(policy="actor", versions=versions),)


async def test_the_farewell_waits_until_every_service_heard_the_end(tmp_path: Path) -> None:
    async with running(tmp_path, config=DataflowConfig(heartbeat_s=30.0)) as run:
        first, second = ScriptedWorker(run.client, "a"), ScriptedWorker(run.client, "b")
        await first.register()
        await second.register()
        await run.client.stop("done")
        farewell = asyncio.create_task(run.service.say_farewell())
        await first.lease()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not farewell.done()
        await second.beat()
        async with asyncio.timeout(2):
            await farewell


async def test_a_service_that_drains_away_needs_no_farewell(tmp_path: Path) -> None:
    async with running(tmp_path, config=DataflowConfig(heartbeat_s=30.0)) as run:
        worker = ScriptedWorker(run.client)
        await worker.register()
        await run.client.stop("done")
        farewell = asyncio.create_task(run.service.say_farewell())
        await run.client.drain(worker.id)
        async with asyncio.timeout(2):
            await farewell


async def test_a_service_that_is_silent_at_the_end_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async with running(tmp_path, config=DataflowConfig(heartbeat_s=0.01)) as run:
        await ScriptedWorker(run.client).register()
        await run.client.stop("done")
        async with asyncio.timeout(5):
            await run.service.say_farewell()


async def test_a_run_that_goes_on_has_no_farewell(tmp_path: Path) -> None:
    async with running(tmp_path, config=DataflowConfig(heartbeat_s=30.0)) as run:
        await ScriptedWorker(run.client).register()
        async with asyncio.timeout(2):
            await run.service.say_farewell()


async def test_a_request_that_was_overtaken_by_a_heartbeat_is_answered_after_the_next_one(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        newest = Heartbeat(lease_ids=(), load=Load(versions=serves(0)))
        await run.client.heartbeat(worker.id, newest)
        late = LeaseRequest(worker_id=worker.id, num_free=1, served=())
        parked = asyncio.create_task(run.client.leases(late))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not parked.done()
        await run.client.heartbeat(worker.id, newest)
        async with asyncio.timeout(2):
            assert len((await parked).leases) == 1
