"""Compaction of a journal folder piece by piece, for tests."""

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

from astraflow.dataflow.audit import AuditReport, audit
from astraflow.dataflow.journal.compaction import Compaction, CompactionInput
from astraflow.dataflow.journal.journal_db import DATABASE, open_database
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.segments import SegmentStore
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker

SEGMENT = 4096
"""Bytes of a segment: some are dropped in a run of a few steps."""


async def train_steps(trainer: ScriptedTrainer, worker: ScriptedWorker, steps: range) -> None:
    """Trains and releases steps."""
    async with asyncio.TaskGroup() as tasks:

        async def roll_out() -> None:
            while True:
                for lease in await worker.lease(wait_s=0.2):
                    await worker.send(await worker.answer(lease))

        rolling = tasks.create_task(roll_out())
        for step in steps:
            await trainer.train_step(step)
            await trainer.release(step)
        rolling.cancel()


def compact(
    folder: Path,
    *,
    num_pieces: int = 1_000_000,
    retained_steps: int = 0,
    replayable: frozenset[int] = frozenset(),
    num_missing: int = 0,
) -> bool:
    """Does that many pieces; whether the compaction was done before. `num_missing`: records that the snapshot
    is said to cover, but that are not in the log."""
    with JournalReader(folder) as reader:
        seq = max((row.seq for row in reader.records()), default=reader.compacted.seq) + num_missing
    database, segments = open_database(folder / DATABASE), SegmentStore(folder / "segments")
    rounds = frozenset(range(99))
    what = CompactionInput(seq, iter(()), rounds, replayable, segments.end[0], retained_steps)
    work = Compaction(folder, database, segments, what)
    for _ in range(num_pieces):
        work.step()
        if work.is_done:
            break
    work.close()
    segments.close()
    database.close()
    return work.is_done


def essence(report: AuditReport) -> AuditReport:
    """Without what compaction may change: how many payloads are still there."""
    return replace(report, num_payloads=0)


def edited(folder: Path, sql: str) -> AuditReport:
    database = sqlite3.connect(folder / DATABASE)
    assert database.execute(sql).rowcount
    database.commit()
    database.close()
    return audit(folder)
