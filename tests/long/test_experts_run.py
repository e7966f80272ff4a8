"""A mixture of experts in a whole run: its experts are trained, published one by one, and generated with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drivers.system_driver import SUMS, Runs, astraflow

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(1800)]

NUM_STEPS = 3


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model folder."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_a_mixture_of_experts_trains_and_its_rollouts_are_of_what_was_published(tmp_path: Path) -> None:
    model = tmp_path / "models" / "actor"
    built = astraflow(
        "model", "init", "recipes/models/experts.yaml", "warm_start.steps=20", "--out", str(model)
    )
    assert built.returncode == 0, built.stderr
    # A reward that differs within a group, however little the model knows.
    (tmp_path / "own_reward.py").write_text("def length(task, text):\n    return float(len(text) % 4)\n")
    runs = Runs(tmp_path / "models", tmp_path)
    try:
        recipe = runs.recipe(
            steps=NUM_STEPS,
            tasks={"sources": {"sums": SUMS}, "reward": {"use": "own_reward:length"}},
        )
        on_policy = ("policies.actor.table.max_staleness=0", "policies.actor.table.engine_lag=0")
        settings = ("policies.actor.train.lr=1e-3", "rollout.engine.record_experts=true")
        run = runs.start(recipe, *on_policy, *settings)
        assert run.finish() == 0, run.report()
    finally:
        runs.close()
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    # Every token of a step is of the version before it, so the engine had loaded versions 1 and 2.
    assert [row["staleness_max"] for row in rows] == [0.0] * NUM_STEPS
    assert all(row["logprob_mismatch"] < 1e-4 for row in rows), [row["logprob_mismatch"] for row in rows]
    assert [row["experts_replayed_frac"] for row in rows] == [1.0] * NUM_STEPS
    assert all(row["behavior_gap_max"] < 1e-5 for row in rows), [row["behavior_gap_max"] for row in rows]
    exported = tmp_path / "exported"
    done = astraflow("export", str(run.run_dir), str(exported))
    assert done.returncode == 0, done.stderr
    before, after = tensors(model), tensors(exported)
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 2 * 8 * 3, "layers, experts, matrices"
    assert after.keys() == before.keys()
    changed = [name for name in experts if not torch.equal(before[name], after[name])]
    assert len(changed) > len(experts) // 2, changed
