"""A run whose processes are started by a launcher of the user's own: the example, with another command."""

import psutil
import pytest

from system_driver import ROOT, Runs

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def test_the_examples_launcher_starts_a_whole_run(runs: Runs) -> None:
    run = runs.start(
        ROOT / "examples" / "own_launcher.yaml",
        "launcher.args.commands={rollout-*: env STARTED_BY=me}",
        f"policies.actor.model={runs.models / 'actor'}",
        "policies.actor.train.steps=2",
        "policies.actor.table.group_size=4",
        "policies.actor.table.groups_per_batch=4",
        "eval.sets={}",
    )
    run.read_until("actor step ")
    started_by = {
        name: psutil.Process(run.pid_of(name)).environ().get("STARTED_BY")
        for name in ("rollout-0", "rollout-1", "dataflow")
    }
    assert run.finish() == 0, run.report()
    assert started_by == {"rollout-0": "me", "rollout-1": "me", "dataflow": None}
    assert run.summary()["audit_ok"]


def test_a_launcher_that_cannot_start_a_process_ends_the_run_with_its_reason(runs: Runs) -> None:
    run = runs.start(
        ROOT / "examples" / "own_launcher.yaml",
        "launcher.args.commands={rollout-1: no-such-command}",
        f"policies.actor.model={runs.models / 'actor'}",
    )
    assert run.finish() == 2, run.report()
    assert "rollout-1: cannot start 'no-such-command'" in run.report()
