"""Single ranks of a trainer are killed and stopped, again and again; and a quickstart of two ranks learns."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from drivers.system_driver import ROOT, Place, Runs, Started, astraflow, environment, num_steps, wait_gone

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(3000)]

TIMEOUT_S = 15.0
"""For a rank that waits for another. Starting one takes a third of it, on a machine with other work too."""
END_S = 10.0
"""All ranks are gone this long after the timeout."""
PROGRESS_S = 120.0
"""In this time the ranks are back and have done a step."""
NUM_KILLS = 20
NUM_STOPS = 5


def ranks_of(run: Started) -> list[int]:
    """The processes of the trainer, rank 0 first; empty while it is being restarted."""
    try:
        trainer = psutil.Process(run.pid_of("trainer-actor"))
        others = [child.pid for child in trainer.children() if "--rank" in child.cmdline()]
    except (psutil.Error, ValueError, StopIteration):
        return []
    return [trainer.pid, *others] if len(others) == 1 else []


def wait_for_progress(run: Started, after: int) -> list[int]:
    """Waits until more steps than these are committed, and all ranks run. Returns: the ranks."""
    deadline = time.monotonic() + PROGRESS_S
    while num_steps(run) <= after or not ranks_of(run):
        assert time.monotonic() < deadline, run.report()
        time.sleep(0.2)
    return ranks_of(run)


def test_every_lost_rank_takes_all_with_it_and_the_run_ends_exactly(models: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    runs = Runs(models, tmp_path)
    numbers = [signal.SIGKILL] * NUM_KILLS + [signal.SIGSTOP] * NUM_STOPS
    rng.shuffle(numbers)
    run = runs.start(
        runs.recipe(steps=100_000),
        "policies.actor.train.ranks=2",
        f"supervision.rank_timeout_s={TIMEOUT_S}",
        f"supervision.longest_silence_s={TIMEOUT_S}",
    )
    exit_codes: list[int] = []
    # Its lines are read all the time: a full pipe would stop it.
    reading = threading.Thread(target=lambda: exit_codes.append(run.finish()))
    reading.start()
    try:
        num_done = 0
        for number in numbers:
            ranks = wait_for_progress(run, num_done)
            time.sleep(rng.random())
            num_done = num_steps(run)
            os.kill(rng.choice(ranks), number)
            assert not wait_gone(ranks, timeout_s=TIMEOUT_S + END_S), (number, run.report())
        wait_for_progress(run, num_done)
        run.process.send_signal(signal.SIGINT)
        reading.join()
        assert exit_codes == [130], run.report()
    finally:
        if run.process.poll() is None:
            run.process.kill()
        reading.join()
        runs.close()
    audit = astraflow("audit", str(run.run_dir))
    assert audit.returncode == 0, audit.stdout


def test_a_quickstart_of_two_ranks_reaches_85_percent(tmp_path: Path) -> None:
    model = tmp_path / "models" / "quickstart"
    built = astraflow("model", "init", "recipes/models/quickstart.yaml", "--out", str(model))
    assert built.returncode == 0, built.stderr
    runs = Runs(tmp_path / "models", tmp_path)
    try:
        recipe = ROOT / "recipes" / "quickstart.yaml"
        run = runs.start(
            recipe, f"policies.actor.model={model}", "policies.actor.train.ranks=2", "rollout.services=1"
        )
        assert run.finish() == 0, run.report()
    finally:
        runs.close()
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    scores = [row["score_mean"] for row in map(json.loads, lines) if row["kind"] == "eval"]
    assert max(scores) >= 0.85, scores
    assert run.summary()["audit_ok"]


def test_ranks_may_take_longer_to_start_than_one_may_wait_for_another(models: Path, tmp_path: Path) -> None:
    # As on a machine whose processors are busy: every further rank sleeps before its first import.
    delay_s = TIMEOUT_S + END_S
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys, time\nif '--rank' in sys.orig_argv:\n    time.sleep({delay_s})\n"
    )
    runs = Runs(models, tmp_path)
    place = Place(env=environment() | {"PYTHONPATH": str(tmp_path)})
    try:
        run = runs.start(
            runs.recipe(steps=3),
            "policies.actor.train.ranks=2",
            f"supervision.rank_timeout_s={TIMEOUT_S}",
            place=place,
        )
        assert run.finish() == 0, run.report()
    finally:
        runs.close()
    log = (run.run_dir / "logs" / "trainer-actor.log").read_text()
    assert log.count("trainer-actor starts") == 1, log
