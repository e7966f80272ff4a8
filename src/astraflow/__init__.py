"""AstraFlow: reinforcement learning of LLM agents as a dataflow between autonomous services.

    from astraflow import launch, load_recipe, try_episode

What is imported from here loads its module at the first use, so that `import astraflow` stays quick.

The packages, from the bottom up; the docstring of each says which file decides what:

    types, errors, protocols, wire, config, metrics     items, exceptions, interfaces, encoding, settings
    added                                               what the core uses of add-ons
    user_input, service                                 what people write; how services listen and call
    tasks, workflows, algorithms, losses, models        the parts that a recipe names
    weights                                             versions on their way from a trainer to engines
    dataflow                                            who may lease, which advantage an episode has
    rollout                                             leases, episodes, when a version is served
    trainer                                             batches, steps, checkpoints
    recipe, processes, report, run, cli                 one run, from its recipe to what a person sees
    addons                                              what a first run does not need

To see one item pass through all of them, read `addons/one_process/in_one_process.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astraflow.addons import runs
    from astraflow.addons.one_process.trial import try_episode
    from astraflow.recipe.recipe import load_recipe
    from astraflow.run.run import launch

__all__ = ["__version__", "launch", "load_recipe", "runs", "try_episode"]

__version__ = "0.1.0"

_MODULES = {
    "launch": "astraflow.run.run",
    "load_recipe": "astraflow.recipe.recipe",
}
"""Where names are defined."""
_ADDED = ("runs", "try_episode")


def __getattr__(name: str) -> object:
    if name in _ADDED:
        return getattr(import_module("astraflow.added"), name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
