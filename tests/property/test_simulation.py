"""Simulated runs with seeded faults, each held to every rule; and proof that a broken rule shows.

A failing seed names the command that shows it, message by message: `python tests/simulation.py SEED`.
"""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from astraflow.dataflow.core.commands import (
    AttemptFailed,
    BatchTaken,
    Event,
    FateDecided,
    GroupDrawn,
    LeaseIssued,
    RunEnded,
    StepCommitted,
    VersionPublished,
)
from simulation import check_seeds, simulate
from simulator.history import History
from simulator.referee import BrokenRuleError
from simulator.run import Record, run_of
from simulator.scenario import make_scenario

_CHUNK = 50
_TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, 2000, _CHUNK))
def test_no_seed_breaks_a_rule(first: int):
    check_seeds(range(first, first + _CHUNK))


def test_a_seed_gives_the_same_run_message_by_message():
    traces: list[list[str]] = [[], []]
    for trace in traces:
        simulate(16, trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 100


@pytest.mark.timeout(120)
def test_the_command_that_replays_a_seed_prints_its_trace():
    command = [sys.executable, str(_TESTS / "simulation.py"), "16"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert "every rule holds" in found.stdout
    assert re.search(r"^ +\d+\.\d{3}  w0 starts", found.stdout, re.MULTILINE)
    assert "LeaseIssued(lease_id='0.0.0'" in found.stdout


# --- the referee can tell -------------------------------------------------------------------------


def _judged(records: list[Record], seed: int) -> None:
    def problem(text: str) -> None:
        raise BrokenRuleError(text)

    history = History(make_scenario(seed).plan, problem)
    for command, now_s, events in records:
        history.book(command, events, now_s)
    history.close("all steps are done")


_KINDS = (
    AttemptFailed,
    BatchTaken,
    FateDecided,
    GroupDrawn,
    LeaseIssued,
    RunEnded,
    StepCommitted,
    VersionPublished,
)


@pytest.mark.parametrize("how", ["left out", "doubled"])
@pytest.mark.parametrize("kind", _KINDS)
def test_an_event_that_is_missing_or_comes_twice_shows(kind: type[Event], how: str):
    seed, records = _run_with(kind)
    at, position = next(
        (n, i)
        for n, (_, _, events) in enumerate(records)
        for i, e in enumerate(events)
        if isinstance(e, kind)
    )
    command, now_s, events = records[at]
    middle = () if how == "left out" else (events[position],) * 2
    _judged(records, seed)
    broken = (*events[:position], *middle, *events[position + 1 :])
    lying = [*records[:at], (command, now_s, broken), *records[at + 1 :]]
    with pytest.raises((BrokenRuleError, KeyError, IndexError)):
        _judged(lying, seed)


def test_a_batch_whose_staleness_is_understated_shows():
    seed, records = _run_with(BatchTaken)
    for at, (command, now_s, events) in enumerate(records):
        for position, event in enumerate(events):
            if isinstance(event, BatchTaken):
                lie = msgspec.structs.replace(event, staleness=tuple(s - 1 for s in event.staleness))
                broken = (*events[:position], lie, *events[position + 1 :])
                lying = [*records[:at], (command, now_s, broken), *records[at + 1 :]]
                with pytest.raises(BrokenRuleError):
                    _judged(lying, seed)
                return


def _run_with(kind: type[Event]) -> tuple[int, list[Record]]:
    """The seed and the records of a run that did all its steps and has such an event."""
    for seed in range(30, 60):
        dataflow = run_of(seed)
        kinds = {type(event) for _, _, events in dataflow.records for event in events}
        if kind in kinds and dataflow.core.reason == "all steps are done":
            return seed, dataflow.records
    raise AssertionError(f"no run has {kind}")
