"""The example recipes whose tasks come from a server."""

import pytest

from astraflow.recipe.gallery import find_entry
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.sources import open_sources


@pytest.mark.parametrize("name", ["agentbench", "episode_server"])
def test_the_tasks_are_known_without_the_server(name: str) -> None:
    sources = open_sources(load_recipe(find_entry(f"examples/environments/{name}").path))
    assert len(sources.train["rooms"]) + len(sources.eval["heldout"]) == 256
