"""The configs of the workflow `tool_use` and of its tools."""

import asyncio
import inspect
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from astraflow.addons.tools.tool import Tool, make_tool
from astraflow.addons.tools.tool_process import ToolProcesses
from astraflow.addons.tools.tool_use import tool_use
from astraflow.config import Argument, Config, Use
from astraflow.errors import ConfigError, RolloutError
from astraflow.types import ToolSpec
from astraflow.user_input.extras import install_command
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.roles import name_at
from astraflow.workflows.variant import ParserChoice, PolicyRoles, load_function, load_parser

if TYPE_CHECKING:
    from astraflow.addons.tools.mcp_tools import McpToolUse

__all__ = ["McpServerConfig", "ToolConfig", "ToolUseConfig"]


class ToolConfig(Use):
    """A function that a model may call. Example: `{use: "my_tools:search", args: {index: ./papers}}`."""

    processes: int = Field(default=0, ge=0, le=256)
    """Number of processes of the rollout service in which calls run. A process is killed if its call takes
    longer than `call_timeout_s`; 0: calls run in threads of the service, which can't be killed."""

    def make(self, where: str) -> Tool:
        """Makes the tool. Raises: ConfigError, which names its place in the recipe, if it can't be loaded."""
        function = load_function(self, where)
        tool = make_tool(function)
        if not self.processes:
            return tool
        if inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{where}: {self.use} is async and is cancelled at its deadline; `processes` is for "
                "functions that block, so leave it out"
            )
        processes = ToolProcesses(self, num=self.processes)
        return replace(tool, function=processes.call, turns=processes.turns)


class McpServerConfig(Config):
    """An MCP server, whose tools the model may call. Example: `{mcp: mcp-server-time}`."""

    name: Literal["mcp"] = "mcp"
    mcp: Argument = Field(min_length=1)
    """A command, such as `mcp-server-time --local-timezone UTC`, or the URL of a server that is running. The
    command is started in the sandbox, where it sees only its own files and has no network."""
    only: tuple[str, ...] = ()
    """Names of the tools that the model may call; empty: all."""
    per: Literal["service", "episode"] = "service"
    """Whether the episodes of a rollout service share a server, or each has its own, with its own state."""
    visible: tuple[str, ...] = ()
    """Further files and folders that the command can read, e.g. `[./data]`."""
    key_variable: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Environment variable of the rollout services with the key for the URL; empty: no key is needed."""

    @property
    def is_remote(self) -> bool:
        """Whether `mcp` is a URL."""
        return self.mcp.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def _has_settings_of_its_kind(self) -> Self:
        if self.is_remote and self.visible:
            raise ValueError("visible is for a command, but mcp is a URL; leave visible out")
        if not self.is_remote and self.key_variable:
            raise ValueError("key_variable is for a URL, but mcp is a command; leave key_variable out")
        try:
            if not shlex.split(self.mcp):
                raise ValueError("it names no program")
        except ValueError as err:
            raise ValueError(f"mcp = {self.mcp!r} is neither a command nor a URL: {err}") from err
        return self


class ToolUseConfig(PolicyRoles):
    """The model may call functions, which its own chat template presents to it, until it answers."""

    name: Literal["tool_use"] = "tool_use"
    tools: tuple[Annotated[ToolConfig | McpServerConfig, Field(discriminator="name")], ...] = Field(
        min_length=1
    )
    """Plain functions with annotated parameters and a docstring, and MCP servers. The model doesn't see
    parameters that `args` sets, or a parameter annotated `ToolContext`, which tells the tool its task and
    episode."""
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""
    parser: ParserChoice = "auto"
    """How the model writes tool calls: as its chat template prints them (`auto`), the name of a format, or a
    function of your own from a text to calls."""
    max_calls: int = Field(default=8, ge=1)
    """Maximum number of calls per episode."""
    call_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which a call is abandoned, or killed if it runs in a process. The model is told."""
    max_result_chars: int = Field(default=4096, ge=1)
    """Maximum number of characters of a result that the model sees."""
    error_cost: float = Field(default=0.0, ge=0)
    """Subtracted from the reward for each failed call."""

    @property
    def call_parser(self) -> ParserChoice:
        """See `WorkflowVariant.call_parser`."""
        return self.parser

    @property
    def servers(self) -> tuple[McpServerConfig, ...]:
        """The MCP servers among the tools."""
        return tuple(tool for tool in self.tools if isinstance(tool, McpServerConfig))

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands of MCP servers, and their URLs with the variables of their keys."""
        return tuple(f"{server.mcp} {server.key_variable}".strip() for server in self.servers)

    @property
    def needs_sandbox(self) -> bool:
        """Whether an MCP server is started in the sandbox."""
        return any(not server.is_remote for server in self.servers)

    def make(self) -> Workflow:
        """Makes the workflow. Raises: ConfigError if a tool or the parser can't be loaded."""
        return self.make_hiding(())

    def make_hiding(self, private: tuple[Path, ...]) -> Workflow:
        """Makes the workflow, whose MCP servers don't see the files and folders of `private`."""
        if self.servers:
            return self._with_servers(private)
        tools = self._own_tools()
        self.check_names([tool.spec for tool in tools])
        return self.bind(tool_use, tools=tools, parser=load_parser(self.parser))

    def check_names(self, specs: Sequence[ToolSpec]) -> None:
        """Checks that the tools have different names. Raises: ConfigError."""
        names = [spec.name for spec in specs]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ConfigError(
                f"workflow.tools: two tools are named {min(repeated)!r}, so a call could mean either; rename "
                "one of the functions, or leave out a server's tool by its key `only`"
            )

    def check_templates(self, models: Mapping[str, tuple[Path, Mapping[str, Any], str]]) -> None:
        """Checks that the model's chat template shows the tools. Raises: ConfigError."""
        name = name_at(tuple(models), self.policy, 0)
        if name not in models:
            return  # the check of the roles reports it
        from astraflow.rollout.renderer import load_renderer  # here, because it is heavy

        folder, args, choice = models[name]
        with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop already
            specs = pool.submit(asyncio.run, self._listed()).result()
        try:
            load_renderer(folder, args, choice=choice).with_tools(specs)
        except RolloutError as err:
            raise ConfigError(f"policies.{name}.model = {str(folder)!r}: {err}") from err

    async def _listed(self) -> list[ToolSpec]:
        """Lists all tools, for which the servers are started."""
        if not self.servers:
            return [tool.spec for tool in self._own_tools()]
        workflow = self._with_servers(())
        try:
            await workflow.open()
            return workflow.specs
        finally:
            await workflow.close()

    def _with_servers(self, private: tuple[Path, ...]) -> "McpToolUse":
        try:
            from astraflow.addons.tools.mcp_tools import McpToolUse  # here: it needs the extra `mcp`
        except ModuleNotFoundError as err:
            raise ConfigError(
                f"workflow.tools: an MCP server needs a package: {install_command('mcp')}"
            ) from err
        return McpToolUse(self, self._own_tools(), private, parser=load_parser(self.parser))

    def _own_tools(self) -> tuple[Tool, ...]:
        places = enumerate(self.tools)
        return tuple(t.make(f"workflow.tools.{i}") for i, t in places if isinstance(t, ToolConfig))
