"""Damage to a journal folder: opening it and the audit give the same verdict, and nothing wrong is read.

A flipped bit is harmless (all that is read is as before), or both refuse.
"""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.audit import audit
from astraflow.dataflow.config import DataflowConfig
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import RunPlan
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.journal.journal_db import TranscriptRow
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.segments import SegmentReader
from astraflow.errors import JournalError
from astraflow.types import BusySpan, Heartbeat, Load
from drivers.compaction_driver import SEGMENT, compact, train_steps
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, running

PLAN = make_plan(num_steps=4, eval_tasks=3)


@dataclass
class Sound:
    """An undamaged folder, and all that it says."""

    folder: Path
    content: dict[str, Any]


def content_of(folder: Path) -> dict[str, Any]:
    """All that anyone may read of a folder, and the state that a restart gives."""
    with JournalReader(folder) as reader:
        content: dict[str, Any] = {
            "run_id": reader.meta("run_id"),
            "records": list(reader.records()),
            "fates": list(reader.fates()),
            "plans": reader.plans(),
            "steps": reader.steps(),
            "evals": reader.evals(),
            "telemetry": reader.telemetry(),
            "samples": [row for kind in ("eval", "train") for row in reader.transcripts("kind = ?", kind)],
            "audit_state": reader.audit_state_parts(),
            "payloads": list(reader.payloads()),
        }
    with contextlib.closing(SegmentReader(folder / "segments")) as segments:
        content["messages"] = [messages_of(row, segments) for row in content["samples"]]
        content["tokens"] = [bytes(segments.read(ref)) for *_, refs in content["payloads"] for ref in refs]
    return content


def messages_of(row: TranscriptRow, segments: SegmentReader) -> bytes:
    return row.data or segments.read(row.ref)


async def state_of(folder: Path) -> bytes:
    """What a restart of the folder gives; it must be closed again without a change."""
    journal = Journal(folder, segment_bytes=SEGMENT)
    try:
        core = journal.recover(
            new=lambda: Core(plan_of()), restore=lambda state: Core.from_snapshot(plan_of(), state)
        )
    finally:
        await journal.close()
    return core.snapshot()


def plan_of() -> RunPlan:
    return PLAN


async def make_run(folder: Path, *, is_compacted: bool) -> Sound:
    config = DataflowConfig(retain=0)
    async with running(folder, PLAN, segment_bytes=SEGMENT, config=config) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        span = BusySpan("generate", 1.0, 2.0)
        await run.client.heartbeat(worker.id, Heartbeat(lease_ids=(), load=Load(spans=(span,))))
        await train_steps(trainer, worker, range(2))
        for lease in await worker.lease(num_free=3):
            await worker.send(await worker.answer(lease))
    if is_compacted:
        compact(folder)
        async with running(folder, PLAN, segment_bytes=SEGMENT, config=config) as run:
            worker = ScriptedWorker(run.client, "later")
            await worker.register()
            await worker.send(*[await worker.answer(lease) for lease in await worker.lease(num_free=3)])
    assert audit(folder).problems == ()
    return Sound(folder, content_of(folder) | {"state": await state_of(folder)})


@pytest.fixture(params=[False, True], ids=["whole", "compacted"])
async def sound(tmp_path: Path, request: pytest.FixtureRequest) -> Sound:
    return await make_run(tmp_path / "sound", is_compacted=request.param)


def audited(folder: Path) -> str:
    """Why the audit refuses; empty if it holds."""
    try:
        return "; ".join(audit(folder).problems)
    except JournalError as err:
        return str(err)


async def opened(folder: Path) -> tuple[str, dict[str, Any]]:
    """Why opening refuses, or what is read then."""
    try:
        state = await state_of(folder)
    except JournalError as err:
        return str(err), {}
    return "", content_of(folder) | {"state": state}


async def check_verdicts(sound: Sound, file: Path, data: bytes, where: str) -> bool:
    """Whether the damage was refused; by both, or by neither, and then all that is read is as before."""
    folder = sound.folder.with_name("damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound.folder, folder)
    (folder / file.relative_to(sound.folder)).write_bytes(data)
    holds_not = audited(folder)
    refuses, content = await opened(folder)
    assert bool(holds_not) == bool(refuses), f"{where}: audit {holds_not!r}, opening {refuses!r}"
    if not refuses:
        assert content == sound.content, where
    return bool(refuses)


@pytest.mark.timeout(300)
async def test_a_damaged_segment_is_refused_by_both(sound: Sound) -> None:
    segments = sorted((sound.folder / "segments").glob("*.seg"))
    refused = 0
    assert len(segments) >= 2
    for segment in segments:
        data = segment.read_bytes()
        for at in range(0, len(data), max(1, len(data) // 17)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            for damaged, what in ((bytes(flipped), "flipped"), (data[:at], "cut")):
                refused += await check_verdicts(sound, segment, damaged, f"{segment.name} {what} at {at}")
        assert await check_verdicts(sound, segment, data[:-1], f"{segment.name} without its last byte")
    assert refused >= 30 * len(segments)


@pytest.mark.timeout(300)
async def test_a_segment_that_is_missing_is_refused_by_both(sound: Sound) -> None:
    for segment in sorted((sound.folder / "segments").glob("*.seg")):
        folder = sound.folder.with_name("damaged")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound.folder, folder)
        (folder / "segments" / segment.name).unlink()
        assert audited(folder)
        assert (await opened(folder))[0]


@pytest.mark.timeout(600)
async def test_a_flipped_bit_of_the_database_is_harmless_or_refused_by_both(sound: Sound) -> None:
    file = sound.folder / "journal.sqlite"
    data = file.read_bytes()
    places = [*range(100), *range(100, len(data), 331)]
    refused = 0
    for at in places:
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        refused += await check_verdicts(sound, file, bytes(flipped), f"byte {at} of {len(data)}")
    assert refused > len(places) // 6


@pytest.mark.timeout(300)
async def test_a_flipped_bit_of_the_databases_log_costs_nothing_that_the_segments_hold(
    tmp_path: Path,
) -> None:
    """A run that was killed: its newest transactions are in SQLite's log alone."""
    async with running(tmp_path / "live", PLAN, segment_bytes=SEGMENT) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await train_steps(trainer, worker, range(1))
        await run.journal.wait_flushed()
        shutil.copytree(tmp_path / "live", tmp_path / "killed")
        seq = run.journal.seq
    log = tmp_path / "killed" / "journal.sqlite-wal"
    data = log.read_bytes()
    for at in range(0, len(data), len(data) // 60):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "killed", folder)
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        (folder / log.name).write_bytes(bytes(flipped))
        assert audited(folder) == "", at
        journal = Journal(folder)
        assert journal.seq == seq
        await journal.close()
        assert audited(folder) == "", at


def test_a_row_of_every_table_is_in_the_folders_that_are_damaged(sound: Sound) -> None:
    """Else the flips above would prove nothing of it."""
    needed = {"records", "plans", "steps", "evals", "telemetry", "samples"}
    if sound.content["audit_state"]:
        needed |= {"fates", "payloads"}
    assert all(sound.content[name] for name in needed)
