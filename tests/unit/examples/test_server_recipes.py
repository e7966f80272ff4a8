"""The recipes whose tasks come from a server."""

import pytest
from aiohttp.test_utils import TestServer
from recipes.alfworld.household_server import make_app
from recipes.alfworld.household_world import Household

from astraflow.errors import ConfigError
from astraflow.recipe.gallery import find_entry
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.sources import open_sources
from astraflow.rollout.environments import Environments
from drivers.system_driver import ROOT


@pytest.mark.parametrize("name", ["agentbench", "episode_server"])
def test_the_tasks_are_known_without_the_server(name: str) -> None:
    sources = open_sources(load_recipe(find_entry(f"examples/environments/{name}").path))
    assert len(sources.train["rooms"]) + len(sources.eval["heldout"]) == 256


@pytest.mark.parametrize(("name", "num_tasks"), [("alfworld", 4649), ("webshop", 12087)])
def test_the_tasks_of_agentbench_are_those_that_the_prototype_has(name: str, num_tasks: int) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"agentbench-{name}" / "8b.yaml")
    sources = open_sources(recipe)
    (train,) = sources.train.values()
    (environment,) = recipe.tasks.environments.values()
    assert environment.args["samples"] == num_tasks
    assert 0.75 * num_tasks < len(train) < 0.85 * num_tasks


async def test_a_recipe_of_agentbench_checks_its_server() -> None:
    """The server is that of the look-alike, which speaks AgentBench's protocol."""
    async with TestServer(make_app(Household(size=20))) as server:
        given = {"tasks.environments.household.args.url": str(server.make_url("/api"))}
        for more, fits in (({"name": "household", "samples": 20}, True), ({}, False)):
            args = {f"tasks.environments.household.args.{key}": value for key, value in more.items()}
            recipe = load_recipe(ROOT / "recipes" / "agentbench-alfworld" / "1.7b.yaml", given | args)
            environments = Environments(recipe.tasks.environments)
            if not fits:
                with pytest.raises(ConfigError, match="has 0 samples of 'alfworld-std'"):
                    await environments.open()
                continue
            await environments.open()
            await environments.close()
