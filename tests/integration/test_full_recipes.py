"""Each recipe of full size takes two steps at `scale=smoke`: its own workflow, reward, filters and loss."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
import torch

from astraflow.addons.gallery.listing import full_recipes
from astraflow.addons.one_process.in_process import run_in_process
from astraflow.config import apply_overrides
from astraflow.dataflow.audit import audit
from astraflow.recipe import gallery
from astraflow.recipe.recipe import load_recipe
from astraflow.run.preflight import check_recipe
from astraflow.trainer.backend_factory import make_learner
from drivers.system_driver import ROOT

pytestmark = pytest.mark.timeout(300)  # the model is built once, and the first run starts a sandbox

SMALLER = [entry for entry in full_recipes() if re.search("(?<!-bench)/1.7b(-se|-si|$)", entry.name)]
SMALLER = [entry for entry in SMALLER if not entry.name.startswith(("agentbench", "adapt"))]
"""Those of other sizes are the same at this scale: tests/unit/run/test_full_recipes.py compares them. Tasks
of `terminal-bench` and `adapt-textcraft` are a download, and those of AgentBench come from its server."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `tiny`, as `astraflow run NAME model=tiny` builds it."""
    work = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.syspath_prepend(str(ROOT))
        gallery.build_models(["./models/tiny"], lambda _: None)
    return work / "models"


@pytest.mark.parametrize("entry", SMALLER, ids=lambda entry: entry.name)
async def test_a_full_recipe_takes_two_steps(
    entry: gallery.GalleryItem, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models, tmp_path / "models")
    # An untrained selector hardly ever names a program, so nearly all of its groups have equal rewards.
    kept = {"policies.selector.table.filters": []} if entry.name.endswith("-select") else {}
    smoke = load_recipe(entry.path, {"model": "tiny", "scale": "smoke", **kept})
    recipe = apply_overrides(smoke, {f"policies.{name}.train.steps": 2 for name in smoke.trained})
    learners = {
        name: make_learner(policy.train, model_dir=policy.model_dir, seed=recipe.seed)
        for name, policy in recipe.trained.items()
    }
    await run_in_process(
        recipe, check_recipe(recipe).sources, learners, folder=tmp_path, stop=asyncio.Event()
    )
    report = audit(tmp_path / "journal")
    assert report.ok
    for policy in report.policies:
        assert policy.steps == 2
        assert policy.fates.trained >= 4
