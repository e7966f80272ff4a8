"""A run whose processes are started by a launcher of the user's own: the example, with another command."""

import json

import pytest

from drivers.system_driver import ROOT, Runs

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def test_the_examples_launcher_starts_a_whole_run(runs: Runs) -> None:
    command = """sh -c 'echo by the command; exec "$@"' sh"""
    run = runs.start(
        ROOT / "examples" / "own_launcher.yaml",
        f"launcher.args.commands={json.dumps({'rollout-*': command})}",
        f"policies.actor.model={runs.models / 'actor'}",
        "policies.actor.train.steps=2",
        "policies.actor.table.group_size=4",
        "policies.actor.table.groups_per_batch=4",
        "eval.sets={}",
        "rollout.services=1",
    )
    assert run.finish() == 0, run.report()
    logs = {log.stem for log in (run.run_dir / "logs").iterdir() if "by the command" in log.read_text()}
    assert logs == {"rollout-0"}
    assert run.summary()["audit_ok"]


def test_a_launcher_that_cannot_start_a_process_ends_the_run_with_its_reason(runs: Runs) -> None:
    run = runs.start(
        ROOT / "examples" / "own_launcher.yaml",
        "launcher.args.commands={rollout-1: no-such-command}",
        f"policies.actor.model={runs.models / 'actor'}",
    )
    assert run.finish() == 2, run.report()
    assert "rollout-1: cannot start 'no-such-command'" in run.report()
