"""The configs of the workflow `tool_use` and of its tools."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from astraflow.addons.tools.tool import Tool, make_tool
from astraflow.addons.tools.tool_process import ToolProcesses
from astraflow.addons.tools.tool_use import tool_use
from astraflow.config import Use
from astraflow.errors import ConfigError, RolloutError
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.roles import name_at
from astraflow.workflows.variant import ParserChoice, PolicyRoles, load_function, load_parser

__all__ = ["ToolConfig", "ToolUseConfig"]


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


class ToolUseConfig(PolicyRoles):
    """The model may call functions, which its own chat template presents to it, until it answers."""

    name: Literal["tool_use"] = "tool_use"
    tools: tuple[ToolConfig, ...] = Field(min_length=1)
    """Plain functions with annotated parameters and a docstring. The model doesn't see parameters that `args`
    sets, or a parameter annotated `ToolContext`, which tells the tool its task and episode."""
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

    def make(self) -> Workflow:
        """Makes the workflow. Raises: ConfigError if a tool or the parser can't be loaded."""
        tools = self._make_tools()
        names = [tool.spec.name for tool in tools]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ConfigError(
                f"workflow.tools: two tools are named {min(repeated)!r}, so a call could mean either; rename "
                "one of the functions"
            )
        return self.bind(tool_use, tools=tools, parser=load_parser(self.parser))

    def check_templates(self, models: Mapping[str, tuple[Path, Mapping[str, Any], str]]) -> None:
        """Checks that the model's chat template shows the tools. Raises: ConfigError."""
        name = name_at(tuple(models), self.policy, 0)
        if name not in models:
            return  # the check of the roles reports it
        from astraflow.rollout.renderer import load_renderer  # here, because it is heavy

        folder, args, choice = models[name]
        specs = [tool.spec for tool in self._make_tools()]
        try:
            load_renderer(folder, args, choice=choice).with_tools(specs)
        except RolloutError as err:
            raise ConfigError(f"policies.{name}.model = {str(folder)!r}: {err}") from err

    def _make_tools(self) -> tuple[Tool, ...]:
        return tuple(tool.make(f"workflow.tools.{idx}") for idx, tool in enumerate(self.tools))
