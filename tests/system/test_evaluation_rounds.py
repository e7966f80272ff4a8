"""Evaluation beside training, as the journal of a run of real processes tells it."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from astraflow.dataflow.core.commands import (
    AttemptFailed,
    EvalFinished,
    FateDecided,
    LeaseIssued,
    RecordResult,
    ResultDropped,
    StepCommitted,
)
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_commands, decode_events
from astraflow.types import lease_kind
from drivers.system_driver import SUMS, Runs

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS = 20
EVAL_EVERY = 2
HELDOUT = {"num_tasks": 32, "samples": 2, "source": {**SUMS, "split": "heldout", "size": 32}}


@dataclass
class Told:
    """What a journal says of leases, rounds and fates; numbers are those of its records."""

    issued: dict[str, int] = field(default_factory=dict[str, int])
    """Lease -> when it went out."""
    results: dict[str, int] = field(default_factory=dict[str, int])
    lost: list[tuple[int, object]] = field(default_factory=list[tuple[int, object]])
    """Failed attempts, and results that nobody wanted any more."""
    fates: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    round_ends: list[int] = field(default_factory=list[int])
    last_commit: int = 0

    def out_at(self, moment: int) -> set[str]:
        """Training leases that are out."""
        return {
            lease
            for lease, seq in self.issued.items()
            if lease_kind(lease) == "train" and seq < moment < self.results.get(lease, moment + 1)
        }


def told_by(journal: Path) -> Told:
    told = Told()
    with JournalReader(journal) as reader:
        for row in reader.records():
            for command in decode_commands(row):
                if isinstance(command, RecordResult):
                    told.results.setdefault(command.lease_id, row.seq)
            for event in itertools.chain.from_iterable(decode_events(row)):
                match event:
                    case LeaseIssued():
                        told.issued[event.lease_id] = row.seq
                    case AttemptFailed() | ResultDropped():
                        told.lost.append((row.seq, event))
                    case FateDecided():
                        told.fates.append((row.seq, event.fate))
                    case EvalFinished():
                        told.round_ends.append(row.seq)
                    case StepCommitted():
                        told.last_commit = row.seq
                    case _:
                        pass
    return told


def test_evaluation_cancels_no_rollout(runs: Runs) -> None:
    recipe = runs.recipe(steps=STEPS, services=2, eval={"every": EVAL_EVERY, "sets": {"heldout": HELDOUT}})
    run = runs.start(recipe)
    assert run.finish() == 0, run.report()
    told = told_by(run.run_dir / "journal")
    assert len(told.round_ends) == STEPS // EVAL_EVERY + 1

    # Until the last commit, after which nobody needs rollouts, nothing is lost, taken back or leased again.
    assert [lost for lost in told.lost if lost[0] < told.last_commit] == []
    assert [lease for lease in told.issued if not lease.endswith(".0")] == []
    assert {fate for seq, fate in told.fates if seq < told.last_commit} <= {"trained"}

    begins = [seq for lease, seq in told.issued.items() if lease_kind(lease) == "eval"]
    out = set[str]().union(*(told.out_at(seq) for seq in begins if seq < told.last_commit))
    assert out, "no rollout was out when evaluation was leased: this run shows nothing"
    assert out <= told.results.keys()
