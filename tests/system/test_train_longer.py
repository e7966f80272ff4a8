"""A run that is finished after 30 steps is trained 20 steps longer by the command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivers.system_driver import ROOT, SUMS, Runs, astraflow, environment

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(600)]

RECIPE = """\
name: longer
tasks:
  sources: {{sums: {sums}}}
  reward: {{name: exact}}
  extract: after_equals
policies:
  actor:
    model: {model}
    sampling: {{max_tokens: 6}}
    table: {{group_size: 2, groups_per_batch: 2, max_staleness: 2}}
    train: {{steps: 30, lr: 1.0e-4, checkpoint_every: 20, keep_checkpoints: 1}}
rollout:
  max_episodes: 8
  engine: {{name: torch, max_context: 48}}
eval:
  every: 10
  best: {{metric: heldout}}
  sets:
    heldout: {{num_tasks: 8, source: {heldout}}}
"""


def run(*arguments: str) -> str:
    """Runs the command and returns its output. Fails the test if the command fails."""
    argv = [sys.executable, "-m", "astraflow.cli.main", "run", *arguments, "--plain"]
    done = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_finished_run_trains_20_steps_more(runs: Runs) -> None:
    heldout = {**SUMS, "split": "heldout", "size": 8}
    recipe = runs.folder / "longer.yaml"
    texts = [yaml.safe_dump(part, default_flow_style=True, width=999).strip() for part in (SUMS, heldout)]
    recipe.write_text(RECIPE.format(model=runs.models / "actor", sums=texts[0], heldout=texts[1]))
    folder = runs.folder / "run"

    run(str(recipe), "--run-dir", str(folder))
    assert num_done_steps(folder) == 30
    printed = run(str(folder), "steps=50", "eval.every=20")

    summary = json.loads((folder / "summary.json").read_text())
    (policy,) = summary["policies"]
    assert (policy["steps"], policy["num_steps"], policy["redone_steps"]) == (50, 50, 0)
    assert summary["audit_ok"], summary["audit_problems"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "step" for line in lines) == 50
    evals = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evals] == [0, 10, 20, 30, 40, 50]
    assert_optimizer_continued(folder)
    assert_best_is_kept(folder, policy["best"], evals)
    assert f"best version of actor: {folder / policy['best']['folder']}" in printed

    refused = astraflow("run", str(recipe), "--run-dir", str(folder))
    assert refused.returncode == 2
    assert "policies.actor.train.steps = 30, but the run" in refused.stderr
    assert "has done 50 steps" in refused.stderr
    changes = [json.loads(line) for line in (folder / "recipe_changes.jsonl").read_text().splitlines()]
    assert [(c["key"], c["old"], c["new"]) for c in changes] == [
        ("policies.actor.train.steps", "30", "50"),
        ("eval.every", "10", "20"),
    ]


def num_done_steps(folder: Path) -> int:
    return json.loads((folder / "summary.json").read_text())["policies"][0]["steps"]


def assert_optimizer_continued(folder: Path) -> None:
    """The moments of the last checkpoint have seen every step, without a restart."""
    (checkpoint,) = (folder / "checkpoints" / "actor").glob("step-*")
    state = torch.load(checkpoint / "trainer.pt", weights_only=True)
    assert state["num_steps_done"] == 50
    with safe_open(checkpoint / "optimizer-00001-of-00001.safetensors", framework="pt") as file:
        assert set(json.loads(file.metadata()["steps"]).values()) == {50}


def assert_best_is_kept(folder: Path, best: dict[str, Any], evals: list[dict[str, Any]]) -> None:
    """The first version with the highest score still exists as a model folder."""
    scores = [record["score_mean"] for record in evals]
    first = evals[scores.index(max(scores))]
    assert (best["step"], best["version"], best["value"]) == (
        first["step"],
        first["version"],
        first["score_mean"],
    )
    (kept,) = (folder / "checkpoints" / "actor").glob("best-*")
    assert folder / best["folder"] == kept
    model = AutoModelForCausalLM.from_pretrained(kept)
    tokens = AutoTokenizer.from_pretrained(kept)("1+2=", return_tensors="pt")
    assert torch.isfinite(model(tokens["input_ids"]).logits).all()
