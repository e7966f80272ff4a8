"""A run that is resumed with another schedule: its journal replays, and its audit holds."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest

from astraflow.dataflow.audit import audit
from astraflow.dataflow.config import DataflowConfig
from astraflow.dataflow.core.commands import Event, RunResumed, ScheduleChanged
from astraflow.dataflow.core.plan import BestRule, EvalSetPlan, RunPlan
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_events
from drivers.compaction_driver import compact, train_steps
from drivers.dataflow_driver import Run, ScriptedTrainer, ScriptedWorker, make_plan, running
from drivers.log_driver import rewrite_events

SOON = DataflowConfig(lease_timeout_s=1.0, heartbeat_s=0.3)
"""What a killed service held goes out again after a second."""


def with_steps(plan: RunPlan, steps: int, **evaluation: object) -> RunPlan:
    """The plan of the same run, with another schedule."""
    schedule = dataclasses.replace(
        plan.schedule,
        steps=dict.fromkeys(plan.policies, steps),
        eval=dataclasses.replace(plan.eval, **evaluation),  # type: ignore[arg-type]
    )
    return plan.with_schedule(schedule)


async def train_to_the_end(run: Run, durable_step: int) -> None:
    """From a checkpoint to the end of the run, by one service and a trainer that releases every step."""
    trainer = ScriptedTrainer(run.client)
    await trainer.attach(durable_step)
    async with asyncio.timeout(15), asyncio.TaskGroup() as tasks:
        tasks.create_task(ScriptedWorker(run.client).run())
        for step in range(durable_step, trainer.session.num_steps):
            assert await trainer.train_step(step)
            await trainer.release(step)


async def test_a_run_trains_longer_and_longer_and_its_audit_holds(tmp_path: Path) -> None:
    plan = make_plan(num_steps=3, eval_tasks=2)
    async with running(tmp_path, plan) as run:
        await train_to_the_end(run, 0)
    compact(tmp_path)
    for done, steps in ((3, 5), (5, 6)):
        async with running(tmp_path, with_steps(plan, steps)) as run:
            assert (await run.client.status()).state == "running"
            await train_to_the_end(run, done)
            status = await run.client.status()
            assert status.reason == "all steps are done"
            assert status.policies[0].step == steps
            evaluated = [record.step for record in await run.client.evals(wait_s=0)]
        report = audit(tmp_path)
        assert (report.problems, report.policies[0].steps) == ((), steps)
    assert evaluated == [0, 2, 3, 4, 5, 6], "at multiples of two, and at each last step of its time"
    with JournalReader(tmp_path) as reader:
        versions = [(record.step, record.version) for record in reader.steps()]
    assert versions == [(0, 1), (1, 2), (2, 3), (3, 5), (4, 6), (5, 8)], "each start publishes what it loaded"
    async with running(tmp_path, with_steps(plan, 6)) as run:
        assert (await run.client.status()).state == "finished"


async def interrupted(tmp_path: Path, plan: RunPlan) -> Path:
    """The journal as a kill leaves it in mid-run: with records that no snapshot covers."""
    crashed = tmp_path / "crashed"
    async with running(tmp_path / "live", plan) as run:
        trainer = ScriptedTrainer(run.client)
        worker = ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await train_steps(trainer, worker, range(2))
        await run.journal.wait_flushed()
        shutil.copytree(tmp_path / "live", crashed)
    return crashed


@pytest.mark.parametrize(
    ("steps", "evaluation"),
    [
        (2, {}),
        (9, {}),
        (4, {"every": 1}),
        (4, {"sets": {}}),
        (4, {"sets": {"heldout": EvalSetPlan(2, 2)}, "best": BestRule("heldout")}),
    ],
    ids=str,
)
async def test_a_killed_run_replays_what_it_did_before_its_schedule_changed(
    tmp_path: Path, steps: int, evaluation: dict[str, object]
) -> None:
    plan = make_plan(num_steps=4, eval_tasks=2)
    folder = await interrupted(tmp_path, plan)
    changed = with_steps(plan, steps, **evaluation)
    async with running(folder, changed, config=SOON) as run:
        await run.journal.wait_flushed()
        shutil.copytree(folder, tmp_path / "again")
        await train_to_the_end(run, 2)
    assert audit(folder).problems == ()
    async with running(tmp_path / "again", changed, config=SOON) as run:  # The change is replayed, too.
        await train_to_the_end(run, 2)
        assert (await run.client.status()).policies[0].step == steps
    assert audit(tmp_path / "again").problems == ()
    with JournalReader(folder) as reader:
        events = [e for r in reader.records() for led_to in decode_events(r) for e in led_to]
    assert [type(event) for event in events].count(ScheduleChanged) == 1


# --- the audit can tell ---------------------------------------------------------------------------


async def extended(folder: Path) -> None:
    plan = make_plan(num_steps=1)
    for done, steps in ((0, 1), (1, 2)):
        async with running(folder, with_steps(plan, steps)) as run:
            await train_to_the_end(run, done)


def forged(folder: Path, event: Event, lies: tuple[Event, ...]) -> tuple[str, ...]:
    """The audit's problems after one event was replaced, and the chain mended."""
    return rewrite_events(folder, lambda old: lies if old == event else (old,)).problems


async def test_a_schedule_that_nobody_told_the_dataflow_shows(tmp_path: Path) -> None:
    await extended(tmp_path)
    plan = with_steps(make_plan(num_steps=1), 2)
    lie = ScheduleChanged(schedule=with_steps(plan, 7).schedule)
    problems = forged(tmp_path, ScheduleChanged(schedule=plan.schedule), (lie,))
    assert any("the schedule changes to one that is in no plan" in text for text in problems)


async def test_a_resume_that_no_further_steps_allow_shows(tmp_path: Path) -> None:
    await extended(tmp_path)
    assert audit(tmp_path).problems == ()
    problems = forged(tmp_path, RunResumed(), (RunResumed(), RunResumed()))
    assert any("is resumed that neither failed" in text for text in problems)
