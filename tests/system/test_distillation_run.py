"""`recipes/distill.yaml`: three tiny models learn from a teacher what took its own training far more answers.


The self-teacher of `recipes/real/feedback.yaml` runs here with a tiny model, which only shows that it runs.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from drivers.system_driver import ROOT, Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return sorted((line for line in lines if line["kind"] == kind), key=lambda line: line["step"])


def test_three_seeds_reach_a_teachers_score_with_a_third_of_its_completions(runs: Runs) -> None:
    model = runs.folder / "quickstart"
    made = astraflow("model", "init", "recipes/models/quickstart.yaml", "--out", str(model))
    assert made.returncode == 0, made.stderr
    # The teacher, which is also the baseline: the quickstart's 100 steps with 512 completions each.
    run = runs.start(ROOT / "recipes" / "quickstart.yaml", f"model={model}", name="teacher")
    assert run.finish() == 0, run.report()
    target = records(run.run_dir, "eval")[-1]["score_mean"] - 0.03  # two standard errors of 512 tasks
    assert target > 0.85
    trained = runs.folder / "trained"
    assert astraflow("export", str(run.run_dir), str(trained)).returncode == 0
    reached: list[float] = []
    for seed in range(3):
        models = [f"policies.actor.model={model}", f"policies.teacher.model={trained}"]
        size = "eval.sets.heldout.num_tasks=512"
        run = runs.start(
            ROOT / "recipes" / "distill.yaml", *models, size, f"seed={seed}", name=f"seed-{seed}"
        )
        assert run.finish() == 0, run.report()
        assert run.summary()["audit_ok"], run.summary()["audit_problems"]
        steps = records(run.run_dir, "step")
        assert len(steps) * 128 * 3 <= 100 * 512
        assert steps[-1]["teacher_divergence"] < steps[0]["teacher_divergence"] / 3
        reached.append(records(run.run_dir, "eval")[-1]["score_mean"])
    assert min(reached) >= target, f"{reached}, for a target of {target}"


def test_a_policy_teaches_itself_with_a_verifiers_words(runs: Runs) -> None:
    model = runs.models / "actor"
    recipe = ROOT / "recipes" / "quickstart.yaml"
    teaching = "{name: distill, teachers: {default: {policy: actor}}, context: '{answer} {prompt}', top: 4}"
    loss = "train.loss={name: distill_top, num: 4, budget: null}"  # drops what the quickstart sets for m2po
    run = runs.start(
        recipe, f"model={model}", f"workflow={teaching}", loss,
        "table={group_size: 1, groups_per_batch: 8}", "train.steps=3", "train.minibatches=1", "eval.every=3",
        "rollout.max_episodes=16", "rollout.services=1", "eval.sets.heldout.num_tasks=8",
    )  # fmt: skip
    assert run.finish() == 0, run.report()
    assert run.summary()["audit_ok"], run.summary()["audit_problems"]
    steps = records(run.run_dir, "step")
    assert all(line["teacher_divergence"] > 0 for line in steps)  # it reads another prompt
    assert steps[0]["episode/teacher_s_p50"] > 0
