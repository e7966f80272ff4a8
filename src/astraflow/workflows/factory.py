"""Makes the function that runs episodes from a recipe's `workflow` section."""

import inspect
from functools import partial
from pathlib import Path
from typing import cast

from astraflow.config import Use, load_component
from astraflow.errors import ConfigError
from astraflow.workflows.config import WorkflowConfig
from astraflow.workflows.conversation import Workflow

__all__ = ["is_replayable", "make_workflow"]


def make_workflow(config: WorkflowConfig, *, private: tuple[Path, ...] = ()) -> Workflow:
    """Binds the workflow's arguments, and loads the user's functions that it names.

    `private`: files and folders that must be invisible to programs that the workflow starts.
    Raises: ConfigError if a user's function does not exist, is not async where it must be, or does not take
    the arguments; see also `WorkflowVariant.make`.
    """
    if not isinstance(config, Use):
        return config.make_hiding(private)
    function = load_component(config, where="workflow")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"workflow.use = {config.use!r} is not an async function; expected "
            f"`async def {config.use.partition(':')[2]}(task, policies) -> Rewards`"
        )
    return cast("Workflow", partial(function, **config.args))


def is_replayable(config: WorkflowConfig) -> bool:
    """Whether the workflow is known to be replayable; a user's own is not."""
    return not isinstance(config, Use) and config.is_replayable
