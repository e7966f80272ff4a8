"""Trackers that a recipe names, beside a run: one works, one cannot be opened, one hangs."""

import json
import signal
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivers.pace import slowness
from drivers.system_driver import Runs, Started

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(600)]

FAILING = {"use": "tests.drivers.tracker_examples:Failing"}
HANGING = {"use": "tests.drivers.tracker_examples:Hanging"}


def rows(run: Started) -> list[dict[str, object]]:
    """The steps in `metrics.jsonl`."""
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if row["kind"] == "step"]


def step_of(line: str) -> int:
    """The number in a line about a step. Not every step has a line."""
    return int(line.partition("actor step ")[2].partition("/")[0])


def test_neither_a_tracker_that_fails_nor_one_that_hangs_holds_up_a_run_and_both_are_said(runs: Runs) -> None:
    run = runs.start(runs.recipe(steps=100_000, trackers=["tensorboard", FAILING, HANGING]))
    run.read_until("PermissionError: the key is not valid; the run continues")
    hangs_from = len(rows(run)) + 1
    while step_of(run.read_until("actor step ")) < hangs_from + 5:
        pass
    began_s = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.report()
    took_s = time.monotonic() - began_s
    assert took_s < 6.0 * slowness()
    told = "".join(run.lines)
    num = len(rows(run))
    assert f"tracker tests.drivers.tracker_examples-Failing did not process {num} rows" in told, told
    assert (
        f"tracker tests.drivers.tracker_examples-Hanging did not process {num - 1} rows within 3 s" in told
    ), told
    losses = EventAccumulator(str(run.run_dir / "tensorboard" / "actor")).Reload().Scalars("loss")
    assert [event.step for event in losses] == list(range(1, num + 1))


def test_a_tracker_that_hangs_holds_a_finished_run_for_its_deadline_and_no_longer(runs: Runs) -> None:
    run = runs.start(runs.recipe(steps=20, trackers=[HANGING]))
    assert run.finish() == 0, run.report()
    last_row_s = (run.run_dir / "metrics.jsonl").stat().st_mtime
    assert time.time() - last_row_s < 40.0
    assert "Hanging did not process 19 rows within 20 s" in "".join(run.lines)
