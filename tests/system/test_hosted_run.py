"""A run of real processes trains on a task set of `verifiers`, in the library's own environment."""

import pytest

from drivers.system_driver import ROOT, Runs

pytestmark = [pytest.mark.system, pytest.mark.interop, pytest.mark.timeout(600)]


def test_a_run_trains_on_a_task_set_and_its_audit_is_exact(runs: Runs) -> None:
    run = runs.start(
        ROOT / "examples" / "verifiers_sums.yaml",
        f"policies.actor.model={runs.models / 'actor'}",
        "policies.actor.train.steps=5",
        "policies.actor.table.groups_per_batch=8",
        "eval.sets.heldout.num_tasks=16",
    )
    assert run.finish() == 0, run.report()
    assert run.summary()["audit_ok"]
