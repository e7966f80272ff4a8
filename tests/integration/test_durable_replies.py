"""No route answers before what its answer says is on disk.

The fault: the disk does not answer the journal's thread, so that no flush gets done while the event loop, and
with it every handler, runs on.
"""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.config import DataflowConfig
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.types import (
    Commit,
    EpisodeResult,
    Failure,
    Fingerprints,
    Heartbeat,
    Lease,
    Load,
    PushTasks,
    Release,
    SessionRequest,
    Task,
)
from drivers.dataflow_driver import Run, ScriptedTrainer, ScriptedWorker, make_plan, running

_FDATASYNC = os.fdatasync
_LOOK_S = 0.2
"""How long an answer that comes too early has time to come; none that is right comes in that time."""


@dataclass
class Stage:
    """A run in the middle of everything."""

    run: Run
    trainer: ScriptedTrainer
    worker: ScriptedWorker
    leases: tuple[Lease, ...]
    results: list[EpisodeResult]


@asynccontextmanager
async def staged(folder: Path, *, patience_s: float = 15.0) -> AsyncIterator[Stage]:
    """Step 0 is taken, the worker holds further leases whose results are ready."""
    plan = make_plan(num_steps=3, group_size=2, groups_per_batch=2)
    async with running(folder, plan, config=DataflowConfig(lease_timeout_s=1e6)) as run:
        transport = MemoryTransport(run.service.app)
        run.client = DataflowClient(
            ServiceClient("http://memory", patience_s=patience_s, transport=transport)
        )
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        first = await worker.lease(4)
        await worker.send(*[await worker.answer(lease) for lease in first])
        await run.client.batch("actor", 0, epoch=trainer.session.epoch)
        leases = await worker.lease(2)
        assert len(leases) == 2
        results = [await worker.answer(lease) for lease in leases]
        yield Stage(run, trainer, worker, leases, results)


@contextmanager
def held() -> Iterator[None]:
    """While the block runs, nothing gets onto the disk."""
    may_go_on = threading.Event()

    def fdatasync(file: int) -> None:
        assert may_go_on.wait(60)
        _FDATASYNC(file)

    with patch.object(os, "fdatasync", fdatasync):
        try:
            yield
        finally:
            may_go_on.set()


async def publish(stage: Stage) -> None:
    await stage.trainer.publish(1, 1)


async def fail(stage: Stage) -> None:
    failure = Failure(error_class="engine", message="out of memory")
    await stage.worker.send(EpisodeResult(lease_id=stage.leases[0].id, outcome=failure))


async def push(stage: Stage) -> None:
    task = Task(id="outside/0", source="outside", prompt="1 + 1 =", answer="2")
    await stage.run.client.push_tasks(PushTasks(tasks=(task,)))


async def attach(stage: Stage) -> None:
    request = SessionRequest(trainer_id="t1", durable_step=0, fingerprints=Fingerprints(recipe="r1"))
    await stage.run.client.attach("actor", request)


Call = Callable[[Stage], Awaitable[object]]

WRITES: dict[str, Call] = {
    "register": lambda stage: ScriptedWorker(stage.run.client, "w1").register(),
    "leases": lambda stage: stage.worker.lease(1),
    "episodes": lambda stage: stage.worker.send(*stage.results),
    "a failed episode": fail,
    "tasks": push,
    "session": attach,
    "versions": publish,
    "stop": lambda stage: stage.run.client.stop("enough"),
}
"""What makes a record of its own."""


@pytest.mark.parametrize("name", WRITES)
async def test_an_answer_waits_for_its_record(name: str, tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        with held():
            call = asyncio.ensure_future(WRITES[name](stage))
            assert not await answered(call), f"{name} was answered before its record was on disk"
        async with asyncio.timeout(15):
            await call


READS: dict[str, tuple[Call, Call]] = {
    "leases wait for the task that was pushed": (push, lambda stage: stage.worker.lease(1)),
    "versions": (publish, lambda stage: stage.run.client.versions("actor", after=0, wait_s=0)),
    "a batch": (
        lambda stage: stage.worker.send(*stage.results),
        lambda stage: stage.run.client.batch("actor", 0, epoch=stage.trainer.session.epoch),
    ),
    "the state in a heartbeat": (
        lambda stage: stage.run.client.stop("enough"),
        lambda stage: stage.run.client.heartbeat(stage.worker.id, Heartbeat(lease_ids=(), load=Load())),
    ),
    "the state in the status": (
        lambda stage: stage.run.client.stop("enough"),
        lambda stage: stage.run.client.status(),
    ),
    "the state in the run": (
        lambda stage: stage.run.client.stop("enough"),
        lambda stage: stage.run.client.run(),
    ),
    "a drained service": (
        push,
        lambda stage: stage.run.client.drain(stage.worker.id),
    ),
}
"""What changes the state, and who may not be told of it yet."""


@pytest.mark.parametrize("name", READS)
async def test_nobody_is_told_what_a_crash_could_take_back(name: str, tmp_path: Path) -> None:
    change, read = READS[name]
    async with staged(tmp_path) as stage:
        with held():
            calls = [asyncio.ensure_future(change(stage))]
            assert not await answered(*calls)
            calls.append(asyncio.ensure_future(read(stage)))
            assert not await answered(*calls)
        async with asyncio.timeout(15):
            await asyncio.gather(*calls)


async def test_commit_release_and_the_steps_wait_for_their_records(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await publish(stage)
        epoch, client = stage.trainer.session.epoch, stage.run.client
        for call in (
            lambda: client.commit("actor", Commit(epoch=epoch, step=0, version=1)),
            lambda: client.release("actor", Release(epoch=epoch, step=1, version=1)),
        ):
            with held():
                calls = [asyncio.ensure_future(call())]
                assert not await answered(*calls)
                calls.append(asyncio.ensure_future(client.steps("actor", -1, 0.0)))
                assert not await answered(*calls)
            async with asyncio.timeout(15):
                await asyncio.gather(*calls)


async def test_a_finished_evaluation_is_shown_once_its_record_is_on_disk(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(eval_tasks=1)) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        (lease,) = [lease for lease in await worker.lease(8) if lease.kind == "eval"]
        result = await worker.answer(lease)
        with held():
            calls = [asyncio.ensure_future(worker.send(result))]
            assert not await answered(*calls)
            shown = asyncio.ensure_future(run.client.evals(0, 0.0))
            assert not await answered(*calls, shown), "a round that a crash could take back was shown"
        async with asyncio.timeout(15):
            await asyncio.gather(*calls)
            assert len(await shown) == 1


async def answered(*calls: "asyncio.Future[object]") -> bool:
    done, _ = await asyncio.wait(calls, timeout=_LOOK_S)
    return bool(done)


# --- a full disk ----------------------------------------------------------------------------------

FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_durable_replies as t
from astraflow.dataflow.audit import audit
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import UnavailableError
from astraflow.service.client import MemoryTransport, ServiceClient

async def main(folder):
    async with t.staged(folder, patience_s=0.3) as stage:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        largest = max(path.stat().st_size for path in (folder / "segments").iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
        for _ in range(200):  # until the disk is really full: then every route says so
            try:
                await t.push(stage)
            except UnavailableError as err:
                assert "cannot be written" in str(err), err
                break
        else:
            raise AssertionError("the disk never got full")
        before = (await stage.run.client.status()).policies
        for name, call in t.WRITES.items():
            try:
                await call(stage)
            except UnavailableError as err:
                assert "What was acknowledged is safe" in str(err), (name, err)
            else:
                raise AssertionError(f"{name} was accepted on a full disk")
        status = await stage.run.client.status()
        assert (status.policies, status.state) == (before, "running"), "a refused command changed the state"
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        transport = MemoryTransport(stage.run.service.app)
        patient = ServiceClient("http://memory", patience_s=15.0, transport=transport)
        stage.worker.client = DataflowClient(patient)
        receipts = (await stage.worker.send(*stage.results)).receipts
        assert [receipt.status for receipt in receipts] == ["accepted"] * 2, receipts
    report = audit(folder)
    assert report.ok and report.num_results == 6, report
    print("went on")

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.timeout(120)
def test_a_full_disk_refuses_every_change_and_what_was_refused_changed_nothing(tmp_path: Path) -> None:
    here = Path(__file__).parent
    argv = [sys.executable, "-c", FULL_DISK, str(tmp_path / "journal"), str(here), str(here.parent)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
