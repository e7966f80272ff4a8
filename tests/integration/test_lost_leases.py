"""Leases whose answer never reached the rollout service: it gave up its request, or the connection broke."""

import asyncio
from pathlib import Path

from astraflow.dataflow.client import DataflowClient
from astraflow.types import EpisodeResult, Failure, Lease, LeaseRequest, ServedVersions
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, running


async def request(
    worker: ScriptedWorker, *, held: tuple[str, ...] | None, wait_s: float = 0.0
) -> LeaseRequest:
    served = await worker.served()
    return LeaseRequest(worker_id=worker.id, num_free=2, served=served, wait_s=wait_s, held=held)


async def test_leases_that_the_service_does_not_hold_go_out_again_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        worker = ScriptedWorker(run.client)
        await ScriptedTrainer(run.client).attach()
        await worker.register()
        lost = (await run.client.leases(await request(worker, held=()))).leases
        again = (await run.client.leases(await request(worker, held=()))).leases
        assert [(x.group_id, x.episode_idx, x.attempt) for x in again] == [
            (x.group_id, x.episode_idx, 1) for x in lost
        ]


async def test_leases_that_the_service_holds_stay_its_own(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        worker = ScriptedWorker(run.client)
        await ScriptedTrainer(run.client).attach()
        await worker.register()
        first = (await run.client.leases(await request(worker, held=()))).leases
        held = tuple(lease.id for lease in first)
        more = (await run.client.leases(await request(worker, held=held))).leases
        assert {lease.attempt for lease in more} == {0}
        assert not {lease.id for lease in more} & set(held)


async def test_a_service_that_does_not_say_what_it_holds_keeps_its_leases(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        worker = ScriptedWorker(run.client)
        await ScriptedTrainer(run.client).attach()
        await worker.register()
        await run.client.leases(await request(worker, held=None))
        more = (await run.client.leases(await request(worker, held=None))).leases
        assert {lease.attempt for lease in more} == {0}


async def test_an_older_request_of_the_same_service_grants_nothing_more(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        worker = ScriptedWorker(run.client)
        await worker.register()
        served = (ServedVersions(policy="actor", versions=(0,)),)
        ask = LeaseRequest(worker_id=worker.id, num_free=2, served=served, wait_s=20.0, held=())
        async with asyncio.timeout(5):
            older = asyncio.create_task(run.client.leases(ask))
            await parked(run.client, 1)
            newer = asyncio.create_task(run.client.leases(ask))
            await parked(run.client, 2)
            await ScriptedTrainer(run.client).attach()
            assert (await older).leases == ()
            assert len((await newer).leases) == 2


async def test_a_lease_that_comes_back_wakes_one_of_many_services_and_the_longest_waiting(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, make_plan(groups_per_batch=1, group_size=2)) as run:
        await ScriptedTrainer(run.client).attach()
        first = ScriptedWorker(run.client, "first")
        await first.register()
        held = list(await first.lease(num_free=100))
        others = [ScriptedWorker(run.client, "w0") for _ in range(12)]
        asked: list[asyncio.Task[tuple[Lease, ...]]] = []
        for number, other in enumerate(others, start=1):
            await other.register()
            asked.append(asyncio.create_task(other.lease(num_free=1, wait_s=20.0)))
            await parked(run.client, number)
        failure = Failure(error_class="engine", message="out of memory")
        for number, lease in enumerate(held[:3], start=1):
            await first.send(EpisodeResult(lease_id=lease.id, outcome=failure))
            (again,) = await asked[number - 1]
            assert (again.group_id, again.episode_idx, again.attempt) == (
                lease.group_id,
                lease.episode_idx,
                1,
            )
            assert [task.done() for task in asked] == [True] * number + [False] * (12 - number)
        for task in asked:
            task.cancel()


async def parked(client: DataflowClient, count: int) -> None:
    """Returns when that many requests of the service wait."""
    # The status has no event to wait for.
    while len([wait for wait in (await client.status()).waits if wait.who.name == "w0"]) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)
