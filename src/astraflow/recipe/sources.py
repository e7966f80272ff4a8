"""Opens the task sources and evaluation sets of a recipe."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from astraflow.errors import ConfigError, DataError
from astraflow.protocols import TaskSource
from astraflow.recipe.eval_config import EvalSetConfig, TrainingWorkflow
from astraflow.recipe.recipe import Recipe
from astraflow.tasks.config import TaskSourceConfig
from astraflow.tasks.sources import make_source
from astraflow.workflows.config import WorkflowConfig

__all__ = ["OpenSources", "named_sources", "open_source", "open_sources", "sources_by_name", "workflow_of"]


@dataclass(frozen=True, slots=True)
class OpenSources:
    """The opened task sources and evaluation sets of a recipe, by name."""

    train: Mapping[str, TaskSource]
    eval: Mapping[str, TaskSource]


def open_sources(recipe: Recipe) -> OpenSources:
    """Opens every task source. Raises: ConfigError or DataError, naming the source."""
    opened = {
        where: open_source(config, recipe, name, where, flow)
        for name, where, config, flow in named_sources(recipe)
    }
    return sources_by_name(recipe, opened)


def named_sources(recipe: Recipe) -> Iterator[tuple[str, str, TaskSourceConfig, WorkflowConfig]]:
    """Yields name, place in the recipe, config and workflow of every source; evaluation sets come last."""
    for name, config in recipe.tasks.sources.items():
        yield name, f"tasks.sources.{name}", config, recipe.workflow
    for name, config in recipe.eval.sets.items():
        yield name, f"eval.sets.{name}.source", config.source, workflow_of(config, recipe)


def sources_by_name(recipe: Recipe, opened: Mapping[str, TaskSource]) -> OpenSources:
    """Returns the sources by name, given those in `opened` by their places in the recipe."""
    return OpenSources(
        {name: opened[key] for name in recipe.tasks.sources if (key := f"tasks.sources.{name}") in opened},
        {name: opened[key] for name in recipe.eval.sets if (key := f"eval.sets.{name}.source") in opened},
    )


def open_source(
    config: TaskSourceConfig, recipe: Recipe, name: str, where: str, workflow: WorkflowConfig
) -> TaskSource:
    """Opens a source of the recipe. Raises: ConfigError or DataError that begins with `where`, its place."""
    try:
        return make_source(
            config,
            name=name,
            environments=recipe.tasks.environments,
            workflow=workflow,
            tokenizer_dir=recipe.tokenizer_dir,
        )
    except (ConfigError, DataError) as err:
        raise type(err)(f"{where}: {err}") from err


def workflow_of(config: EvalSetConfig, recipe: Recipe) -> WorkflowConfig:
    """Returns the workflow of an evaluation set: its own, or that of training."""
    return recipe.workflow if isinstance(config.workflow, TrainingWorkflow) else config.workflow
