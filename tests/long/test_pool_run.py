"""A pool that sizes itself, with real processes: it grows for a fast trainer, and shrinks for a slow one.

The devices are emulated: one service makes a batch in about 4 s.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from drivers.system_driver import ROOT, Runs, Started, environment, interrupt, num_steps, wait_until

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(600)]

MOST = 3
FAST_S = 1.0
"""A trainer that needs this for a step keeps four services busy."""
SLOW_S = 9.0
"""One that needs this keeps half a service busy."""


def sections() -> dict[str, Any]:
    engine = {
        "name": "paced",
        "num_slots": 8,
        "tokens_per_s": 100.0,
        "mean_tokens": 200.0,
        "sigma": 0.3,
        "max_context": 1024,
    }
    return {
        "workflow": {"name": "paced"},
        "rollout": {"services": 1, "max_episodes": 8, "engine": engine},
        "cluster": {
            "max_services": MOST,
            "pool": {"window_s": 20.0, "shrink_after_s": 5.0, "drain_s": 30.0},
        },
    }


def overrides(step_s: float, *, steps: int) -> tuple[str, ...]:
    policy = {
        "sampling.max_tokens": 400,
        "table.max_staleness": 4,
        "table.sampler": "{name: edf}",
        "train.backend": f"{{name: paced, step_s: {step_s}}}",
        "train.steps": steps,
    }
    return tuple(f"policies.actor.{key}={value}" for key, value in policy.items())


def running(run: Started) -> list[str]:
    """The rollout services that are processes now."""
    path = run.run_dir / "run.json"
    record = json.loads(path.read_text()) if path.exists() else {"services": []}
    return [s["name"] for s in record["services"] if s["name"].startswith("rollout-") and s["pid"]]


def decisions(run: Started) -> list[dict[str, Any]]:
    path = run.run_dir / "pool.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_pool_grows_and_shrinks_with_its_load_and_the_audit_is_exact(runs: Runs) -> None:
    recipe = runs.recipe(**sections())
    run = runs.start(recipe, *overrides(FAST_S, steps=1000))
    wait_until(run, lambda: len(running(run)) == MOST, timeout_s=120)
    assert {name for decision in decisions(run) for name in decision["started"]} == {"rollout-1", "rollout-2"}
    shown = subprocess.run(
        [sys.executable, "-m", "astraflow.cli.main", "status", str(run.run_dir)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"pool: {MOST} rollout services of 1 to {MOST}; " in shown.stdout, shown.stdout + shown.stderr
    assert interrupt(run) == 130, run.report()
    assert "pool: 1 -> 2 rollout services (rollout-1 started): trainer waits" in run.report()

    num_before, done = len(decisions(run)), num_steps(run)
    resumed = runs.start(recipe, *overrides(SLOW_S, steps=done + 10))
    wait_until(resumed, lambda: len(running(resumed)) == MOST, timeout_s=60)  # as many as it had
    wait_until(resumed, lambda: len(running(resumed)) == 1, timeout_s=120)
    later = decisions(resumed)[num_before:]
    assert [d["started"] for d in later] == [[]] * len(later), "it turned round"
    assert resumed.finish() == 0, resumed.report()
    assert resumed.summary()["audit_ok"], resumed.report()
    assert "leaving" in (resumed.run_dir / "logs" / "rollout-2.log").read_text()
