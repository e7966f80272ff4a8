"""Compaction takes records and payloads away; the audit finds the same as before, whenever it is killed."""

import asyncio
import shutil
from pathlib import Path

import pytest

from astraflow.addons.view.sample_episodes import load_transcripts
from astraflow.dataflow.audit import audit
from astraflow.dataflow.config import DataflowConfig
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.errors import JournalError
from drivers.compaction_driver import SEGMENT, compact, edited, essence, train_steps
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, play_run, running
from drivers.log_driver import replace_records


async def half_run(folder: Path) -> None:
    """Two of four steps; groups in every state; a snapshot at the end."""
    async with running(folder, make_plan(num_steps=4, eval_tasks=3), segment_bytes=SEGMENT) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await train_steps(trainer, worker, range(2))
        await worker.lease(num_free=3)


def segments_of(folder: Path) -> int:
    return len(list((folder / "segments").glob("*.seg")))


async def test_the_audit_of_a_compacted_journal_says_the_same(tmp_path: Path) -> None:
    await half_run(tmp_path)
    before, num_segments = audit(tmp_path), segments_of(tmp_path)
    samples = [messages for _, messages in load_transcripts(tmp_path, "train")]
    assert before.ok
    assert compact(tmp_path)
    after = audit(tmp_path)
    assert essence(after) == essence(before)
    assert before.num_payloads > after.num_payloads > 0
    assert segments_of(tmp_path) < num_segments
    assert [messages for _, messages in load_transcripts(tmp_path, "train")] == samples
    with JournalReader(tmp_path) as reader:
        assert not list(reader.records())
        assert reader.compacted.seq == before.num_records


@pytest.mark.timeout(60)
async def test_a_kill_between_any_two_pieces_changes_nothing(tmp_path: Path) -> None:
    await half_run(tmp_path / "whole")
    before = essence(audit(tmp_path / "whole"))
    for num_pieces in range(1, 1000):
        folder = tmp_path / str(num_pieces)
        shutil.copytree(tmp_path / "whole", folder)
        is_done = compact(folder, num_pieces=num_pieces)
        assert essence(audit(folder)) == before
        compact(folder)
        assert essence(audit(folder)) == before
        if num_pieces % 4 == 0:
            async with running(folder, make_plan(num_steps=4, eval_tasks=3)) as run:
                assert run.service.state == "running"
            assert audit(folder).ok
        shutil.rmtree(folder)
        if is_done:
            return


@pytest.mark.timeout(60)
async def test_a_run_compacts_itself_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    plan, config = make_plan(num_steps=6, eval_tasks=3), DataflowConfig(retain=1)
    async with running(tmp_path, plan, config=config, snapshot_every=10, segment_bytes=SEGMENT) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await train_steps(trainer, worker, range(3))
    with JournalReader(tmp_path) as reader:
        assert 10 <= reader.compacted.seq < max(row.seq for row in reader.records())
    compact(tmp_path, retained_steps=1)
    with JournalReader(tmp_path) as reader:
        assert int(reader.meta("first_segment")) > 0
    assert audit(tmp_path).ok
    config = DataflowConfig(retain=1, lease_timeout_s=3.0)  # leases of the former worker go out again
    async with running(tmp_path, plan, config=config, snapshot_every=10, segment_bytes=SEGMENT) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach(3)
        async with asyncio.TaskGroup() as tasks:
            rolling = tasks.create_task(ScriptedWorker(run.client, "w1").run())
            for step in range(3, 6):
                assert await trainer.train_step(step)
            await rolling
    report = audit(tmp_path)
    assert (report.problems, report.is_over) == ((), True)
    assert (report.policies[0].steps, report.policies[0].fates.trained) == (6, 24)


@pytest.mark.parametrize("policies", [("actor",), ("actor", "critic")])
async def test_all_payloads_are_kept_if_asked_for(tmp_path: Path, policies: tuple[str, ...]) -> None:
    plan, config = make_plan(policies=policies, num_steps=3), DataflowConfig(retain="all")
    async with running(tmp_path, plan, config=config, snapshot_every=10, segment_bytes=SEGMENT) as run:
        await play_run(run, policies=policies)
    compact(tmp_path, retained_steps=config.retained_steps)
    with JournalReader(tmp_path) as reader:
        assert len(list(reader.payloads())) == 12 * len(policies)
    report = audit(tmp_path)
    assert (report.problems, report.num_payloads) == ((), 24 * len(policies))
    assert (tmp_path / "segments" / "00000000.seg").exists()


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("DELETE FROM fates WHERE group_id = 1", "the table holds 7 fates of closed groups, 8 were"),
        ("UPDATE fates SET fate = 'stale' WHERE group_id = 1", "rows were deleted, added or changed"),
        ("UPDATE fates SET staleness = staleness + 1 WHERE group_id = 1", "mean staleness"),
        ("UPDATE fates SET tokens = tokens + 1 WHERE group_id = 1", "rows were deleted, added or changed"),
        ("UPDATE fates SET trained_tokens = 0 WHERE group_id = 1", "trained tokens, its batch holds"),
        ("UPDATE fates SET group_id = 999 WHERE group_id = 1", "rows were deleted, added or changed"),
        (
            "INSERT INTO fates SELECT policy, 999, fate, step, staleness, tokens, samples, trained_tokens, "
            "sum FROM fates WHERE group_id = 1",
            "the table holds 9 fates of closed groups, 8 were",
        ),
        ("DELETE FROM steps WHERE seq = (SELECT min(seq) FROM steps)", "2 steps were closed, 1 are in"),
    ],
)
async def test_a_changed_fate_of_a_closed_group_is_found(tmp_path: Path, sql: str, problem: str) -> None:
    await half_run(tmp_path)
    compact(tmp_path)
    report = edited(tmp_path, sql)
    assert any(problem in text for text in report.problems), report.problems


async def test_a_journal_that_lacks_its_newest_record_is_not_compacted(tmp_path: Path) -> None:
    await half_run(tmp_path)
    with pytest.raises(JournalError, match=r"not compacted.* record \d+ is missing"):
        compact(tmp_path, num_missing=1, num_pieces=1000)
    assert audit(tmp_path).problems == ()


async def test_a_journal_that_does_not_hold_is_not_compacted(tmp_path: Path) -> None:
    await half_run(tmp_path)
    with JournalReader(tmp_path) as reader:
        rows = list(reader.records())
    rows[8] = rows[8]._replace(at_s=rows[8].at_s + 1)
    replace_records(tmp_path, rows)
    problems = audit(tmp_path).problems
    with pytest.raises(JournalError, match=r"not compacted.* record 9 was changed"):
        compact(tmp_path)
    assert audit(tmp_path).problems == problems
