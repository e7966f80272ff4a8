"""The workflows `agent` and `hosted` in a recipe."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from astraflow.addons.agents.hosts.config import HostConfig
from astraflow.config import Config, Use
from astraflow.user_input.text_forms import Variable
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.variant import ParserChoice, WorkflowVariant, load_function, load_parser

__all__ = ["AgentConfig", "HostedConfig", "ProgramConfig", "ProgramSandboxConfig"]


class ProgramSandboxConfig(Config):
    """What the sandbox of an agent program shows and allows."""

    backend: Literal["auto", "bubblewrap", "namespaces"] = "auto"
    """What makes the boxes: `bubblewrap` (the program `bwrap`), `namespaces` (calls of the kernel alone), or
    `auto`: the first of these that works here."""
    visible: tuple[str, ...] = ()
    """Files and folders that the program can read besides, e.g. `[./data]`. It sees those of the system, its
    interpreter with the virtual environment, and the folder of the script that `command` names."""
    memory_mb: int = Field(default=4096, ge=64, le=1 << 20)
    """Memory that each of its processes may ask for, in MiB of addresses."""
    disk_mb: int = Field(default=256, ge=1, le=1 << 16)
    """What it may write to /tmp, the only folder for that, in MiB. It is held in memory."""
    output_mb: int = Field(default=16, ge=1, le=256)
    """What it may print to each of its outputs, in MiB; a program that prints more is ended and fails."""
    num_processes: int = Field(default=128, ge=1, le=4096)
    """Processes and threads that it may have at a time."""


class ProgramConfig(Config):
    """A program that is started for each episode."""

    name: Literal["program"] = "program"
    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, e.g. `[python, my_agent.py]`; it is started in the folder in which the rollout
    service was started."""
    model: str = ""
    """Policy that `ASTRAFLOW_MODEL` names; empty: the recipe's first policy."""
    timeout_s: float = Field(default=240.0, gt=0)
    """Seconds after which the program is killed, with all processes that it started, and its episode
    fails."""
    box: Literal["sandbox", "required", "preferred", "none"] = "preferred"
    """What the program can reach. `sandbox`: its own files, its interpreter and the policies, and nothing
    else of the machine; `required`: the machine, without the run's secrets and the keys of other episodes;
    `preferred`: the same, but on a machine that cannot make such a box, it runs without one, with a warning
    and the metric `unboxed`; `none`: all that the service can. On a machine that cannot do it, `sandbox` and
    `required` refuse to run."""
    sandbox: ProgramSandboxConfig = ProgramSandboxConfig()
    """What the sandbox shows and allows; for `box: sandbox`."""
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
    parser: ParserChoice = "tagged"
    """How the model writes tool calls: JSON in `<tool_call>` tags (Hermes, Qwen), bare JSON (Llama 3), or a
    function of your own from a text to calls."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each model to a policy: the program may ask any policy of the recipe."""
        acting: dict[str, str] = {}
        if isinstance(self.run, ProgramConfig) and self.run.model:
            acting["run.model"] = self.run.model
        for name in names:
            acting[f"model {name}"] = name
        return acting

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
    """An environment in a Python of its own, such as a task set of `verifiers`, plays the episodes."""

    rewards_itself: ClassVar[bool] = True
    name: Literal["hosted"] = "hosted"
    roles: dict[str, str] = Field(default_factory=dict)
    """Policy of each role of the environment, e.g. `{solver: actor}`; empty: the recipe's policies in their
    order, and its last one for all roles that are left."""
    parser: ParserChoice = "tagged"
    """How the model writes tool calls: JSON in `<tool_call>` tags (Hermes, Qwen), bare JSON (Llama 3), or a
    function of your own from a text to calls."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each role to a policy. Which roles there are without `roles`, only the host knows."""
        return {
            f"roles.{role}": name for role, name in (self.roles or {name: name for name in names}).items()
        }

    @property
    def commands(self) -> tuple[str, ...]:
        """What the host serves, with the Python that imports it."""
        return (f"{self.python} {self.serve}",)

    def make(self) -> Workflow:
        """The workflow. Raises: ConfigError if the Python of the host does not exist."""
        from astraflow.addons.agents.hosted import Hosted

        self.interpreter()
        return Hosted(self, load_parser(self.parser))
