"""Compaction keeps what replay still needs, and the books of replayed groups and of pushed tasks."""

import asyncio
import contextlib
import dataclasses
import shutil
import sqlite3
from pathlib import Path

import pytest

from astraflow.algorithms.samplers import ReplayConfig
from astraflow.dataflow.audit import AuditReport, audit
from astraflow.dataflow.config import DataflowConfig, TableConfig
from astraflow.dataflow.core.commands import BatchTaken
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import PolicyPlan, RunPlan
from astraflow.dataflow.journal.compaction import load_ledger
from astraflow.dataflow.journal.journal_db import DATABASE
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_events
from astraflow.dataflow.journal.segments import SegmentReader
from astraflow.types import PushTasks, Task
from drivers.compaction_driver import SEGMENT, compact, edited, essence, train_steps
from drivers.dataflow_driver import Run, ScriptedTrainer, ScriptedWorker, make_plan, running

STEPS = 8


def replaying() -> RunPlan:
    """Groups come again while they wait in a buffer of 6, in at most 3 steps."""
    replay = ReplayConfig(ratio=1.0, max_uses=3, size=6, reserve=3)
    table = TableConfig(group_size=2, groups_per_batch=4, max_staleness=4, replay=replay)
    policies = {"actor": PolicyPlan(table=table, num_steps=STEPS)}
    return dataclasses.replace(make_plan(eval_tasks=3), policies=policies)


async def push(run: Run, *names: str) -> None:
    tasks = tuple(Task(id=name, source="mine", prompt="Say hello.") for name in names)
    await run.client.push_tasks(PushTasks(tasks=tasks))


async def half_run(folder: Path, *, snapshot_every: int = 20_000) -> None:
    """Four of the steps, the last one not released; one pushed task waits; a snapshot at the end."""
    config = DataflowConfig(retain=0)
    async with running(
        folder, replaying(), config=config, snapshot_every=snapshot_every, segment_bytes=SEGMENT
    ) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await push(run, "mine/0", "mine/1")
        await train_steps(trainer, worker, range(4))
        await push(run, "mine/1", "mine/2")


def core_of(folder: Path) -> Core:
    """As a restart would restore it from the snapshot at the end."""
    database = sqlite3.connect(folder / DATABASE)
    (state,) = database.execute("SELECT state FROM snapshots ORDER BY seq DESC LIMIT 1").fetchone()
    database.close()
    return Core.from_snapshot(replaying(), bytes(state))


def for_replay(folder: Path) -> frozenset[int]:
    return core_of(folder).groups_for_replay()


def check_payloads(folder: Path) -> None:
    """All that the core may still serve can be read."""
    with contextlib.closing(SegmentReader(folder / "segments")) as reader:
        refs = list(core_of(folder).retained_payloads())
        assert len(refs) >= 12
        for ref in refs:
            reader.read(ref)


def batches(folder: Path) -> list[BatchTaken]:
    """Those in records that are not compacted."""
    with JournalReader(folder) as reader:
        events = [event for row in reader.records() for led_to in decode_events(row) for event in led_to]
    return [event for event in events if isinstance(event, BatchTaken)]


async def finish(folder: Path, *, snapshot_every: int = 20_000) -> AuditReport:
    """A new process repeats the fourth step and goes on to the end."""
    config = DataflowConfig(retain=0, lease_timeout_s=3.0)  # leases of the former worker go out again
    async with running(
        folder, replaying(), config=config, snapshot_every=snapshot_every, segment_bytes=SEGMENT
    ) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach(3)
        async with asyncio.TaskGroup() as tasks:
            rolling = tasks.create_task(ScriptedWorker(run.client, "w1").run())
            for step in range(3, STEPS):
                assert await trainer.train_step(step)
                await trainer.release(step)
            await rolling
    return audit(folder)


def open_groups(folder: Path) -> set[int]:
    with JournalReader(folder) as reader:
        return set(load_ledger(reader).groups)


@pytest.mark.timeout(60)
async def test_what_was_taken_before_a_compaction_is_replayed_after_it(tmp_path: Path) -> None:
    await half_run(tmp_path)
    before, kept = audit(tmp_path), for_replay(tmp_path)
    first = batches(tmp_path)
    assert (before.problems, before.num_pushed, before.num_pushed_drawn) == ((), 3, 2)
    assert before.policies[0].replayed > 0
    assert compact(tmp_path, replayable=kept)
    check_payloads(tmp_path)
    after = audit(tmp_path)
    assert essence(after) == essence(before)
    with JournalReader(tmp_path) as reader:
        assert int(reader.meta("first_segment")) > 0
    taken = {group for batch in first for group in batch.group_ids}
    assert kept <= open_groups(tmp_path)
    assert len(taken - open_groups(tmp_path)) >= 8
    report = await finish(tmp_path)
    assert (report.problems, report.is_over) == ((), True)
    assert kept & set(batches(tmp_path)[0].replayed_ids)
    assert (report.policies[0].steps, report.policies[0].redone_steps) == (STEPS, 1)
    assert (report.num_pushed, report.num_pushed_drawn) == (3, 3)


@pytest.mark.timeout(60)
async def test_a_run_with_replay_compacts_itself_across_a_restart(tmp_path: Path) -> None:
    await half_run(tmp_path, snapshot_every=5)
    assert audit(tmp_path).ok
    check_payloads(tmp_path)
    report = await finish(tmp_path, snapshot_every=5)
    assert (report.problems, report.is_over) == ((), True)
    (policy,) = report.policies
    assert (policy.steps, policy.fates.trained, policy.redone_steps) == (STEPS, 4 * STEPS, 1)
    assert policy.replayed > 4
    with JournalReader(tmp_path) as reader:
        assert reader.compacted.seq > 0
        assert int(reader.meta("first_segment")) > 0
        steps = reader.steps()
    assert sum(step.num_replayed_groups for step in steps) == policy.replayed
    assert sum(step.num_trained_tokens for step in steps) == policy.committed_tokens


@pytest.mark.timeout(60)
async def test_a_kill_between_any_two_pieces_changes_nothing_of_replay(tmp_path: Path) -> None:
    await half_run(tmp_path / "whole")
    before, kept = essence(audit(tmp_path / "whole")), for_replay(tmp_path / "whole")
    for num_pieces in range(1, 1000):
        folder = tmp_path / str(num_pieces)
        shutil.copytree(tmp_path / "whole", folder)
        is_done = compact(folder, num_pieces=num_pieces, replayable=kept)
        assert essence(audit(folder)) == before
        compact(folder, replayable=kept)
        assert essence(audit(folder)) == before
        shutil.rmtree(folder)
        if is_done:
            return


async def test_a_changed_record_of_a_closed_step_with_replay_is_found(tmp_path: Path) -> None:
    await half_run(tmp_path)
    steps = [batch.step for batch in batches(tmp_path) if batch.replayed_ids]
    compact(tmp_path, replayable=for_replay(tmp_path))
    with JournalReader(tmp_path) as reader:
        assert set(load_ledger(reader).policies["actor"].replayed) == set(steps)
    report = edited(tmp_path, "UPDATE fates SET staleness = staleness + 1 WHERE group_id = 0")
    assert any("mean staleness" in text for text in report.problems), report.problems
