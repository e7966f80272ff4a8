"""Whole runs with vLLM's own server (its CPU build): `make test-vllm`."""

import json
from pathlib import Path

import pytest

from astraflow.launch.config import load_recipe
from astraflow.launch.drift import measure_drift
from system_driver import ROOT, astraflow

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make .venv-vllm` installs vLLM into it"),
]


@pytest.fixture(scope="module")
def wide_model(pytestconfig: pytest.Config) -> Path:
    """The model of recipes/quickstart-vllm.yaml, kept in pytest's cache."""
    assert pytestconfig.cache is not None
    out = pytestconfig.cache.mkdir("models") / "quickstart-vllm"
    done = astraflow("model", "init", "recipes/models/quickstart-vllm.yaml", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 0.02)])
async def test_vllm_and_the_trainer_agree_while_lr_is_0(dtype: str, limit: float, wide_model: Path) -> None:
    recipe = load_recipe(
        ROOT / "recipes" / "quickstart-vllm.yaml",
        [
            f"policies.actor.model={wide_model}",
            f"rollout.engine.python={PYTHON}",
            f"rollout.engine.dtype={dtype}",
            f"policies.actor.train.backend.dtype={dtype}",
            "policies.actor.table.groups_per_batch=8",
        ],
    )
    (drift,) = await measure_drift(recipe, steps=3, deadline_s=1500)
    assert drift.num_tokens > 500
    assert 0 < drift.gap_mean < limit
    assert drift.are_weights_unchanged


def test_the_quickstart_learns_with_vllm(wide_model: Path, tmp_path: Path) -> None:
    done = astraflow(
        "run", "recipes/quickstart-vllm.yaml", "--run-dir", str(tmp_path / "run"), "--plain",
        f"policies.actor.model={wide_model}", f"rollout.engine.python={PYTHON}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = {line["version"]: line["score_mean"] for line in lines if line["kind"] == "eval"}
    assert scores[0] < 0.5
    assert scores[max(scores)] >= 0.80
