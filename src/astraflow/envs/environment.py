"""Environments of a recipe: how one is made, and how its tasks name it.

A task of an environment carries the environment's name beside its own `spec`, in the field that is there for
the source's scorer. So a task that went through the dataflow still says which environment scores and plays
it, and the dataflow need not know what an environment is.
"""

from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from astraflow.config import check_args, load_attr
from astraflow.envs.config import EnvironmentConfig, EnvironmentSourceConfig, TasksConfig, TaskSourceConfig
from astraflow.errors import ConfigError
from astraflow.protocols import Environment, InteractiveEnvironment
from astraflow.types import Task

__all__ = [
    "check_environments",
    "chosen_environment",
    "make_environment",
    "with_environment",
    "without_environment",
]


class _Spec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="environment",
):
    """What an environment's task carries in `Task.spec`."""

    environment: str
    """Its name in the recipe."""
    spec: str
    """The spec that the environment gave the task."""


def make_environment(name: str, config: EnvironmentConfig) -> Environment:
    """The environment of a config, not yet open; `name` is its name in the recipe.

    Raises: ConfigError if it cannot be made or lacks a method.
    """
    where = f"tasks.environments.{name}"
    maker = cast("Callable[..., object]", load_attr(config.use, where=f"{where}.use"))
    check_args(maker, config.args, where=f"{where}.args")
    try:
        made = maker(**config.args)
    except SystemExit as err:
        raise ConfigError(
            f"{where}: {config.use} called exit({err}) instead of making an environment"
        ) from err
    if not isinstance(made, Environment):
        missing = [method for method in ("tasks", "score", "open", "close") if not hasattr(made, method)]
        raise ConfigError(
            f"{where}: {config.use} made a {type(made).__name__} without {', '.join(missing)}; subclass "
            "astraflow.protocols.Environment to inherit what it does not need"
        )
    return made


def check_environments(tasks: TasksConfig, *, played: Mapping[str, TaskSourceConfig]) -> None:
    """Makes each environment once. Raises: ConfigError if one cannot be made.

    `played`: where in the recipe -> source whose tasks the workflow plays, so that it needs an environment
    with `reset`, `step` and `end`.
    """
    made = {name: make_environment(name, config) for name, config in tasks.environments.items()}
    for where, source in played.items():
        if not isinstance(source, EnvironmentSourceConfig):
            raise ConfigError(
                f"{where}: the workflow `environment` plays tasks of environments, and this source is none; "
                "name one of tasks.environments by {name: environment}"
            )
        name = chosen_environment(source, tasks.environments)
        if not isinstance(made[name], InteractiveEnvironment):
            raise ConfigError(
                f"tasks.environments.{name}: {type(made[name]).__name__} lacks `reset`, `step` or `end`, "
                "which the workflow `environment` calls; subclass "
                "astraflow.protocols.InteractiveEnvironment"
            )


def chosen_environment(source: EnvironmentSourceConfig, environments: Mapping[str, EnvironmentConfig]) -> str:
    """The environment of a source that names one, or none if there is but one. Raises: ConfigError."""
    name = source.environment
    if not name and len(environments) == 1:
        return next(iter(environments))
    if name not in environments:
        given = f"environment = {name!r} is not one" if name else "`environment` names none"
        raise ConfigError(f"{given} of tasks.environments (choices: {', '.join(environments) or 'none'})")
    return name


def with_environment(task: Task, environment: str) -> Task:
    """The task as it travels: its spec names the environment. `environment` empty: the task as it is."""
    if not environment:
        return task
    spec = _Spec(environment=environment, spec=task.spec)
    return msgspec.structs.replace(task, spec=msgspec.json.encode(spec).decode())


def without_environment(task: Task) -> tuple[str, Task]:
    """The name of the task's environment, empty without one, and the task as the environment made it."""
    if not task.spec:
        return "", task
    try:
        spec = msgspec.json.decode(task.spec, type=_Spec)
    except msgspec.DecodeError:
        # the spec of a source that has a scorer of another kind
        return "", task
    return spec.environment, msgspec.structs.replace(task, spec=spec.spec)
