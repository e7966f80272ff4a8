"""The smallest recipe with own data and an own reward runs as it is."""

import asyncio
import json
from pathlib import Path

import pytest

from astraflow.addons.one_process.in_process import run_in_process
from astraflow.dataflow.audit import audit
from astraflow.recipe.recipe import load_recipe
from astraflow.run.preflight import check_recipe
from astraflow.trainer.backend_factory import make_learner
from drivers.recipe_builders import make_digit_model

RECIPE = """\
name: mine
tasks:
  sources: {mine: {name: jsonl, path: tasks.jsonl}}
  reward: my_first_reward:score
policies: {actor: {model: ./model}}
"""


async def test_the_smallest_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_digit_model(tmp_path / "model")
    rows = [json.dumps({"prompt": f"Calculate {n} + 2.", "answer": str(n + 2)}) for n in range(6)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    (tmp_path / "my_first_reward.py").write_text(
        "def score(task, text):\n    return float(task.answer in text)\n"
    )
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    checked = check_recipe(load_recipe("recipe.yaml", ["steps=1"]), tmp_path / "run")
    recipe = checked.recipe
    learner = make_learner(recipe.policies["actor"].train, model_dir=tmp_path / "model", seed=0)
    learners = {"actor": learner}
    await run_in_process(recipe, checked.sources, learners, folder=tmp_path / "run", stop=asyncio.Event())
    report = audit(tmp_path / "run" / "journal")
    assert (report.ok, report.policies[0].fates.trained) == (True, 6)
