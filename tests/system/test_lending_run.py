"""Trainers and rollout services take turns on emulated devices; any part may be killed meanwhile."""

import json
from collections import Counter

import pytest

from astraflow.types import HANDED_IN
from drivers.lending_driver import (
    TARGETS,
    check,
    failed_attempts,
    lending_recipe,
    overrides,
    run_with_kills,
    uses_of,
)
from drivers.system_driver import Runs, Started, astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def metric(run: Started, name: str) -> list[float]:
    """A metric of all steps that have it."""
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    return [float(step[name]) for step in map(json.loads, lines) if name in step]


def test_a_healthy_run_switches_loses_no_answer_and_samples_no_token_twice(runs: Runs) -> None:
    run = runs.start(lending_recipe(runs), *overrides(steps=8))
    run.read_until("actor step ")
    status = astraflow("status", str(run.run_dir))
    assert "the device of actor (" in status.stdout, status.stdout
    assert run.finish() == 0, run.report()
    check(run)
    uses = Counter(use.use for use in uses_of(run))
    assert uses["generate"] >= 3, uses
    assert uses["train"] == 8, uses
    lost = failed_attempts(run)
    assert set(lost) <= {HANDED_IN}, lost
    assert sum(metric(run, "episode/resumed_tokens")) > 0
    assert sum(metric(run, "episode/resampled_tokens")) == 0


def test_the_only_engine_pauses_while_the_trainer_uses_the_cores(runs: Runs) -> None:
    cluster = {"lend": True, "lending": {"turns": "always"}}
    run = runs.start(runs.recipe(steps=4, cluster=cluster), "policies.actor.sampling.max_tokens=24")
    assert run.finish() == 0, run.report()
    check(run)
    uses = Counter(use.use for use in uses_of(run))
    assert uses["train"] == 4, uses
    assert uses["generate"] >= 4, uses
    assert not failed_attempts(run), "nobody else could continue an episode"
    assert run.summary()["failures"] == []


def test_kills_of_tenants_and_arbiter_cost_no_episode_and_no_second(runs: Runs) -> None:
    run = run_with_kills(runs, TARGETS, seed=1, steps=10)
    check(run)
    assert len({use.session_ns for use in uses_of(run)}) == 2
    assert sum(not use.is_end_known for use in uses_of(run)) == 1
