"""Functions that compare answers run in a process, and a policy learns from what they prefer."""

import re
from pathlib import Path

import pytest

from astraflow.addons.judge.compare.compare_answers import CompareAnswers
from astraflow.addons.judge.compare.config import CompareAnswersConfig
from astraflow.addons.one_process.in_one_process import train_in_one_process
from astraflow.config import Use
from astraflow.errors import RolloutError
from astraflow.protocols import Score
from astraflow.recipe.recipe import load_recipe
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, Task
from drivers.recipe_builders import make_digit_model
from drivers.rollout_fakes import ScriptedEngine, make_hosted, make_task
from drivers.stage import lines, rewards

STEPS = 6
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
    train: {steps: 6, lr: 0.01}
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
    assert norms[0] > 0
    shares = [float(line) for line in log.read_text().split()]
    first, last = sum(shares[:8]) / 8, sum(shares[-8:]) / 8
    assert last > first + 0.2


FUNCTIONS = """
def longest(task, texts, *, most=9):
    return [min(most, len(text)) for text in texts]


def infinite(task, texts):
    return [1e400 for text in texts]


def broken(task, texts):
    raise KeyError("score")
"""


async def compared(function: str, args: dict[str, int]) -> Episode:
    async def score(task: Task, text: str) -> Score:
        return Score(float(text == "b"))

    use = Use(use=f"compared_functions:{function}", args=args)
    workflow = CompareAnswers(CompareAnswersConfig(compare=use, answers=2, reward_weight=0.5))
    hosted = {"actor": make_hosted("actor", ScriptedEngine(lines("</think>abc", "b")))}
    async with EpisodeRunner(hosted, workflow, score) as runner:
        return await runner.episode(make_task(), seed=1)


async def test_a_function_compares_in_a_process_and_the_recipes_own_reward_may_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compared_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    episode = await compared("longest", {"most": 5})
    assert [reward for _, _, reward in rewards(episode)] == [5.0, 1.5]
    assert episode.score == 0.5
    with pytest.raises(RolloutError, match="returned, under 'score', inf; expected a finite number"):
        await compared("infinite", {})
    with pytest.raises(RolloutError, match=r"KeyError: 'score' \(.*, line \d+, in broken") as failure:
        await compared("broken", {})
    assert not failure.value.is_retryable
