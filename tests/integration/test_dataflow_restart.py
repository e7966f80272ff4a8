"""What survives: restarts in mid-run, torn segments, a full disk, a second process."""

import datetime as dt
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from astraflow.dataflow.audit import audit
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.errors import JournalError
from astraflow.types import Fingerprints, SessionRequest, StatusReply
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, kept, make_plan, play_run, running
from drivers.log_driver import replace_plans


def facts(status: StatusReply) -> tuple[object, ...]:
    """What a restart must keep."""
    return status.state, kept(status.policies), [(w.id, w.name, w.num_leases) for w in status.workers]


@pytest.mark.parametrize("snapshot_every", [3, 20_000])
async def test_a_restart_in_mid_run_gives_the_same_state_and_the_run_goes_on(
    tmp_path: Path, snapshot_every: int
) -> None:
    plan = make_plan(num_steps=3)
    async with running(tmp_path, plan, snapshot_every=snapshot_every) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        first = await worker.lease(8)
        await worker.send(*[await worker.answer(lease) for lease in first])
        batch = await run.client.batch("actor", 0, epoch=trainer.session.epoch)
        held = await worker.lease(3)
        before, run_id = facts(await run.client.status()), (await run.client.run()).run_id
    began_s = dt.datetime(2001, 2, 3, tzinfo=dt.UTC).timestamp()
    with JournalReader(tmp_path) as reader:
        plans = [msgspec.structs.replace(plan, at_s=began_s) for plan in reader.plan_entries()]
        is_compacted = not reader.logged_plans()
    if is_compacted:
        with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database, database:
            database.execute("DELETE FROM plans")
    replace_plans(tmp_path, plans)
    async with running(tmp_path, plan, snapshot_every=snapshot_every) as run:
        assert facts(await run.client.status()) == before
        info = await run.client.run()
        assert info.run_id == run_id
        assert [policy.date for policy in info.policies] == ["2001-02-03"]  # the day on which it began
        worker.client = trainer.client = run.client
        assert await worker.beat(*[lease.id for lease in held]) == ()
        assert await run.client.batch("actor", 0, epoch=trainer.session.epoch) == batch
        receipts = await worker.send(*[await worker.answer(lease) for lease in held])
        assert {receipt.status for receipt in receipts.receipts} == {"accepted"}
        await trainer.commit(0)
        await play_run(run)
    report = audit(tmp_path)
    assert report.problems == ()
    assert (report.policies[0].steps, report.is_over) == (3, True)


async def test_a_crash_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """The folder is copied in mid-run, without any closing: that is what a kill leaves."""
    folder, copy = tmp_path / "run", tmp_path / "copy"
    async with running(folder) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        leases = await worker.lease(8)
        await worker.send(*[await worker.answer(lease) for lease in leases[:5]])
        before = facts(await run.client.status())
        shutil.copytree(folder, copy)
        assert audit(folder).ok
    with (copy / "segments" / "00000000.seg").open("ab") as file:
        file.write(b"\x99" * 11)
    async with running(copy) as run:
        assert facts(await run.client.status()) == before
    assert audit(copy).ok


async def test_a_finished_run_stays_finished(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(num_steps=1)) as run:
        await play_run(run)
    async with running(tmp_path, make_plan(num_steps=1)) as run:
        assert (await run.client.status()).state == "finished"
        assert len(await run.client.steps("actor", wait_s=0)) == 1


async def test_a_run_may_be_lengthened_after_a_clean_stop(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(num_steps=2)) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await worker.send(*[await worker.answer(lease) for lease in await worker.lease(8)])
    async with running(tmp_path, make_plan(num_steps=4)) as run:
        await play_run(run)
        assert (await run.client.status()).policies[0].step == 4
    assert audit(tmp_path).problems == ()


async def test_a_plan_that_changes_the_past_is_refused_with_the_record(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    async with running(folder, make_plan(seed=0)) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await worker.lease(8)
        shutil.copytree(folder, copy)
    with pytest.raises(JournalError, match=r"journal record \d+: .* other events"):
        async with running(copy, make_plan(seed=1)):
            pass


async def test_a_second_service_on_the_same_journal_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path):
        with pytest.raises(JournalError, match="in use by process"):
            Journal(tmp_path)


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from drivers.dataflow_driver import *
from astraflow.dataflow.audit import audit
from astraflow.errors import UnavailableError

async def main(folder):
    async with running(folder) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        leases = await worker.lease(8)
        sent = await worker.send(*[await worker.answer(lease) for lease in leases[:2]])
        assert all(r.status == "accepted" for r in sent.receipts)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        largest = max(p.stat().st_size for p in (folder / "segments").iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
        results = [await worker.answer(lease) for lease in leases[2:]]
        try:
            await worker.send(*results)
        except UnavailableError as err:
            assert "cannot be written" in str(err) and "What was acknowledged is safe" in str(err), err
        else:
            raise AssertionError("a result was acknowledged on a full disk")
        try:
            await run.client.health()
        except UnavailableError as err:
            pass
        else:
            raise AssertionError("health is fine on a full disk")
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        patient = ServiceClient("http://memory", patience_s=10.0, transport=MemoryTransport(run.service.app))
        worker.client = DataflowClient(patient)
        sent = await worker.send(*results)
        assert {r.status for r in sent.receipts} <= {"accepted", "dropped"}, sent
        batch = await run.client.batch("actor", 0, epoch=trainer.session.epoch)
        assert batch is not None and batch.totals.num_samples == 8
    report = audit(folder)
    assert report.ok, report.problems
    assert report.num_results == 8
    print("went on")

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_full_disk_refuses_clearly_and_the_service_goes_on_once_there_is_room(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "journal"), tests],
        capture_output=True,
        text=True,
        timeout=18,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


async def test_a_session_after_a_restart_fences_the_one_before(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
    async with running(tmp_path) as run:
        request = SessionRequest(trainer_id="t1", durable_step=0, fingerprints=Fingerprints())
        session = await run.client.attach("actor", request)
        assert (session.epoch, session.next_version) == (2, 1)
