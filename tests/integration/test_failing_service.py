"""A rollout service that fails every lease, and runs that failed and are started again."""

import asyncio
import logging
from pathlib import Path

import pytest

from astraflow.dataflow.audit import audit
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, play_run, running


async def test_a_service_that_fails_every_lease_is_named_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "astraflow.dataflow")
    async with running(tmp_path, make_plan(num_steps=6, num_tasks=500)) as run:
        broken = ScriptedWorker(run.client, "broken")
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            failing = group.create_task(broken.fail_all())
            await ScriptedTrainer(run.client).attach()
            await broken.leased(24)  # It takes every lease before the working service joins.
            (worker,) = (await run.client.status()).workers
            await play_run(run, num_workers=1)
            await failing
        status = await run.client.status()
    assert (worker.name, worker.is_set_aside, worker.failed_in_a_row) == ("broken", True, 3)
    assert worker.last_failure == "Broken: as ever"
    assert (status.state, status.reason) == ("finished", "all steps are done")
    assert status.policies[0].fates.failed <= 24
    assert "rollout service broken" in caplog.text
    assert "set aside" in caplog.text
    report = audit(tmp_path)
    assert report.problems == ()


async def test_a_waiting_service_gets_a_lease_as_soon_as_its_rest_is_over(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(num_tasks=500)) as run:
        broken = ScriptedWorker(run.client, "broken")
        await ScriptedTrainer(run.client).attach()
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            failing = group.create_task(broken.fail_all())
            await broken.leased(26)  # Two more, one second and two seconds after the third strike.
            failing.cancel()
        (worker,) = (await run.client.status()).workers
        assert worker.failed_in_a_row >= 4


async def test_a_failed_run_continues_when_restarted_on_request_and_passes_its_audit(tmp_path: Path) -> None:
    plan = make_plan(num_steps=4, eval_tasks=3)
    async with running(tmp_path, plan) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        leases = await worker.lease(16)
        await worker.send(*[await worker.answer(lease) for lease in leases])
        await run.client.stop("something broke", is_failure=True)
        assert (await run.client.status()).state == "failed"
    assert audit(tmp_path).problems == ()
    async with running(tmp_path, plan) as run:
        assert (await run.client.status()).state == "failed", "a restart alone must not resume a failed run"
    async with running(tmp_path, plan, resumes_failed=True) as run:
        assert (await run.client.status()).state == "running"
        async with asyncio.timeout(15):
            await play_run(run)
        assert (await run.client.status()).reason == "all steps are done"
        assert len(await run.client.evals(wait_s=0)) >= 3
    report = audit(tmp_path)
    assert report.problems == ()
    async with running(tmp_path, plan, resumes_failed=True) as run:
        assert (await run.client.status()).state == "finished"
