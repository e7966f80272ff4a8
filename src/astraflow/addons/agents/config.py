"""The workflows `agent` and `hosted` in a recipe."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from astraflow.addons.agents.hosts.config import HostConfig
from astraflow.config import Config, Use, Variable
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.variant import ParserChoice, WorkflowVariant, load_function, load_parser

__all__ = ["AgentConfig", "HostedConfig", "ProgramConfig", "ProgramSandboxConfig"]


class ProgramSandboxConfig(Config):
    """What the sandbox of an agent program shows and allows."""

    backend: Literal["auto", "bubblewrap", "namespaces"] = "auto"
    """How the boxes are made: `bubblewrap` (the program `bwrap`), `namespaces` (only system calls), or
    `auto`: the first of these that works on the machine."""
    visible: tuple[str, ...] = ()
    """Further files and folders that the program can read, e.g. `[./data]`. It can always read those of the
    system, its interpreter with the virtual environment, and the folder of the script that `command`
    names."""
    memory_mb: int = Field(default=4096, ge=64, le=1 << 20)
    """Largest address space of each of its processes, in MiB."""
    disk_mb: int = Field(default=256, ge=1, le=1 << 16)
    """Largest size of /tmp, the only folder that it can write to, in MiB. The folder is in memory."""
    output_mb: int = Field(default=16, ge=1, le=256)
    """Largest size of each of its outputs, in MiB. A program that prints more is ended and fails."""
    num_processes: int = Field(default=128, ge=1, le=4096)
    """Largest number of its processes and threads at a time."""


class ProgramConfig(Config):
    """A program that is started for each episode."""

    name: Literal["program"] = "program"
    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, e.g. `[python, my_agent.py]`. It starts in the folder in which the rollout
    service was started."""
    model: str = ""
    """Policy that `ASTRAFLOW_MODEL` names; empty: the recipe's first policy."""
    timeout_s: float = Field(default=240.0, gt=0)
    """Seconds after which the program is killed, with all processes that it started, and its episode
    fails."""
    box: Literal["sandbox", "required", "preferred", "none"] = "preferred"
    """What the program can access. `sandbox`: only its own files, its interpreter, and the policies;
    `required`: the machine without the run's secrets and the keys of other episodes; `preferred`: the same,
    but if the machine cannot make such a box, the program runs without one, with a warning and the metric
    `unboxed`; `none`: everything that the service can access. If the machine cannot make the box, `sandbox`
    and `required` refuse to run."""
    sandbox: ProgramSandboxConfig = ProgramSandboxConfig()
    """What the sandbox shows and allows, for `box: sandbox`."""
    keeps_env: tuple[Variable, ...] = ()
    """Further environment variables of the service that the program gets, e.g. the key of a search tool."""

    @field_validator("keeps_env")
    @classmethod
    def _keeps_no_secret_of_the_run(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if own := [name for name in names if name.startswith("ASTRAFLOW_")]:
            raise ValueError(f"{own[0]} belongs to the service and is given to no program; leave it out")
        return names

    @model_validator(mode="after")
    def _has_settings_of_its_box(self) -> Self:
        if self.box != "sandbox" and self.sandbox != ProgramSandboxConfig():
            raise ValueError(f"sandbox is set, but box = {self.box}; set box: sandbox, or leave sandbox out")
        return self


class AgentConfig(WorkflowVariant):
    """An unmodified agent program talks to the policies through an OpenAI-compatible endpoint."""

    rewards_itself: ClassVar[bool] = True
    name: Literal["agent"] = "agent"
    run: Annotated[ProgramConfig | Use, Field(discriminator="name")]
    """A program, or a function `(task, endpoint)` of your own."""
    parser: ParserChoice = "auto"
    """How the model writes tool calls: as its chat template prints them (`auto`), the name of a format, or a
    function of your own from a text to calls."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each model to a policy. The program may use any policy of the recipe."""
        acting: dict[str, str] = {}
        if isinstance(self.run, ProgramConfig) and self.run.model:
            acting["run.model"] = self.run.model
        for name in names:
            acting[f"model {name}"] = name
        return acting

    @property
    def call_parser(self) -> ParserChoice:
        """See `WorkflowVariant.call_parser`."""
        return self.parser

    @property
    def commands(self) -> tuple[str, ...]:
        """The program that is started for each episode."""
        return (shlex.join(self.run.command),) if isinstance(self.run, ProgramConfig) else ()

    @property
    def needs_sandbox(self) -> bool:
        """Whether the program runs in the sandbox."""
        return isinstance(self.run, ProgramConfig) and self.run.box == "sandbox"

    def make(self) -> Workflow:
        """The workflow. Raises: ConfigError if a function of the user's cannot be loaded."""
        return self.make_hiding(())

    def make_hiding(self, private: tuple[Path, ...]) -> Workflow:
        """The workflow, whose program must not see the files and folders of `private`."""
        from astraflow.addons.agents.agent import agent, function_run
        from astraflow.addons.agents.program import program_agent

        parser = load_parser(self.parser)
        if isinstance(self.run, ProgramConfig):
            return program_agent(self.run, parser, private)
        return self.bind(agent, run=function_run(load_function(self.run, "workflow.run")), parser=parser)


class HostedConfig(HostConfig, WorkflowVariant):
    """An environment with a separate Python, such as a task set of `verifiers`, plays the episodes."""

    rewards_itself: ClassVar[bool] = True
    name: Literal["hosted"] = "hosted"
    roles: dict[str, str] = Field(default_factory=dict)
    """Policy of each role of the environment, e.g. `{solver: actor}`; empty: the recipe's policies in order,
    and the last one for all remaining roles."""
    parser: ParserChoice = "auto"
    """How the model writes tool calls: as its chat template prints them (`auto`), the name of a format, or a
    function of your own from a text to calls."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each role to a policy. Without `roles`, the roles aren't known here, only in the host."""
        return {
            f"roles.{role}": name for role, name in (self.roles or {name: name for name in names}).items()
        }

    @property
    def call_parser(self) -> ParserChoice:
        """See `WorkflowVariant.call_parser`."""
        return self.parser

    @property
    def commands(self) -> tuple[str, ...]:
        """The host's Python, and what it serves."""
        return (f"{self.python} {self.serve}",)

    def make(self) -> Workflow:
        """The workflow. Raises: ConfigError if the Python of the host does not exist."""
        from astraflow.addons.agents.hosted import HostedWorkflow

        self.interpreter()
        return HostedWorkflow(self, load_parser(self.parser))
