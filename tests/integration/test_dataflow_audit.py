"""The audit finds what was changed behind the journal's back."""

import contextlib
import dataclasses
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from astraflow.algorithms.samplers import ReplayConfig
from astraflow.algorithms.task_gates import GresoConfig, SolvedConfig
from astraflow.dataflow.accounting import Amounts
from astraflow.dataflow.audit import AuditReport, audit
from astraflow.dataflow.core.commands import (
    BatchDropped,
    BatchTaken,
    EpisodeFacts,
    Event,
    FateDecided,
    RecordResult,
    StepCommitted,
)
from astraflow.dataflow.core.plan import RunPlan, StopPlan
from astraflow.dataflow.figures import run_figures
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import Record, RecordedPlan, decode_commands
from astraflow.run.commands import show_audit
from astraflow.types import BusySpan, DropRequest
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, kept, make_plan, play_run, running
from drivers.log_driver import replace_plans, replace_records, rewrite_events


async def finished_run(folder: Path) -> None:
    async with running(folder, make_plan(num_steps=3, eval_tasks=2)) as run:
        await play_run(run)


async def test_a_clean_run_holds_and_its_figures_add_up(tmp_path: Path) -> None:
    await finished_run(tmp_path)
    report = audit(tmp_path)
    (policy,) = report.policies
    assert (report.ok, report.is_over, report.num_evals, report.num_payloads) == (True, True, 3, 24)
    assert (policy.fates.drawn, policy.fates.trained, policy.steps) == (12, 12, 3)
    assert policy.committed_tokens == policy.generated_tokens > 0
    assert policy.staleness_max <= policy.staleness_bound == 2
    assert report.rows()[0] == ("drawn", "12")
    assert report.table().row_count == len(report.rows())
    figures = run_figures(tmp_path, report)
    assert (figures.amounts.committed_tokens, figures.amounts.staleness_bound) == (policy.committed_tokens, 2)
    assert 0 < figures.rl_wall_s < 20
    assert figures.overlap_frac == 0.0


async def test_the_command_prints_the_accounting_and_what_packages_add(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await finished_run(tmp_path / "journal")
    (tmp_path / "lending.damaged-1.jsonl").touch()
    assert show_audit(tmp_path) == 0
    shown = capsys.readouterr().out
    assert re.search(r"drawn\W+12\b", shown)
    assert "warning: lending.damaged-1.jsonl is damaged and was set aside" in shown
    assert "problem:" not in shown
    rewrite_events(tmp_path / "journal", drop_one_fate)
    assert show_audit(tmp_path) == 1
    assert "problem: actor: the run is over and 1 groups have no fate, e.g. 2" in capsys.readouterr().out


async def test_a_run_that_never_began_has_no_figures(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(num_steps=3)):
        pass
    figures = run_figures(tmp_path, audit(tmp_path))
    assert (figures.rl_wall_s, figures.generate_s, figures.overlap_frac, figures.waits_s) == (
        0.0,
        0.0,
        0.0,
        {},
    )
    assert figures.amounts == Amounts(staleness_bound=2, gradient_tokens=0)


async def test_spans_that_overlap_count_once(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(num_steps=2)) as run:
        await play_run(run)
        await run.journal.wait_flushed()
        report = audit(tmp_path)
        begin_s, wall_s = report.first_lease_s, report.last_commit_s - report.first_lease_s

        def span(kind: str, start: float, end: float) -> BusySpan:
            return BusySpan(kind, begin_s + start * wall_s, begin_s + end * wall_s)

        run.journal.note_spans("rollout-0", (span("generate", 0.0, 0.5), span("generate", 0.1, 0.4)))
        run.journal.note_spans("rollout-1", (span("generate", 0.2, 0.6), span("wait:trainer", 0.5, 0.9)))
        run.journal.note_spans("rollout-1", (span("wait:trainer", 0.6, 0.8),))
        run.journal.note_spans("trainer actor", (span("train", 0.4, 0.9), span("train", 0.5, 2.0)))
        run.journal.note_spans("trainer critic", (span("train", 0.4, 1.0),))
        await run.journal.wait_flushed()
    figures = run_figures(tmp_path, audit(tmp_path))
    assert figures.generate_s == pytest.approx(0.6 * wall_s, abs=1e-5)
    assert figures.train_s == pytest.approx(0.6 * wall_s, abs=1e-5)
    assert figures.overlap_frac * wall_s == pytest.approx(0.2 * wall_s, abs=1e-5)
    assert figures.waits_s["rollout-1", "trainer"] == pytest.approx(0.4 * wall_s, abs=1e-5)
    active = ((begin_s - 9, begin_s + 0.3 * wall_s), (begin_s + 0.7 * wall_s, begin_s + 0.8 * wall_s))
    figures = run_figures(tmp_path, audit(tmp_path), active)
    assert figures.rl_wall_s == pytest.approx(0.4 * wall_s, abs=1e-5), "an interruption does not count"
    assert figures.waits_s["rollout-1", "trainer"] == pytest.approx(0.1 * wall_s, abs=1e-5)
    assert 0 < figures.share(figures.waits_s["rollout-1", "trainer"]) < 1


@pytest.mark.parametrize("active", [(), ((1.0, 1.0),), ((5.0, 9.0),)])
async def test_shares_of_a_run_whose_launcher_wrote_no_times_are_shares(
    tmp_path: Path, active: tuple[tuple[float, float], ...]
) -> None:
    async with running(tmp_path, make_plan(num_steps=2)) as run:
        await play_run(run)
        await run.journal.wait_flushed()
        begin_s = audit(tmp_path).first_lease_s
        run.journal.note_spans("rollout-1", (BusySpan("wait:trainer", begin_s - 60, begin_s + 60),))
        await run.journal.wait_flushed()
    figures = run_figures(tmp_path, audit(tmp_path), active)
    assert figures.rl_wall_s > 0
    assert figures.share(figures.waits_s["rollout-1", "trainer"]) == pytest.approx(1.0)


async def test_a_live_run_can_be_audited(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(num_steps=2)) as run:
        assert audit(tmp_path).ok
        await play_run(run)
        await run.journal.wait_flushed()
        report = audit(tmp_path)
        assert (report.ok, report.policies[0].steps) == (True, 2)


def without_the_ninth(rows: list[Record]) -> list[Record]:
    return rows[:8] + rows[9:]


def later_ninth(rows: list[Record]) -> list[Record]:
    return [*rows[:8], rows[8]._replace(at_s=rows[8].at_s + 1), *rows[9:]]


def newest_without_events(rows: list[Record]) -> list[Record]:
    return [*rows[:-1], rows[-1]._replace(events=b"\x90")]


def ninth_without_command(rows: list[Record]) -> list[Record]:
    return [*rows[:8], rows[8]._replace(commands=b"\xc0"), *rows[9:]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without_the_ninth, "record 9 is missing"),
        (later_ninth, "record 9 was changed"),
        (newest_without_events, "was changed"),
        (ninth_without_command, "its command cannot be read"),
    ],
)
async def test_an_edited_record_is_found(
    tmp_path: Path, change: Callable[[list[Record]], list[Record]], problem: str
) -> None:
    await finished_run(tmp_path)
    with JournalReader(tmp_path) as reader:
        rows = list(reader.records())
    replace_records(tmp_path, change(rows))
    report = audit(tmp_path)
    assert not report.ok
    assert any(problem in text for text in report.problems), report.problems


async def test_a_row_that_no_compaction_wrote_is_found(tmp_path: Path) -> None:
    await finished_run(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database, database:
        database.execute("INSERT INTO fates VALUES ('actor', 99, 'trained', 0, 0, 0, 0, 0, x'00')")
    report = audit(tmp_path)
    assert any("the table holds 1 fates of closed groups, 0 were" in text for text in report.problems)


def with_plans(folder: Path, change: Callable[[RecordedPlan], RecordedPlan]) -> AuditReport:
    """The audit of a run whose plans say something else."""
    with JournalReader(folder) as reader:
        plans = [msgspec.msgpack.encode(change(plan)) for _, plan in reader.plans()]
        entries = reader.logged_plans()
    changed = [msgspec.structs.replace(entry, plan=plan) for entry, plan in zip(entries, plans, strict=True)]
    replace_plans(folder, changed)
    return audit(folder)


async def test_a_stop_that_was_not_heeded_is_found(tmp_path: Path) -> None:
    stop = StopPlan(epochs=1, sequences=20)
    async with running(tmp_path, make_plan(num_steps=9, num_tasks=14, stop=stop)) as run:
        await play_run(run)
    report = audit(tmp_path)
    (policy,) = report.policies
    assert report.reason == "all steps up to the recipe's stop are done"
    assert (report.ok, policy.steps, policy.fates.trained) == (True, 3, 12)  # of 24 sequences, at least 20
    few = with_plans(tmp_path, lambda plan: msgspec.structs.replace(plan, most_drawn=11))
    assert any("is drawn after the 11 draws of all epochs" in problem for problem in few.problems)

    def earlier(plan: RecordedPlan) -> RecordedPlan:
        schedule = dataclasses.replace(plan.schedule, stop=StopPlan(sequences=16))
        return msgspec.structs.replace(plan, most_drawn=0, schedule=schedule)

    problems = with_plans(tmp_path, earlier).problems
    assert any("batch of step 3 was taken although 16 sequences" in problem for problem in problems)


def drop_one_fate(event: Event) -> tuple[Event, ...]:
    return () if isinstance(event, FateDecided) and event.group_id == 2 else (event,)


def double_a_fate(event: Event) -> tuple[Event, ...]:
    return (event, event) if isinstance(event, FateDecided) and event.group_id == 2 else (event,)


def lie_about_staleness(event: Event) -> tuple[Event, ...]:
    if not isinstance(event, BatchTaken):
        return (event,)
    return (msgspec.structs.replace(event, staleness=tuple(s + 1 for s in event.staleness)),)


def age_a_batch(event: Event) -> tuple[Event, ...]:
    """All its figures agree; it is only older than any batch may be."""
    if not isinstance(event, BatchTaken) or event.step != 1:
        return (event,)
    older = event.trainer_version + 10
    staleness = tuple(s + 10 for s in event.staleness)
    return (msgspec.structs.replace(event, trainer_version=older, staleness=staleness),)


def shrink_a_batch(event: Event) -> tuple[Event, ...]:
    if not isinstance(event, BatchTaken):
        return (event,)
    return (msgspec.structs.replace(event, group_ids=event.group_ids[:-1], staleness=event.staleness[:-1]),)


def repeat_a_batch(event: Event) -> tuple[Event, ...]:
    if not isinstance(event, BatchTaken) or event.step == 0:
        return (event,)
    return (msgspec.structs.replace(event, group_ids=(0, 1, 2, 3)),)


def skip_a_commit(event: Event) -> tuple[Event, ...]:
    return () if isinstance(event, StepCommitted) and event.record.step == 1 else (event,)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop_one_fate, "1 groups have no fate, e.g. 2"),
        (double_a_fate, "group 2 is trained and then trained"),
        (lie_about_staleness, "its oldest version is"),
        (age_a_batch, "over 2"),
        (shrink_a_batch, "holds 3 groups, not 4"),
        (repeat_a_batch, "group 0 is in the batches of steps 1 and 2"),
        (skip_a_commit, "step 3 is committed where 2 is next"),
    ],
)
async def test_a_forged_history_is_found(
    tmp_path: Path, change: Callable[[Event], tuple[Event, ...]], problem: str
) -> None:
    await finished_run(tmp_path)
    report = rewrite_events(tmp_path, change)
    assert any(problem in text for text in report.problems), report.problems


def hide_the_drop(event: Event) -> tuple[Event, ...]:
    return () if isinstance(event, BatchDropped) else (event,)


def drop_a_trained_step(event: Event) -> tuple[Event, ...]:
    if isinstance(event, StepCommitted) and event.record.step == 1:
        return (event, BatchDropped(policy="actor", steps=(1,), reason=""))
    return (event,)


def call_the_dropped_stale(event: Event) -> tuple[Event, ...]:
    is_dropped = isinstance(event, FateDecided) and event.fate == "evicted"
    return (msgspec.structs.replace(event, fate="stale"),) if is_dropped else (event,)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (hide_the_drop, "step 1 gets a second batch"),
        (drop_a_trained_step, "the batches of steps [2] are dropped; those of"),
        (call_the_dropped_stale, "group 0 of the dropped batch of step 1 is stale"),
    ],
)
async def test_a_forged_drop_is_found(
    tmp_path: Path, change: Callable[[Event], tuple[Event, ...]], problem: str
) -> None:
    async with running(tmp_path, make_plan(num_steps=3)) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await worker.send(*[await worker.answer(lease) for lease in await worker.lease(8)])
        await run.client.batch("actor", 0, epoch=trainer.session.epoch)
        await run.client.drop_batch("actor", DropRequest(step=0, epoch=trainer.session.epoch))
        await play_run(run)
    assert audit(tmp_path).problems == ()
    report = rewrite_events(tmp_path, change)
    assert any(problem in text for text in report.problems), report.problems


async def test_a_damaged_payload_is_found(tmp_path: Path) -> None:
    await finished_run(tmp_path)
    with JournalReader(tmp_path) as reader:
        commands = [command for row in reader.records() for command in decode_commands(row)]
    outcomes = [command.outcome for command in commands if isinstance(command, RecordResult)]
    payload = next(
        o.trajectories[0].payload for o in outcomes if isinstance(o, EpisodeFacts) and o.trajectories
    )
    segment = tmp_path / "segments" / "00000000.seg"
    data = bytearray(segment.read_bytes())
    data[payload.offset] ^= 1
    segment.write_bytes(bytes(data))
    report = audit(tmp_path)
    assert any("damaged" in text for text in report.problems), report.problems


# --- replay and curators --------------------------------------------------------------------------


def replaying(**replay: float) -> RunPlan:
    return make_plan(
        num_steps=5,
        num_tasks=6,
        curators=(GresoConfig(policy="actor", delta=0.2), SolvedConfig(revisit=0.2)),
        replay=ReplayConfig(**replay or {"ratio": 0.5}),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("meaning", ["ratio", "share"])
async def test_a_run_with_replay_and_curators_holds_across_a_restart(tmp_path: Path, meaning: str) -> None:
    plan = replaying(**{meaning: 0.5})
    async with running(tmp_path, plan, snapshot_every=3) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await worker.send(*[await worker.answer(lease) for lease in await worker.lease(20)])
        before = await run.client.status()
    async with running(tmp_path, plan, snapshot_every=3) as run:
        after = await run.client.status()
        assert (kept(after.policies), after.curation) == (kept(before.policies), before.curation)
        await play_run(run)
    report = audit(tmp_path)
    assert report.problems == ()
    num_replayed = report.policies[0].replayed
    assert num_replayed > 0
    assert report.policies[0].fates.trained == (20 if meaning == "ratio" else 20 - num_replayed)


def replay_of(*group_ids: int) -> Callable[[Event], tuple[Event, ...]]:
    def change(event: Event) -> tuple[Event, ...]:
        if not isinstance(event, BatchTaken) or event.step != 1:
            return (event,)
        return (
            msgspec.structs.replace(event, replayed_ids=group_ids, replayed_staleness=(1,) * len(group_ids)),
        )

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (replay_of(0, 0), "1 groups are replayed twice in it"),
        (replay_of(0, 1, 2), "replays 3 groups, at most 2"),
        (replay_of(18), "group 18 is replayed, but no earlier batch holds it"),
        (replay_of(0), "its record says 2 replayed groups, its batch holds 1"),
    ],
)
async def test_a_forged_replay_is_found(
    tmp_path: Path, change: Callable[[Event], tuple[Event, ...]], problem: str
) -> None:
    async with running(tmp_path, replaying()) as run:
        await play_run(run)
    report = rewrite_events(tmp_path, change)
    assert any(problem in text for text in report.problems), report.problems


async def test_a_batch_whose_replayed_groups_are_not_in_the_place_of_fresh_ones_is_found(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, replaying(share=0.5)) as run:
        await play_run(run)
    report = rewrite_events(tmp_path, replay_of(0))
    assert any("holds 3 groups, not 4" in text for text in report.problems), report.problems


def double_use(event: Event) -> tuple[Event, ...]:
    """Group 0 is replayed in every step after the first."""
    if not isinstance(event, BatchTaken) or event.step == 0:
        return (event,)
    return (msgspec.structs.replace(event, replayed_ids=(0,), replayed_staleness=(event.trainer_version,)),)


async def test_a_group_that_is_used_too_often_is_found(tmp_path: Path) -> None:
    async with running(tmp_path, replaying()) as run:
        await play_run(run)
    report = rewrite_events(tmp_path, double_use)
    assert any("group 0 is in 5 batches, at most 2" in text for text in report.problems)
