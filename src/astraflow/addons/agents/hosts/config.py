"""The settings of a host in a recipe: its Python, what it serves, and which of its tasks are used."""

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from astraflow.config import Config, Variable
from astraflow.errors import ConfigError
from astraflow.protocols import TaskSource
from astraflow.tasks.variants import SourceContext, SourceVariant
from astraflow.user_input.interpreters import find_interpreter
from astraflow.user_input.mistakes import hint

__all__ = ["ADAPTERS", "MAX_TASKS", "HostConfig", "HostedSourceConfig"]

ADAPTERS = {"verifiers": "astraflow.addons.agents.hosts.inside.verifiers_host:VerifiersHost"}
"""What a host can serve without the user's own code. The module is imported in the host's Python."""

MAX_TASKS = 100_000
"""Largest number of tasks of one source. They are kept in memory."""

_MODULE_AND_ATTR = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


class HostConfig(Config):
    """A process with a separate Python that runs an environment."""

    python: str = Field(min_length=1)
    """The interpreter of the environment: its path, the folder of a virtual environment such as
    `.venv-verifiers`, or a name on the PATH."""
    serve: str
    """What the host serves: `verifiers`, or a class of your own as `module:attr`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `verifiers` or of your class."""
    keeps_env: tuple[Variable, ...] = ()
    """Further environment variables of the service that the host gets, e.g. the key of a search tool."""
    open_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds after which a host that is not ready fails the rollout service."""
    timeout_s: float = Field(default=240.0, gt=0)
    """Seconds after which an episode fails. A host that doesn't give up the episode then is restarted."""
    max_restarts: int = Field(default=5, ge=0)
    """Number of restarts in a row, without an episode that ended, after which a lost host is given up."""

    @field_validator("serve")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in ADAPTERS and not _MODULE_AND_ATTR.fullmatch(value):
            raise ValueError(f'{value!r} is not of the form "module:attr"{hint(value, list(ADAPTERS))}')
        return value

    @field_validator("keeps_env")
    @classmethod
    def _keeps_no_secret_of_the_run(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if own := [name for name in names if name.startswith("ASTRAFLOW_")]:
            raise ValueError(f"{own[0]} belongs to the service and is given to no program; leave it out")
        return names

    @property
    def target(self) -> str:
        """`module:attr` of what is served, in the host's Python."""
        return ADAPTERS.get(self.serve, self.serve)

    def interpreter(self) -> str:
        """The path of the interpreter. Raises: ConfigError if there is none."""
        return find_interpreter(self.python, "python")


class HostedSourceConfig(SourceVariant):
    """The tasks of the environment that the workflow `hosted` names."""

    needs_workflow: ClassVar[bool] = True
    name: Literal["hosted"] = "hosted"
    split: str = ""
    """Which of its tasks to use. The environment determines which splits exist."""
    skip: int = Field(default=0, ge=0)
    """Number of tasks to skip, e.g. the training tasks in an evaluation set."""
    limit: int = Field(default=0, ge=0, le=MAX_TASKS)
    """Number of tasks to use after the skipped ones; 0: all, if they are at most 100,000. A larger or
    infinite set of tasks needs a limit."""

    def make(self, context: SourceContext) -> TaskSource:
        """Starts the workflow's host and lists its tasks.

        Raises: ConfigError if the workflow has no host, or the host cannot be started; DataError if it cannot
        list its tasks.
        """
        from astraflow.addons.agents.hosts.listing import hosted_source

        if not isinstance(context.workflow, HostConfig):
            raise ConfigError(
                "the source `hosted` takes its tasks from the workflow's environment, but the workflow is "
                "not `hosted`; use another source, or `workflow: {name: hosted, python: ..., serve: ...}`"
            )
        return hosted_source(self, context.workflow, name=context.name)
