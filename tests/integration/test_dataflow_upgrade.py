"""Records of a version that knew no replay and no event of pushed tasks are replayed and audited."""

import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from astraflow.dataflow.audit import audit
from astraflow.dataflow.journal.journal_db import DATABASE
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import Record, chain_of
from astraflow.types import PushTasks, Task
from drivers.compaction_driver import compact, essence, train_steps
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, running


def as_of_before(events: list[list[list[object]]]) -> list[list[list[object]]]:
    """Events without the fields and kinds that came later."""
    return [
        [event[:6] if event[0] == "BatchTaken" else event for event in led_to if event[0] != "TasksPushed"]
        for led_to in events
    ]


def age(folder: Path) -> int:
    """Makes the journal of a folder what the older version would have written; the batches in it."""
    with JournalReader(folder) as reader:
        records = list(reader.records())
    chain, rows, num_batches = b"", list[tuple[bytes, bytes, int]](), 0
    for record in records:
        events = msgspec.msgpack.decode(record.events)
        num_batches += sum(event[0] == "BatchTaken" for led_to in events for event in led_to)
        old = msgspec.msgpack.encode(as_of_before(events))
        chain = chain_of(chain, Record(record.seq, record.at_s, record.commands, old, b""))
        rows.append((old, chain, record.seq))
    database = sqlite3.connect(folder / DATABASE)
    database.executemany("UPDATE records SET events = ?, chain = ? WHERE seq = ?", rows)
    database.commit()
    database.close()
    return num_batches


@pytest.mark.parametrize("is_pushed", [False, True])
async def test_the_journal_of_an_older_version_goes_on(tmp_path: Path, is_pushed: bool) -> None:
    plan, crashed = make_plan(num_steps=4, eval_tasks=3), tmp_path / "crashed"
    async with running(tmp_path / "live", plan) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        if is_pushed:
            await run.client.push_tasks(PushTasks(tasks=(Task(id="mine/0", source="mine", prompt="?"),)))
        await train_steps(trainer, worker, range(2))
        before = await run.client.status()
        await run.journal.flushed()
        shutil.copytree(tmp_path / "live", crashed)
    assert age(crashed) >= 2
    report = audit(crashed)
    assert (report.problems, report.num_pushed, report.num_pushed_drawn) == ((), is_pushed, is_pushed)
    if not is_pushed:  # The event of a push is new: its record is replayed by the version that wrote it.
        async with running(crashed, plan) as run:
            after = await run.client.status()
        assert [p.fates for p in after.policies] == [p.fates for p in before.policies]
        report = audit(crashed)
    compact(crashed)
    assert essence(audit(crashed)) == essence(report)
