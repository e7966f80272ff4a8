"""How runs of real processes end: what screen, run.json, summary.json and `astraflow status` say of it."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from drivers.small_disks import fill, mounted
from drivers.system_driver import ROOT, Runs, Started, astraflow, environment, wait_gone

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(900)]

CTRL_C = "it was interrupted by Ctrl-C (SIGINT)"


def started(runs: Runs) -> Started:
    """A run that has done steps and would go on for ever."""
    run = runs.start(runs.recipe(steps=100_000))
    run.read_until("actor step ")
    return run


def check_told(run_dir: Path, state: str, reason: str) -> None:
    """The reason is in run.json, in summary.json and in what `status` prints."""
    for name in ("run.json", "summary.json"):
        record = json.loads((run_dir / name).read_text())
        assert (record["state"], record["reason"][: len(reason)]) == (state, reason), name
    assert f"{run_dir} is {state}: {reason}" in astraflow("status", str(run_dir)).stdout


def test_a_second_ctrl_c_ends_everything_at_once(runs: Runs) -> None:
    run = started(runs)
    pids = run.pids()
    run.process.send_signal(signal.SIGINT)
    run.read_until("press Ctrl-C again to end everything at once")
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.report()
    assert wait_gone(pids, timeout_s=1) == []
    check_told(run.run_dir, "stopped", CTRL_C)


def test_a_third_ctrl_c_ends_the_launcher_too_and_the_reason_is_kept(runs: Runs) -> None:
    run = started(runs)
    for part in ("dataflow", "trainer-actor"):
        os.kill(run.pid_of(part), signal.SIGSTOP)  # so that it takes a while to end them
    pids = run.pids()
    while run.process.poll() is None:
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    # The last one may meet an interpreter that is ending and has no handler left; a shell shows 130 for both.
    assert run.finish() in {130, -signal.SIGINT}, run.report()
    assert wait_gone(pids, timeout_s=15) == []
    record = json.loads((run.run_dir / "run.json").read_text())
    assert (record["state"], record["reason"]) == ("stopped", CTRL_C)
    assert f"is stopped: {CTRL_C}" in astraflow("status", str(run.run_dir)).stdout


def test_a_run_whose_terminal_is_closed_stops_and_says_so(runs: Runs) -> None:
    run_dir = runs.folder / "run"
    screen, terminal = pty.openpty()

    def lead() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = ["run", str(runs.recipe(steps=100_000)), "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        [sys.executable, "-m", "astraflow.cli.main", *command],
        cwd=ROOT,
        env={**environment(), "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lead,
    )
    os.close(terminal)
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        os.read(screen, 65_536)
    pids = [int(service["pid"]) for service in json.loads((run_dir / "run.json").read_text())["services"]]
    os.close(screen)
    assert process.wait(60) == 130
    assert wait_gone(pids, timeout_s=1) == []
    check_told(run_dir, "stopped", "its terminal was closed (SIGHUP)")


def test_a_full_disk_is_named_and_a_run_that_is_stopped_then_says_why(runs: Runs, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64m") as disk:
        small = Runs(runs.models, disk)
        run = started(small)
        fill(disk / "ballast")
        run.read_until(f"{run.run_dir} cannot be written: [Errno 28] No space left on device")
        status = astraflow("status", str(run.run_dir))
        assert f"the disk of {run.run_dir} is full (0 bytes free)" in status.stdout, status.stdout
        assert "the launcher" not in status.stdout
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.report()
        check_told(run.run_dir, "stopped", CTRL_C)
        small.close()
