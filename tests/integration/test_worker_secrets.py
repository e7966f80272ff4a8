"""A worker's token lets a service act for itself, and for no other service."""

import itertools
import logging
from pathlib import Path

import pytest

from astraflow.dataflow.audit import audit
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.config import DataflowConfig
from astraflow.errors import RefusedError, UnavailableError
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.service.server import TokenAuth
from astraflow.service.worker_ids import handle_of, public_target
from astraflow.types import EpisodeResult, EpisodeResults, Failure, Heartbeat, LeaseRequest, Load
from drivers.dataflow_driver import (
    Run,
    ScriptedTrainer,
    ScriptedWorker,
    make_episode,
    make_trajectory,
    running,
)

_READ_BY_ALL = (
    "/v1/run",
    "/v1/status",
    "/metrics",
    "/v1/evals",
    "/v1/policies/actor/versions",
    "/v1/policies/actor/steps",
)


def bytes_below(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def seen(run: Run) -> str:
    """All that a service with a worker's token can read."""
    transport, texts = MemoryTransport(run.service.app), list[str]()
    for path in _READ_BY_ALL:
        reply = await transport.request(
            "GET", path, headers={"accept": "application/json"}, body=b"", timeout_s=5
        )
        assert reply.status == 200
        texts.append(reply.body.decode())
    return "\n".join(texts)


async def forged_ids(run: Run, victim: ScriptedWorker, own: ScriptedWorker) -> set[str]:
    """What can be made of what is shown, and of a service's own id."""
    shown = {worker.id for worker in (await run.client.status()).workers}
    assert handle_of(victim.id) in shown
    ends = ("", ".", f".{own.id.rpartition('.')[2]}", f".{'0' * 32}", ".0", "..")
    forged = {f"{handle}{end}" for handle, end in itertools.product(shown, ends)} | {victim.name, ""}
    return forged - {own.id}


async def test_no_service_acts_for_another(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        victim, thief = ScriptedWorker(run.client, "victim"), ScriptedWorker(run.client, "thief")
        await victim.register()
        await thief.register()
        leases = await victim.lease(2)
        served = await victim.served()
        for forged in await forged_ids(run, victim, thief):
            for call in (
                run.client.heartbeat(forged or "%00", Heartbeat(lease_ids=(), load=Load())),
                run.client.drain(forged or "%00"),
                run.client.leases(LeaseRequest(worker_id=forged, num_free=1, served=served, held=())),
            ):
                with pytest.raises(RefusedError, match="register again"):
                    await call
        for sender in (thief.id, *await forged_ids(run, victim, thief)):
            for lease in leases:
                for outcome in (
                    make_episode(make_trajectory(reward=1e6)),
                    make_episode(make_trajectory(version=10**9)),  # invalid: counted as a failed attempt
                    Failure(error_class="Stolen", message="", is_retryable=False),
                ):
                    results = (EpisodeResult(lease_id=lease.id, outcome=outcome),)
                    reply = await run.client.episodes(EpisodeResults(worker_id=sender, results=results))
                    assert reply.receipts[0].status in {"dropped", "invalid"}
        assert await victim.beat(*[lease.id for lease in leases]) == ()
        receipts = await victim.send(*[await victim.answer(lease) for lease in leases])
        assert [receipt.status for receipt in receipts.receipts] == ["accepted", "accepted"]
        (shown,) = (worker for worker in (await run.client.status()).workers if worker.name == "victim")
        assert not shown.is_draining
    assert audit(tmp_path).problems == ()


async def test_the_secret_of_a_service_is_shown_to_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        secret = worker.id.rpartition(".")[2]
        lost = (await worker.lease(1))[0]
        request = LeaseRequest(worker_id=worker.id, num_free=1, served=await worker.served(), held=())
        await run.client.leases(request)  # the log says that a lease got lost
        await worker.send(EpisodeResult(lease_id=lost.id, outcome=make_episode(make_trajectory())))
        assert secret not in await seen(run)
        with pytest.raises(RefusedError) as refusal:
            await run.client.heartbeat(f"gone.{secret}", Heartbeat(lease_ids=(), load=Load()))
        assert secret not in str(refusal.value)
    assert len(secret) == 32
    assert secret not in caplog.text
    assert not any(secret.encode() in data for data in bytes_below(tmp_path))


async def test_a_service_keeps_its_id_over_a_restart_of_the_dataflow(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        worker = ScriptedWorker(run.client)
        await worker.register()
    async with running(tmp_path) as run:
        worker.client = run.client
        assert await worker.beat() == ()
        with pytest.raises(RefusedError, match="register again"):
            await run.client.drain(handle_of(worker.id))


async def test_a_service_is_asked_to_leave_by_its_handle_and_by_no_other_service(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        (lease,) = await worker.lease(1)
        handle = handle_of(worker.id)
        app = TokenAuth(run.service.app, {"worker-token": "worker"})
        http = ServiceClient("memory", token="worker-token", transport=MemoryTransport(app))
        with pytest.raises(RefusedError) as refusal:
            await DataflowClient(http).ask_to_leave(handle)
        assert refusal.value.code == "forbidden"

        await run.client.ask_to_leave(handle)
        beat = await run.client.heartbeat(worker.id, Heartbeat(lease_ids=(lease.id,), load=Load()))
        assert beat.is_draining
        assert await worker.lease(1) == ()
        receipts = await worker.send(await worker.answer(lease))
        assert [receipt.status for receipt in receipts.receipts] == ["accepted"]
        assert (await run.client.status()).workers == ()
        await run.client.ask_to_leave(handle)  # it is gone: nothing happens
    assert audit(tmp_path).problems == ()


async def test_a_target_shows_no_secret() -> None:
    assert public_target("/v1/workers/w.1.abc/heartbeat?a=1") == "/v1/workers/w.1/heartbeat"
    assert public_target("/v1/leases?a=w.1.abc") == "/v1/leases"


async def test_services_that_only_register_make_room(tmp_path: Path) -> None:
    async with running(tmp_path, config=DataflowConfig(heartbeat_s=0.05)) as run:
        run.service._liveness.max_workers = 3
        alive = ScriptedWorker(run.client, "alive")
        await alive.register()
        for number in range(4):
            while True:
                await alive.beat()
                try:
                    await ScriptedWorker(run.client, f"empty-{number}").register()
                    break
                except UnavailableError:
                    continue
        workers = (await run.client.status()).workers
        assert len(workers) == 3
        assert alive.name in {worker.name for worker in workers}
        assert await alive.beat() == ()


async def test_no_service_makes_room_while_all_are_alive(tmp_path: Path) -> None:
    async with running(tmp_path, config=DataflowConfig(heartbeat_s=60.0)) as run:
        run.service._liveness.max_workers = 1
        await ScriptedWorker(run.client).register()
        hasty = ServiceClient("memory", transport=MemoryTransport(run.service.app), patience_s=0.0)
        with pytest.raises(UnavailableError, match="the maximum of 1 rollout services has joined"):
            await ScriptedWorker(DataflowClient(hasty)).register()
