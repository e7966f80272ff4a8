"""The first prompts of recipes of full size: no open thought, room for answers, stop texts that end lines.

Each family is rehearsed at one size, and each size with one family.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.doctor.gpu_checks import check_shares, gpu_users
from astraflow.addons.doctor.memory import rank_need
from astraflow.addons.gallery.listing import full_recipes
from astraflow.addons.rehearsal.cards import card_of
from astraflow.addons.rehearsal.fake_rank import fake_rank
from astraflow.addons.rehearsal.first_prompts import Asked, first_prompts
from astraflow.addons.rehearsal.rehearse import Rehearsal, rehearse
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.gallery import find_entry
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.sources import open_sources
from astraflow.run.preflight import check_recipe
from drivers.rehearsal import fixture_overrides, write_model_folders, write_tasks
from drivers.system_driver import ROOT

pytestmark = pytest.mark.timeout(120)

_PAIRS = r"math/|(?!agentbench)[\w-]+/(1\.7b|2b)(-(?!1gpu)\w+)?$|.*nodes"
"""Those of AgentBench need its server: tests/unit/examples/test_server_recipes.py."""
NAMES = [entry.name for entry in full_recipes() if re.match(_PAIRS, entry.name)]
_ELSEWHERE = (
    "needs a GPU",
    "need GPUs",
    "needs a server",
    "needs megatron-core",
    "rollout.engine.python",
    "slurm",
    "add tasks",
    "of host memory",
)
"""Parts of mistakes of this machine, which has no GPU, vLLM, Megatron, or Slurm, little memory, and only
a few rows of data."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model_folders(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


@pytest.fixture(autouse=True)
def engine_of_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of podman, in whose containers commands print nothing, and tests give a reward."""
    program = tmp_path / "podman"
    program.write_text('#!/bin/sh\ncase "$*" in run*) echo box;; *reward.txt*) echo 1;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


_NO_THOUGHTS = {
    "Qwen": "<think>\n\n</think>\n\n",
    "GLM": "<think></think>",
    "gemma": "<|turn>model\n",  # it thinks only if the system prompt asks for it
}
"""End of a prompt with `enable_thinking: false`, by the beginning of the model's name."""


def recipe_of(name: str, models: Path, tasks: Path) -> Recipe:
    path = ROOT / "recipes" / f"{name}.yaml"
    return load_recipe(path, fixture_overrides(path, models, tasks))


def mistakes_of(recipe: Recipe) -> list[str]:
    """The mistakes that a dry run finds, apart from what this machine lacks."""
    try:
        check_recipe(recipe)
    except (ConfigError, DataError) as err:
        found = re.split(r"\n  - ", str(err))
        return [text for text in found if not any(word in text for word in (*_ELSEWHERE, "mistakes:"))]
    return []


def check_prompts(asked: list[Asked], recipe: Recipe) -> None:
    for each in asked:
        policy = recipe.policies[each.policy]
        assert each.num_tokens < 4_000, each
        assert each.max_tokens == policy.sampling.max_tokens, "the prompt leaves no room for a whole answer"
        assert not each.opens_thought
        thinks = policy.template_args.get("enable_thinking")
        if thinks is False:
            family = next(start for start in _NO_THOUGHTS if policy.model_dir.name.startswith(start))
            assert each.text.endswith(_NO_THOUGHTS[family])
        assert ("<think>" in each.text) == (thinks is False and "gemma" not in policy.model)
        assert thinks is not True or each.max_tokens >= 4_096
        for stop in policy.sampling.stop:
            asking = each.text.split("assistant")[0]
            assert all(line.endswith(stop) for line in asking.splitlines() if stop in line), stop


@pytest.mark.parametrize("name", NAMES)
async def test_a_recipe_passes_its_dry_run_and_its_first_prompts_have_room(
    name: str, models: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    recipe = recipe_of(name, models, tasks)
    assert mistakes_of(recipe) == []
    check_shares(gpu_users(recipe))
    asked = await first_prompts(recipe, open_sources(recipe))
    assert {each.policy for each in asked} >= recipe.trained.keys()
    check_prompts(asked, recipe)


_OLD_NAMES = ("alfworld/", "webshop/", "textcraft/", "math-efficient-data/")
_NEEDS_SERVER = "agentbench"
_IN_CI = ("math/1.7b", "math/8b")
ALL = [entry.name for entry in full_recipes() if not entry.name.startswith((*_OLD_NAMES, _NEEDS_SERVER))]
SIZES = [name for name in ALL if re.match("math/(?!.*(nodes|glm|megatron))", name)]
"""Parts of layers, which GLM-4.5-Air is cut into, can't be rehearsed, nor can Megatron."""
_UNUSUAL = ("gpt-oss", "qwen3.5", "gemma4")
"""Families whose layers the formula doesn't know."""
STEPS = json.loads((ROOT / "tests" / "golden" / "rehearsed_steps.json").read_text())
"""Size -> figures of a microbatch, above which it may not grow."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if name in _IN_CI else pytest.param(name, marks=pytest.mark.long) for name in SIZES]
)
def test_the_step_of_a_size_needs_what_the_formula_says_and_no_more_work_than_before(
    name: str, models: Path, tasks: Path
) -> None:
    recipe = recipe_of(name, models, tasks)
    (policy,) = recipe.trained.values()
    context: Any = recipe.rollout.engine
    traced = fake_rank(policy, length=min(policy.train.token_budget, context.context))
    need = rank_need(policy)
    assert need is not None
    if not any(word in name for word in _UNUSUAL):
        assert need.total == pytest.approx(traced.peak["Total"], rel=0.1)
    found = {"peak_gb": traced.peak["Total"] / 1e9, **{key: traced.figures[key] for key in STEPS["figures"]}}
    too_much = {key: size for key, size in found.items() if size > 1.01 * STEPS["sizes"][name][key]}
    assert not too_much, found


REFUSED = {"gpt-oss-20b": "a weight for each pair of tokens", "qwen3.5": "flash-linear-attention"}
"""Size -> what the refusal of its recipes says."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ALL)
def test_a_recipe_fits_the_gpus_that_it_names_or_is_refused_with_the_reason(
    name: str, models: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    file = find_entry(name).path
    found = list(rehearse(Rehearsal(recipe_of(name, models, tasks), 0, card_of(file))))
    faults = [f"{each.check}: {each.detail}; {each.remedy}" for each in found if each.level == "fail"]
    faults = [fault for fault in faults if "add tasks" not in fault]  # only a few rows of the data are here
    reason = next((text for size, text in REFUSED.items() if size in name), None)
    assert bool(faults) == (reason is not None), "\n".join(faults)
    assert all(str(reason) in fault for fault in faults), "\n".join(faults)
