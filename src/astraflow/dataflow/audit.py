"""Recomputes a run's accounting from its journal alone, and reports every violated rule.

First, the folder gets the same checks as when the dataflow opens it (`journal.check`). Then the records are
read in order, their chain is checked, and their events are added up (`ledger`), without any code of the
core's rules. Finally, every rule is checked: each drawn group has exactly one fate for each policy; a trained
group is fresh in exactly one batch; batches are complete, in order and within the staleness bound; payloads
are intact; no result counts twice. The audit works on live runs (one consistent moment, read-only) and on
finished ones.

If records were compacted, the audit starts from the stored audit state. It checks the fates closed by then in
their table: all must be there, once and unchanged, and must add up to the records of their steps.
"""

import contextlib
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from astraflow.dataflow.accounting import PolicyAudit
from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.core.plan import StopPlan
from astraflow.dataflow.journal.check import check_database, check_segments
from astraflow.dataflow.journal.compaction import load_ledger
from astraflow.dataflow.journal.journal_db import FateRow
from astraflow.dataflow.journal.ledger import ClosedFates, FailureKind, Ledger, ReplayedGroups
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.rules import batch_problems, commit_problems, record_problems
from astraflow.dataflow.journal.segments import SegmentReader
from astraflow.errors import JournalError
from astraflow.types import FateCounts, StepRecord

__all__ = ["AuditReport", "audit", "batch_payloads"]

_BAD_ROW_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, struct.error)
"""Errors that damaged rows may cause."""
_MAX_PROBLEMS = 200
"""Problems that a report lists. Further ones are only counted."""
_FATE_ROWS = FateCounts.__struct_fields__
_LAST_RECORD = 1 << 62
"""Larger than the number of any record, so that the newest plan is in force for it."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit. `ok` is True if every rule holds."""

    run_id: str
    policies: tuple[PolicyAudit, ...]
    is_over: bool
    reason: str
    """Why the run ended. Empty if it is not over."""
    num_records: int
    num_results: int
    """Accepted results, evaluation included."""
    num_dropped: int
    """Results that were late or repeated."""
    num_failed_attempts: int
    failures: tuple[FailureKind, ...]
    """The failed attempts by kind, most frequent first."""
    num_evals: int
    num_pushed: int
    """Accepted tasks from outside or from workflows."""
    num_pushed_drawn: int
    num_push_refused: int
    """Tasks from outside beyond the run's limits."""
    num_payloads: int
    """Payloads of batches that were read back and checked."""
    first_lease_s: float
    """Unix time of the first training lease; 0 if there was none."""
    last_commit_s: float
    """Unix time of the last committed step; 0 if there was none."""
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every rule holds."""
        return not self.problems

    def rows(self) -> list[tuple[str, ...]]:
        """One row per number: its name, then its value for each policy."""
        fates = [(fate, *(f"{getattr(p.fates, fate):,}" for p in self.policies)) for fate in _FATE_ROWS]
        gradient = [p.gradient_tokens for p in self.policies]
        return [
            *fates,
            ("steps", *(f"{p.steps:,}" for p in self.policies)),
            ("redone steps", *(f"{p.redone_steps:,}" for p in self.policies)),
            ("dropped batches", *(f"{p.dropped_batches:,}" for p in self.policies)),
            ("replayed", *(f"{p.replayed:,}" for p in self.policies)),
            ("staleness mean", *(f"{p.staleness_mean:.2f}" for p in self.policies)),
            ("staleness max / bound", *(f"{p.staleness_max} / {p.staleness_bound}" for p in self.policies)),
            ("tokens generated", *(f"{p.generated_tokens:,}" for p in self.policies)),
            ("tokens committed", *(f"{p.committed_tokens:,}" for p in self.policies)),
            ("of which with a gradient", *("not reported" if n is None else f"{n:,}" for n in gradient)),
        ]

    def table(self) -> Table:
        """The numbers as a table with one column per policy. Does not show problems."""
        table = Table(title=f"audit: {'holds' if self.ok else 'DOES NOT HOLD'} ({self.num_records} records)")
        if self.num_pushed or self.num_push_refused:
            table.caption = (
                f"pushed tasks: {self.num_pushed} accepted, {self.num_pushed_drawn} drawn, "
                f"{self.num_push_refused} refused"
            )
        table.add_column("groups and tokens")
        for policy in self.policies:
            table.add_column(policy.name, justify="right")
        for row in self.rows():
            table.add_row(*row)
        return table


def audit(folder: Path) -> AuditReport:
    """Audits a journal folder. Raises: JournalError if there is no readable journal."""
    with JournalReader(folder) as reader:
        damage = _find_damage(folder, reader)
        try:
            return _make_report(folder, reader, damage)
        except _BAD_ROW_ERRORS as err:
            if not damage:
                raise
            # Rows this damaged cannot be added up.
            raise JournalError(damage[0]) from err


def _make_report(folder: Path, reader: JournalReader, damage: list[str]) -> AuditReport:
    """Adds up the accounting. Its problems come after the damage."""
    problems = list(damage)
    ledger = load_ledger(reader)
    for record in reader.records():
        try:
            ledger.apply(record)
        except JournalError as err:
            problems.append(str(err))
    closed = {name: _ClosedFates() for name in ledger.policies}
    for row in reader.fates():
        # Rows of groups that are open come from a compaction that was ended before its switch.
        if row.group_id not in ledger.groups and row.policy in closed:
            closed[row.policy].add(row)
    problems += ledger.problems
    steps = reader.steps()
    for name in ledger.policies:
        own = [record for record in steps if record.policy == name]
        problems += _policy_problems(name, ledger)
        problems += _stop_problems(name, ledger, own)
        problems += _closed_problems(name, ledger, closed[name], own)
    refs = batch_payloads(reader, ledger)
    problems += _check_payloads(folder, refs)
    if len(problems) > _MAX_PROBLEMS:
        problems = [*problems[:_MAX_PROBLEMS], f"... and {len(problems) - _MAX_PROBLEMS} more"]
    state = ledger.state
    return AuditReport(
        run_id=reader.meta("run_id"),
        policies=tuple(_audit_policy(name, ledger, closed[name], steps) for name in ledger.policies),
        is_over=state.ended is not None,
        reason=state.ended.reason if state.ended is not None else "",
        num_records=state.num_records,
        num_results=state.num_results,
        num_dropped=state.num_dropped,
        num_failed_attempts=state.num_failed_attempts,
        failures=tuple(sorted(state.failures.values(), key=lambda kind: -kind.num)),
        num_evals=state.num_evals,
        num_pushed=len(state.pushed),
        num_pushed_drawn=len(state.pushed) - len(state.pushed_waiting),
        num_push_refused=state.num_push_refused,
        num_payloads=len(refs),
        first_lease_s=state.first_lease_s,
        last_commit_s=state.last_commit_s,
        problems=tuple(problems),
    )


def _find_damage(folder: Path, reader: JournalReader) -> list[str]:
    """The reasons why the dataflow would refuse to open the folder."""
    problems: list[str] = []
    try:
        check_database(reader)
    except JournalError as err:
        problems.append(str(err))
    try:
        check_segments(folder, reader)
    except JournalError as err:
        # A live run may have dropped a segment since the reader was opened. Check again, at a later moment.
        with JournalReader(folder) as later:
            if later.first_segment == reader.first_segment:
                problems.append(str(err))
            else:
                problems += _find_damage(folder, later)
    return problems


@dataclass(slots=True)
class _ClosedFates:
    """The closed fates of a policy, according to their table."""

    fates: ClosedFates = field(default_factory=ClosedFates)
    by_step: dict[int, list[FateRow]] = field(default_factory=dict[int, "list[FateRow]"])
    """The trained ones, by step."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """Number of groups by fate."""
    generated_tokens: int = 0
    committed_tokens: int = 0
    """According to the records of the closed steps."""

    def add(self, row: FateRow) -> None:
        """Adds a row."""
        self.fates.add(row)
        self.counts[row.fate] += 1
        self.generated_tokens += row.trained_tokens
        if row.fate == "trained":
            self.by_step.setdefault(row.step, []).append(row)


def _policy_problems(name: str, ledger: Ledger) -> list[str]:
    """Checks what is open, and what happened since the last compaction."""
    problems: list[str] = []
    policy = ledger.policies[name]
    live = ledger.live(name)
    if ledger.state.ended is not None and live:
        problems.append(f"{name}: the run is over and {len(live)} groups have no fate, e.g. {min(live)}")
    step_of: dict[int, int] = {}
    for step, taken in sorted(policy.batches.items()):
        step_of |= dict.fromkeys(taken.event.group_ids, step)
        problems += batch_problems(name, step, ledger)
    for idx, group in ledger.groups.items():
        event = group.fates.get(name)
        if event and event.fate not in {"trained", "cancelled"} and idx in step_of:
            problems.append(f"{name}: group {idx} is {event.fate}, but in the batch of {step_of[idx]}")
    for record in policy.committed.values():
        problems += commit_problems(name, record, ledger)
    return problems


def _stop_problems(name: str, ledger: Ledger, steps: list[StepRecord]) -> list[str]:
    """Checks that no open batch was taken after the one with which the recipe's stop was reached."""
    problems: list[str] = []
    for step, taken in ledger.policies[name].batches.items():
        plan = ledger.plan_at(taken.seq)
        stop = StopPlan() if plan is None else plan.schedule.stop
        if stop == StopPlan():
            continue
        before = [record for record in steps if record.step < step]
        num_sequences = sum(record.num_samples for record in before)
        num_tokens = sum(record.num_trained_tokens for record in before)
        if 0 < stop.sequences <= num_sequences or 0 < stop.tokens <= num_tokens:
            problems.append(
                f"{name}: batch of step {step + 1} was taken although {num_sequences:,} sequences with "
                f"{num_tokens:,} tokens had reached the recipe's stop"
            )
    return problems


def _closed_problems(name: str, ledger: Ledger, closed: _ClosedFates, steps: list[StepRecord]) -> list[str]:
    """Checks that the closed fates are unchanged, and add up to the records of their steps."""
    problems: list[str] = []
    policy = ledger.policies[name]
    if closed.fates != policy.closed:
        problems.append(
            f"{name}: the table holds {closed.fates.num} fates of closed groups, {policy.closed.num} were "
            "closed, and a sum over them differs: rows were deleted, added or changed"
        )
    ours = [record for record in steps if record.step not in policy.committed]
    by_step = _trained_in_closed_steps(name, ledger, closed)
    if sorted(by_step) != sorted(record.step for record in ours):
        problems.append(f"{name}: {len(ours)} steps are closed, groups are trained in {len(by_step)} others")
    if len(ours) != policy.num_closed_steps:
        problems.append(
            f"{name}: {policy.num_closed_steps} steps were closed, {len(ours)} are in their table"
        )
    for record in ours:
        rows = by_step.get(record.step, [])
        replayed = policy.replayed.get(record.step) or ReplayedGroups()
        problems += record_problems(
            record,
            (*(row.staleness for row in rows), *replayed.staleness),
            num_replayed=len(replayed.staleness),
            num_samples=sum(row.samples for row in rows) + replayed.num_samples,
            num_trained_tokens=sum(row.trained_tokens for row in rows) + replayed.num_trained_tokens,
        )
        closed.committed_tokens += record.num_trained_tokens
    return problems


def _trained_in_closed_steps(name: str, ledger: Ledger, closed: _ClosedFates) -> dict[int, list[FateRow]]:
    """The fates of each closed step. Groups may still be open for another policy or for replay."""
    by_step = {step: list(rows) for step, rows in closed.by_step.items()}
    for idx, group in ledger.groups.items():
        event = group.fates.get(name)
        if event and event.fate == "trained" and event.step not in ledger.policies[name].batches:
            by_step.setdefault(event.step, []).append(group.fate_row(name, idx))
    return by_step


def batch_payloads(reader: JournalReader, ledger: Ledger) -> list[tuple[str, int, PayloadRef]]:
    """(policy, group, payload) of each kept trajectory in batches. `ledger` has the reader's records."""
    closed = [(name, group, ref) for name, group, refs in reader.payloads() for ref in refs]
    return closed + [
        (name, idx, ref)
        for idx, group in ledger.groups.items()
        for name, contribution in group.contributions.items()
        if contribution.num_uses
        for ref in contribution.payloads
    ]


def _check_payloads(folder: Path, refs: list[tuple[str, int, PayloadRef]]) -> list[str]:
    """Reads payloads, and reports damaged ones."""
    problems: list[str] = []
    with contextlib.closing(SegmentReader(folder / "segments")) as reader:
        for name, group, ref in refs:
            try:
                reader.read(ref)
            except JournalError as err:
                problems.append(f"{name}: group {group}: {err}")
    return problems


def _audit_policy(name: str, ledger: Ledger, closed: _ClosedFates, steps: list[StepRecord]) -> PolicyAudit:
    """Adds up a policy's closed fates and open groups. `steps`: those of all policies."""
    policy = ledger.policies[name]
    drawn = [group for group in ledger.groups.values() if name in group.drawn]
    events = [group.fates[name] for group in ledger.groups.values() if name in group.fates]
    counts = closed.counts + Counter(event.fate for event in events)
    staleness = [event.staleness for event in events if event.fate == "trained"]
    staleness += [row.staleness for rows in closed.by_step.values() for row in rows]
    replayed = [s for taken in policy.batches.values() for s in taken.event.replayed_staleness]
    replayed += [s for groups in policy.replayed.values() for s in groups.staleness]
    plan = ledger.plan_at(_LAST_RECORD)
    facts = plan.policies.get(name) if plan else None
    generated = sum(group.contribution(name).num_trained_tokens for group in ledger.groups.values())
    committed = sum(record.num_trained_tokens for record in policy.committed.values())
    gradient = [record.num_gradient_tokens for record in steps if record.policy == name]
    known = [num for num in gradient if num is not None]
    return PolicyAudit(
        name=name,
        fates=FateCounts(drawn=closed.fates.num + len(drawn), live=len(ledger.live(name)), **counts),
        steps=policy.num_committed,
        redone_steps=policy.num_redone,
        dropped_batches=policy.num_dropped,
        replayed=len(replayed),
        staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
        staleness_max=max([*staleness, *replayed], default=0),
        staleness_bound=facts.staleness_bound if facts else 0,
        generated_tokens=closed.generated_tokens + generated,
        committed_tokens=closed.committed_tokens + committed,
        gradient_tokens=sum(known) if len(known) == len(gradient) else None,
    )
