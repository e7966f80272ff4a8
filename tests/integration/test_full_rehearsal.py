"""The first prompts of recipes of full size: no open thought, room for answers, stop texts that end lines.

Each family is rehearsed at one size, and each size with one family.
"""

import os
import re
from pathlib import Path

import pytest

from astraflow.addons.doctor.gpu_checks import check_shares, gpu_users
from astraflow.addons.gallery.listing import full_recipes
from astraflow.addons.rehearsal.first_prompts import Asked, first_prompts
from astraflow.errors import ConfigError, DataError
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
