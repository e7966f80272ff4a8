"""Every kind of process of a run is stopped: the lines, the log and `astraflow status` name it in time."""

import os
import signal
import time
from pathlib import Path

import pytest

from drivers.pace import slowness
from drivers.system_driver import Runs, Started, astraflow

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("timed"), pytest.mark.timeout(600)]

PARTS = ("rollout-0", "trainer-actor", "publisher-actor", "dataflow")
NAMED_WITHIN_S = 15.0


def signal_all(run: Started, number: signal.Signals) -> None:
    for part in PARTS:
        os.kill(run.pid_of(part), number)


def test_every_stopped_part_is_named_in_the_lines_the_log_and_the_status_and_goes_on_when_it_may(
    runs: Runs, tmp_path: Path
) -> None:
    run = runs.start(runs.recipe(steps=100_000), "supervision.longest_silence_s=0")
    run.read_until("actor step ")
    signal_all(run, signal.SIGSTOP)
    began_s = time.monotonic()
    for part in sorted(PARTS):
        run.read_until("has shown no sign of life")
        named_s = time.monotonic() - began_s
        assert named_s < NAMED_WITHIN_S * slowness(), part
    lines = "".join(run.lines)
    log = (run.run_dir / "logs" / "launcher.log").read_text()
    status = astraflow("status", str(run.run_dir))
    assert status.returncode == 1
    for part in PARTS:
        remedy = f"it is stopped (SIGSTOP, or a debugger); `kill -CONT {run.pid_of(part)}` lets it continue"
        for text in (lines, log, status.stdout):
            assert f"{part} has shown no sign of life for " in text, text
            assert remedy in text, text
    assert "max_staleness" not in status.stdout
    signal_all(run, signal.SIGCONT)
    for _ in PARTS:
        run.read_until("has recovered")
    run.read_until("actor step ")
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.report()
