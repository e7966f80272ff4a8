"""Simulated runs with seeded faults, each held to every rule; and proof that a broken rule shows.

A failing seed names the command that shows it, message by message.
"""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
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
from astraflow.dataflow.core.plan import RunPlan
from drivers.simulation import check_seeds, simulate
from simulator.history import History
from simulator.referee import BrokenRuleError
from simulator.run import Record, run_of
from simulator.scenario import make_scenario

_CHUNK = 50
_TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, 500, _CHUNK))
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
    command, env = (
        [sys.executable, "-m", "drivers.simulation", "16"],
        os.environ | {"PYTHONPATH": str(_TESTS)},
    )
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=100)
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


def _replayed_twice(event: BatchTaken) -> BatchTaken:
    ids, staleness = event.replayed_ids, event.replayed_staleness
    return msgspec.structs.replace(
        event, replayed_ids=(*ids, ids[0]), replayed_staleness=(*staleness, staleness[0])
    )


def _replayed_at_once(event: BatchTaken) -> BatchTaken:
    """A batch that replays a group that it also has fresh, as if it were an earlier one's."""
    ids = (event.group_ids[0], *event.replayed_ids[1:])
    return msgspec.structs.replace(event, replayed_ids=ids)


def _replayed_fresher(event: BatchTaken) -> BatchTaken:
    return msgspec.structs.replace(
        event, replayed_staleness=tuple(staleness - 1 for staleness in event.replayed_staleness)
    )


def _nothing_replayed(event: BatchTaken) -> BatchTaken:
    return msgspec.structs.replace(event, replayed_ids=(), replayed_staleness=())


@pytest.mark.parametrize(
    "lie",
    [_replayed_twice, _replayed_at_once, _replayed_fresher, _nothing_replayed],
    ids=lambda f: f.__name__,
)
def test_a_replay_against_the_rules_shows(lie: Callable[[BatchTaken], BatchTaken]):
    seed, records, at, position = _replaying_run()
    command, now_s, events = records[at]
    event = events[position]
    assert isinstance(event, BatchTaken)
    lying = (*events[:position], lie(event), *events[position + 1 :])
    with pytest.raises(BrokenRuleError, match="replay"):
        _judged([*records[:at], (command, now_s, lying), *records[at + 1 :]], seed)


def test_a_core_that_forgets_how_often_a_group_was_used_shows():
    """Each seed alone is a run of the rules; with twice the uses that the plan allows, some are not."""
    num_broken = 0
    for seed in range(100):
        plan = make_scenario(seed).plan
        if not any(policy.table.max_replayed for policy in plan.policies.values()):
            continue
        history = History(_with_fewer_uses(plan), _raise)
        try:
            for command, now_s, events in run_of(seed).records:
                history.book(command, events, now_s)
        except BrokenRuleError as broken:
            num_broken += "replays group" in str(broken)
    assert num_broken >= 5


def _raise(text: str) -> None:
    raise BrokenRuleError(text)


def _with_fewer_uses(plan: RunPlan) -> RunPlan:
    """The plan, with one use a group less than its core allows."""
    policies = {
        name: dataclasses.replace(
            policy,
            table=policy.table.model_copy(
                update={
                    "replay": policy.table.replay.model_copy(
                        update={"max_uses": policy.table.replay.max_uses - 1}
                    )
                }
            ),
        )
        for name, policy in plan.policies.items()
    }
    return dataclasses.replace(plan, policies=policies)


def _replaying_run() -> tuple[int, list[Record], int, int]:
    """A run's seed and records, and where in them a batch with replayed groups is taken."""
    for seed in range(60):
        records = run_of(seed).records
        for at, (_, _, events) in enumerate(records):
            for position, event in enumerate(events):
                if isinstance(event, BatchTaken) and event.replayed_ids:
                    return seed, records, at, position
    raise AssertionError("no run replays a group")


def _run_with(kind: type[Event]) -> tuple[int, list[Record]]:
    """The seed and the records of a run that did all its steps and has such an event."""
    for seed in range(30, 60):
        dataflow = run_of(seed)
        kinds = {type(event) for _, _, events in dataflow.records for event in events}
        if kind in kinds and dataflow.core.reason == "all steps are done":
            return seed, dataflow.records
    raise AssertionError(f"no run has {kind}")
