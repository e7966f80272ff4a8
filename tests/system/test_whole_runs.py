"""Whole runs of real processes: they end, their accounting holds, and they survive kills and pauses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drivers.pace import slowness
from drivers.system_driver import ROOT, Runs, Started, astraflow, environment, wait_gone

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("timed"), pytest.mark.timeout(600)]

EVAL = {
    "every": 5,
    "sets": {
        "heldout": {
            "num_tasks": 16,
            "source": {
                "name": "reasoning_gym",
                "dataset": "basic_arithmetic",
                "split": "heldout",
                "size": 16,
                "args": {
                    "min_terms": 2,
                    "max_terms": 2,
                    "min_digits": 1,
                    "max_digits": 1,
                    "operators": ["+"],
                },
            },
        }
    },
}
PAIR = {"use": "examples.04_two_policies:solve_and_verify"}


def check_finished(run: Started, steps: dict[str, int]) -> None:
    """It exited with 0, did its steps, its audit holds and nothing of it runs any more."""
    assert run.finish() == 0, run.report()
    summary = run.summary()
    assert summary["audit_ok"], summary["audit_problems"]
    assert {p["name"]: p["steps"] for p in summary["policies"]} == steps
    assert summary["staleness_max"] <= summary["staleness_bound"] == 2
    assert wait_gone(run.pids(), timeout_s=5) == []


def check_told(run: Started, state: str, reason: str) -> None:
    """The reason of its end is in run.json, in summary.json and in what it printed, and `status` tells it."""
    record = json.loads((run.run_dir / "run.json").read_text())
    summary = run.summary()
    assert (record["state"], summary["state"]) == (state, state)
    assert record["reason"].startswith(reason)
    assert summary["reason"] == record["reason"]
    status = astraflow("status", str(run.run_dir))
    assert status.returncode == 0, status.stderr
    for printed in ("".join(run.lines), status.stdout):
        assert reason in printed
        assert f"small: {state}" in printed


def test_two_policies_with_a_trainer_each_train_side_by_side(runs: Runs) -> None:
    recipe = runs.recipe(policies=("actor", "verifier"), services=2, workflow=PAIR, eval=EVAL)
    run = runs.start(recipe)
    check_finished(run, {"actor": 5, "verifier": 5})
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["policy"], line["step"]) for line in lines if line["kind"] == "step"]
    assert sorted(steps) == [(policy, step) for policy in ("actor", "verifier") for step in range(1, 6)]
    evaluated = {(line["policy"], line["version"]) for line in lines if line["kind"] == "eval"}
    assert evaluated == {(policy, version) for policy in ("actor", "verifier") for version in (0, 5)}
    summary = run.summary()
    assert summary["generated_tokens"] >= summary["committed_tokens"] > 0
    assert 0 < summary["rl_wall_s"] < summary["wall_s"]
    assert "# Before" in (run.run_dir / "samples" / "episodes.md").read_text()
    assert (run.run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    again = astraflow("run", str(recipe), "--run-dir", str(run.run_dir))
    assert (again.returncode, "is finished after 5 steps" in again.stdout) == (0, True), again.stdout
    audited = astraflow("audit", str(run.run_dir))
    assert audited.returncode == 0, audited.stdout
    assert "verifier" in audited.stdout


def test_killed_parts_of_every_kind_come_back_and_the_accounting_holds(runs: Runs) -> None:
    run = runs.start(runs.recipe(steps=60, services=2))
    run.read_until("actor step ")
    for part in ("rollout-0", "publisher-actor", "dataflow", "trainer-actor"):
        os.kill(run.pid_of(part), signal.SIGKILL)
        run.read_until(f"{part} ended with code -9; restart 1")
    check_finished(run, {"actor": 60})


def test_an_interrupted_run_stops_within_5_seconds_and_resumes(runs: Runs) -> None:
    recipe = runs.recipe(steps=60, eval={**EVAL, "every": 50})
    run = runs.start(recipe)
    run.read_until("actor step ")
    time.sleep(1.0)  # the time that is shown has whole seconds
    status = astraflow("status", str(run.run_dir))
    assert status.returncode == 0, status.stderr
    assert re.search(r"^actor +\d+/60 +\d\.", status.stdout, re.M), "the reward of the newest step"
    assert "  0:00  " not in status.stdout, "the time that the run has taken"
    pids = run.pids()
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.report()
    took_s = time.monotonic() - began
    assert took_s < 5.0 * slowness()
    assert "run the same command again" in run.lines[-1]
    assert wait_gone(pids, timeout_s=1) == []
    check_told(run, "stopped", "it was interrupted by Ctrl-C (SIGINT)")
    assert (run.run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    refused = astraflow("run", str(recipe), "seed=1", "--run-dir", str(run.run_dir))
    assert refused.returncode == 2
    assert "seed was 0 and is 1" in refused.stderr
    resumed = runs.start(recipe, "rollout.services=2")
    check_finished(resumed, {"actor": 60})
    assert '"key":"rollout.services"' in (run.run_dir / "recipe_changes.jsonl").read_text()


def test_nothing_outlives_a_launcher_that_was_killed(runs: Runs) -> None:
    run = runs.start(runs.recipe(steps=500))
    run.read_until("actor step ")
    pids = run.pids()
    assert len(pids) == 4
    os.kill(run.process.pid, signal.SIGKILL)
    assert wait_gone(pids, timeout_s=15) == []
    status = astraflow("status", str(run.run_dir))
    assert f"its launcher (process {run.process.pid}) is gone" in status.stdout, status.stdout + status.stderr
    assert "of 500, version" in status.stdout


def test_a_part_that_cannot_work_names_its_log_and_why(runs: Runs) -> None:
    (runs.folder / "own_loss.py").write_text(
        "from astraflow.errors import ConfigError\n\n\n"
        "def picky(inputs):\n    raise ConfigError('this loss wants another recipe')\n"
    )
    loss = "policies.actor.train.loss={use: 'own_loss:picky'}"
    run = runs.start(runs.recipe(), loss)
    assert run.finish() == 1, run.report()
    assert wait_gone(run.pids(), timeout_s=5) == []
    printed = "".join(run.lines)
    assert "Traceback" not in printed
    assert "trainer-actor failed for good (exit code 2, 1 in a row)" in printed
    assert str(run.run_dir / "logs" / "trainer-actor.log") in printed
    assert "this loss wants another recipe" in printed
    check_told(run, "failed", "trainer-actor failed for good (exit code 2, 1 in a row)")


def test_a_run_that_failed_goes_on_once_the_cause_is_mended(runs: Runs) -> None:
    (runs.folder / "own_credit.py").write_text(
        "from pathlib import Path\n\n"
        "from astraflow.algorithms.credit import RlooCredit\n\n\n"
        "def picky(facts):\n"
        "    if not Path(__file__).with_name('mended').exists():\n"
        "        raise ValueError('this credit is broken')\n"
        "    return RlooCredit()(facts)\n"
    )
    recipe = runs.recipe()
    credit = "policies.actor.table.credit={use: 'own_credit:picky'}"
    failed = runs.start(recipe, credit)
    assert failed.finish() == 1, failed.report()
    assert wait_gone(failed.pids(), timeout_s=5) == []
    assert "this credit is broken" in "".join(failed.lines)
    (runs.folder / "mended").touch()
    check_finished(runs.start(recipe, credit), {"actor": 5})


def test_a_foreign_worker_joins_and_its_episodes_are_trained_on(runs: Runs) -> None:
    run = runs.start(runs.recipe(services=0))
    record = run.run_dir / "run.json"
    deadline = time.monotonic() + 60
    while not record.exists():
        assert time.monotonic() < deadline, run.report()
        time.sleep(0.1)
    url = json.loads(record.read_text())["url"]
    argv = [sys.executable, "examples/scripted_worker.py", url]
    with subprocess.Popen(argv, cwd=ROOT, env=environment()) as worker:
        try:
            check_finished(run, {"actor": 5})
            worker.wait(timeout=20)
        finally:
            worker.kill()


def test_beyond_loopback_every_caller_shows_a_token(runs: Runs) -> None:
    run = runs.start(runs.recipe(steps=500, dataflow={"host": "0.0.0.0", "heartbeat_s": 0.5}))
    run.read_until("actor step ")
    url = json.loads((run.run_dir / "run.json").read_text())["url"]
    anonymous = astraflow("status", url)
    assert anonymous.returncode == 1
    assert "missing or wrong token" in anonymous.stderr
    viewer = astraflow("status", url, "--token-file", str(run.run_dir / "secrets" / "viewer"))
    assert viewer.returncode == 0, viewer.stderr
    secrets = [path.read_text() for path in (run.run_dir / "secrets").iterdir()]
    for service in ("trainer-actor", "rollout-0"):
        command = " ".join(psutil.Process(run.pid_of(service)).cmdline())
        assert not any(secret in command for secret in secrets)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.report()


# --- bad input ------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    """The error of a command that must fail at once, as its user's mistake, without a traceback."""
    done = astraflow(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    return done.stderr


def test_bad_recipes_are_refused_before_anything_is_written(runs: Runs) -> None:
    recipe = runs.recipe()
    run_dir = runs.folder / "never"
    tail = ("--run-dir", str(run_dir))
    typo = refused("run", str(recipe), "policies.actor.train.looss=1", *tail)
    assert 'train.looss is not a key; did you mean "loss"?' in typo
    loss = refused("run", str(recipe), "policies.actor.train.loss={name: gpro}", *tail)
    assert '"gpro" is not a loss; did you mean "grpo"?' in loss
    model = refused("run", str(recipe), "policies.actor.model=./nowhere", *tail)
    assert "astraflow model init" in model
    table = refused("run", str(recipe), "policies.actor.table.groups_per_batch=4000", *tail)
    assert "have only 2000 tasks" in table
    assert not run_dir.exists()


def test_a_broken_line_of_a_task_file_is_named(runs: Runs) -> None:
    tasks = runs.folder / "tasks.jsonl"
    good = [json.dumps({"prompt": f"{n} + 1", "answer": str(n + 1)}) for n in range(8)]
    tasks.write_text("\n".join([*good[:3], '{"prompt": "4 +', *good[3:]]) + "\n")
    source = {"sums": {"name": "jsonl", "path": str(tasks)}}
    recipe = runs.recipe(tasks={"sources": source, "reward": {"name": "exact"}})
    error = refused("run", str(recipe), "--run-dir", str(runs.folder / "never"))
    assert f"{tasks}" in error
    assert "line 4" in error


def test_a_taken_port_is_named(runs: Runs, taken_port: int) -> None:
    port = taken_port
    error = refused(
        "run", str(runs.recipe()), f"dataflow.port={port}", "--run-dir", str(runs.folder / "never")
    )
    assert f"127.0.0.1:{port}" in error
    assert "choose another dataflow.port" in error


def test_one_episode_can_be_tried_in_one_process(runs: Runs) -> None:
    done = astraflow("try", str(runs.recipe()), "--task", "3")
    assert done.returncode == 0, done.stderr
    assert "Calculate" in done.stdout
    assert "=== score" in done.stdout


def test_dry_run_prints_a_recipe_that_reads_back(runs: Runs, tmp_path: Path) -> None:
    first = astraflow("run", str(runs.recipe()), "--dry-run", "seed=7")
    assert first.returncode == 0, first.stderr
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(first.stdout)
    assert astraflow("run", str(resolved), "--dry-run").stdout == first.stdout
    assert "seed: 7" in first.stdout
