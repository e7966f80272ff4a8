"""The example of a stream of one's own, as it is printed: from the rollout service to the loss."""

import json

import pytest

from drivers.system_driver import ROOT, Runs

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_users_loss_learns_from_what_a_users_workflow_recorded(runs: Runs) -> None:
    model = runs.models / "actor"
    run = runs.start(
        ROOT / "examples" / "teacher_stream.yaml",
        f"policies.actor.model={model}",
        f"policies.teacher.model={model}",
        "policies.actor.table.groups_per_batch=4",
        "policies.actor.train.steps=3",
        "policies.actor.train.minibatches=1",
        "policies.actor.train.optimizer.warmup_steps=0",
        "policies.actor.train.loss.args.reward_share=1.0",
        "rollout.max_episodes=16",
        "rollout.engine.num_slots=16",
        "eval.every=3",
        "eval.sets.heldout.num_tasks=8",
    )
    assert run.finish() == 0, run.report()
    assert run.summary()["audit_ok"], run.summary()["audit_problems"]
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    # Teacher and actor begin as the same model; the loss's reward then leads the actor away from it.
    assert abs(steps[0]["teacher_kl"]) < 1e-5
    assert abs(steps[-1]["teacher_kl"]) > 1e-4
