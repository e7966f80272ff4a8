"""Makes the environments of a recipe, and writes an environment's name into its tasks.

The name is stored in `Task.spec`, together with the spec that the environment itself gave the task. So a task
that has passed through the dataflow still says which environment scores and plays it, and the dataflow need
not know what an environment is.
"""

from collections.abc import Mapping

import msgspec

from astraflow.config import load_component
from astraflow.errors import ConfigError
from astraflow.protocols import Environment, InteractiveEnvironment
from astraflow.tasks.config import EnvironmentConfig, EnvironmentSourceConfig, TasksConfig, TaskSourceConfig
from astraflow.types import Task
from astraflow.user_input.own_code import describe_error

__all__ = [
    "check_environments",
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
    """The content of `Task.spec` of an environment's task."""

    environment: str
    """The environment's name in the recipe."""
    spec: str
    """The spec that the environment gave the task."""


def make_environment(name: str, config: EnvironmentConfig) -> Environment:
    """Makes the environment of a config without opening it; `name` is its name in the recipe.

    Raises: ConfigError if the environment cannot be made or lacks a method.
    """
    where = f"tasks.environments.{name}"
    maker = load_component(config, where=where)
    try:
        made: object = maker(**config.args)
    except SystemExit as err:
        raise ConfigError(
            f"{where}: {config.use} called exit({err}) instead of making an environment"
        ) from err
    except Exception as err:  # user code may raise anything
        raise ConfigError(
            f"{where}: {config.use} could not be made: it raised {describe_error(err)}"
        ) from err
    if not isinstance(made, Environment):
        missing = [method for method in ("tasks", "score", "open", "close") if not hasattr(made, method)]
        raise ConfigError(
            f"{where}: {config.use} made a {type(made).__name__} without {', '.join(missing)}; subclass "
            "astraflow.protocols.Environment, which has defaults for optional methods"
        )
    return made


def check_environments(tasks: TasksConfig, *, played: Mapping[str, TaskSourceConfig]) -> None:
    """Checks that each environment can be made, by making it once.

    `played`: the sources whose tasks the workflow plays, by their places in the recipe. Their environments
    need `reset`, `step` and `end`.
    Raises: ConfigError if an environment cannot be made, or lacks a method that it needs.
    """
    made = {name: make_environment(name, config) for name, config in tasks.environments.items()}
    for where, source in played.items():
        if not isinstance(source, EnvironmentSourceConfig):
            raise ConfigError(
                f"{where}: the workflow `environment` plays tasks of environments, but this source is not an "
                "environment; name one of tasks.environments with {name: environment}"
            )
        name = source.choose_environment(tasks.environments)
        if not isinstance(made[name], InteractiveEnvironment):
            raise ConfigError(
                f"tasks.environments.{name}: {type(made[name]).__name__} lacks `reset`, `step` or `end`, "
                "which the workflow `environment` calls; subclass "
                "astraflow.protocols.InteractiveEnvironment"
            )


def with_environment(task: Task, environment: str) -> Task:
    """The task with the environment's name in its spec; the same task if `environment` is empty."""
    if not environment:
        return task
    spec = _Spec(environment=environment, spec=task.spec)
    return msgspec.structs.replace(task, spec=msgspec.json.encode(spec).decode())


def without_environment(task: Task) -> tuple[str, Task]:
    """The name of the task's environment, and the task as the environment made it.

    A task without an environment is returned unchanged, with an empty name.
    """
    if not task.spec:
        return "", task
    try:
        spec = msgspec.json.decode(task.spec, type=_Spec)
    except msgspec.DecodeError:
        return "", task  # a spec of another kind of source, such as reasoning-gym
    return spec.environment, msgspec.structs.replace(task, spec=spec.spec)
