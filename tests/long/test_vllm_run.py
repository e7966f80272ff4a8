"""Whole runs with vLLM's own server (its CPU build): `make test-vllm`."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from astraflow.addons.doctor.drift import measure_drift
from astraflow.config import dump_yaml
from astraflow.recipe.eval_config import EvalConfig
from astraflow.recipe.recipe import load_recipe
from drivers.pool_driver import NODE, join_node, logprob_mismatches, trained_shares
from drivers.system_driver import ROOT, Runs, Terminals, astraflow, url_of

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


@pytest.fixture
def pool(wide_model: Path, tmp_path: Path) -> Iterator[tuple[Runs, Terminals]]:
    runs, terminals = Runs(wide_model.parent, tmp_path), Terminals(tmp_path)
    yield runs, terminals
    terminals.close()
    runs.close()


@pytest.mark.system
@pytest.mark.skipif(NODE is None, reason="node is not installed here")
def test_vllm_torch_and_node_serve_one_run(wide_model: Path, pool: tuple[Runs, Terminals]) -> None:
    runs, terminals = pool
    changes = ("policies.actor.train.steps=12", "rollout.services=0", "rollout.max_episodes=16")
    recipe = load_recipe(
        ROOT / "recipes" / "quickstart.yaml", [f"policies.actor.model={wide_model}", *changes]
    )
    path = runs.folder / "recipe.yaml"  # no evaluation: vLLM would start a second server for it
    path.write_text(dump_yaml(recipe.model_copy(update={"eval": EvalConfig()})))
    run = runs.start(path)
    url = url_of(run)
    engine = load_recipe(ROOT / "recipes" / "quickstart-vllm.yaml").rollout.engine
    own = engine.model_copy(update={"python": str(PYTHON)}).model_dump_json()
    vllm = terminals.start("join", url, "--name", "vllm", f"rollout.engine={own}")
    while not serves(url):
        assert vllm.poll() is None, terminals.texts()
        time.sleep(0.5)
    join_node(terminals, url)
    terminals.start("join", url, "--name", "torch")
    assert run.finish() == 0, run.report() + terminals.texts()

    assert run.summary()["audit_ok"]
    shares = trained_shares(run.run_dir / "journal")
    assert set(shares) == {"vllm", "torch", "node"}
    for name, share in shares.items():
        assert share.episodes >= 64, (name, shares)
        assert share.newest_version >= 6, (name, shares)
    assert max(logprob_mismatches(run)) < 1e-3


def serves(url: str) -> bool:
    """Whether some service has a version to generate with: a server takes a minute to start."""
    reply = requests.get(f"{url}/v1/status", timeout=30)
    reply.raise_for_status()
    return any(served["versions"] for w in reply.json()["workers"] for served in w["load"]["versions"])
