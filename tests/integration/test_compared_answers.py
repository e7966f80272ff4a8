"""A policy learns from comparisons of answers that all have the same score."""

import re
from pathlib import Path

import pytest

from astraflow.addons.one_process.in_one_process import train_in_one_process
from astraflow.recipe.recipe import load_recipe
from drivers.recipe_builders import make_digit_model

STEPS = 12
WORLD = """
from pathlib import Path


def same(task, text):
    return 0.5


def low(text):
    return sum(sign in "0123" for sign in text) / max(1, len(text))


def rank(task, texts, *, log):
    with Path(log).open("a") as file:
        print(sum(map(low, texts)) / len(texts), file=file)
    return [sum(low(other) < low(text) for other in texts) / (len(texts) - 1) for text in texts]
"""
RECIPE = """\
name: compared
tasks:
  sources: {sums: {name: reasoning_gym, dataset: basic_arithmetic, size: 100}}
  reward: {use: "compared_world:same"}
rollout: {services: 1, max_episodes: 16}
policies:
  actor:
    model: MODEL
    table: {groups_per_batch: 4, group_size: 8}
    sampling: {max_tokens: 8}
    train: {steps: 12, lr: 0.01}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_digit_model(tmp_path / "model")
    (tmp_path / "compared_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(tmp_path / "model")))
    return path


async def gradients(path: Path, num_steps: int, *overrides: str) -> list[float]:
    told: list[str] = []
    await train_in_one_process(load_recipe(path, overrides), num_steps=num_steps, tell=told.append)
    return [float(norm) for norm in re.findall(r"grad_norm ([\d.e-]+)", "\n".join(told))]


async def test_comparisons_teach_what_scores_that_are_all_equal_cannot(recipe: Path) -> None:
    assert await gradients(recipe, 1) == [0.0]
    log = recipe.with_name("log")
    compare = f"{{use: 'compared_world:rank', args: {{log: '{log}'}}}}"
    workflow = f"workflow={{name: compare_answers, compare: {compare}}}"
    norms = await gradients(recipe, STEPS, workflow, "policies.actor.table.group_size=1")
    assert len(norms) == STEPS
    assert min(norms) > 0
    shares = [float(line) for line in log.read_text().split()]
    first, last = sum(shares[:8]) / 8, sum(shares[-8:]) / 8
    assert last > first + 0.2
