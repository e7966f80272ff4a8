"""`astraflow retire` on a live run: the service finishes its episodes and ends for good, and nothing is lost.
And the agent of the examples, which sizes a pool with it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from examples.pool_agent import change

from astraflow.dataflow.audit import audit
from astraflow.service.restarts import RETIRED_CODE
from drivers.system_driver import ROOT, Runs, Started, astraflow, environment, url_of, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture
def run(runs: Runs) -> Started:
    """A run of many steps, whose episodes take about a second, with two services."""
    engine = {"name": "paced", "num_slots": 8, "tokens_per_s": 10.0, "mean_tokens": 6.0, "sigma": 0.0}
    path = runs.recipe(
        steps=10_000,
        services=2,
        workflow={"name": "paced", "turns": 1, "env_s": 0.5, "time_scale": 1.0},
        rollout={"services": 2, "max_episodes": 8, "engine": engine | {"time_scale": 1.0}},
    )
    backend = "policies.actor.train.backend={name: paced, step_s: 0.2, time_scale: 1.0}"
    started = runs.start(path, backend)
    url_of(started)
    wait_until(started, lambda: all(leases_of(started).get(f"rollout-{i}", 0) for i in (0, 1)), timeout_s=120)
    return started


def leases_of(run: Started) -> dict[str, int]:
    """Rollout service -> number of episodes that it runs."""
    status = json.loads(astraflow("status", str(run.run_dir), "--json").stdout)
    flow = status["dataflow"]
    return {worker["name"]: worker["num_leases"] for worker in flow["workers"]} if flow else {}


def end(run: Started) -> None:
    """Ends the run, and checks its books."""
    os.kill(run.process.pid, signal.SIGINT)
    run.finish()
    report = audit(run.run_dir / "journal")
    assert report.ok, report.problems
    (policy,) = report.policies
    assert policy.fates.failed == 0
    assert policy.fates.trained > 0


def test_a_retired_service_of_the_run_finishes_its_episodes_and_is_not_restarted(run: Started) -> None:
    pid = run.pid_of("rollout-1")
    done = astraflow("retire", str(run.run_dir), "rollout-1")
    assert (done.returncode, done.stdout) == (
        0,
        "rollout-1 has left; rollout services that stay: rollout-0\n",
    ), done.stderr
    record = run.run_dir / "run.json"
    wait_until(run, lambda: "rollout-1" not in record.read_text(), timeout_s=30)
    assert not Path(f"/proc/{pid}").exists()
    assert "leaving: " in (run.run_dir / "logs" / "rollout-1.log").read_text()
    assert leases_of(run).keys() == {"rollout-0"}

    unknown = astraflow("retire", str(run.run_dir), "rollout-1")
    assert unknown.returncode != 0
    assert "rollout service 'rollout-1' isn't part of the run; did you mean \"rollout-0\"?" in unknown.stderr
    end(run)
    assert not any("restart" in line and "rollout-1" in line for line in run.lines)


def test_a_joined_service_is_retired_and_says_so_with_its_exit_code(run: Started) -> None:
    command = [sys.executable, "-m", "astraflow.cli.main", "join", url_of(run), "--name", "guest"]
    guest = subprocess.Popen([*command, "--allow", "astraflow_paced"], cwd=ROOT, env=environment())
    try:
        wait_until(run, lambda: leases_of(run).get("guest", 0) > 0, timeout_s=60)
        done = astraflow("retire", url_of(run), "guest")
        assert done.returncode == 0, done.stderr
        assert guest.wait(20) == RETIRED_CODE
    finally:
        guest.kill()
        guest.wait()
    end(run)


@pytest.mark.parametrize(
    ("num", "missing", "step"),
    [(2, 1, 1), (2, -1, -1), (2, 0, 0), (4, 3, 0), (1, -1, 0), (0, 0, 1), (6, 0, -1)],
)
def test_the_agent_keeps_within_its_bounds(num: int, missing: int, step: int) -> None:
    assert change(num, missing, least=1, most=4) == step


def test_the_agent_starts_and_retires_services(run: Started) -> None:
    def agent(least: int, most: int) -> "subprocess.Popen[bytes]":
        bounds = ["--least", str(least), "--most", str(most), "--every-s", "1"]
        argv = [sys.executable, "examples/pool_agent.py", str(run.run_dir), *bounds]
        return subprocess.Popen(argv, cwd=ROOT, env=environment())

    for bound in (3, 1):
        now = agent(bound, bound)
        try:
            wait_until(run, lambda bound=bound: len(leases_of(run)) == bound, timeout_s=90)
            assert any(name.startswith("agent-") for name in leases_of(run)) == (bound == 3)
        finally:
            now.terminate()
            now.wait()
    end(run)
    assert len((ROOT / "examples" / "pool_agent.py").read_text().splitlines()) <= 60
