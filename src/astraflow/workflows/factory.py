"""Makes the function that runs episodes from a recipe's `workflow` section."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from astraflow.addons.agents.agent import agent, function_run
from astraflow.addons.agents.hosted import Hosted
from astraflow.addons.agents.program import ProgramRuns
from astraflow.addons.agents.tool_process import ToolProcesses
from astraflow.addons.code.code_and_test import code_and_test
from astraflow.addons.patterns.debate import debate
from astraflow.addons.patterns.plan_and_solve import plan_and_solve
from astraflow.addons.patterns.propose_and_select import propose_and_select
from astraflow.addons.patterns.route import route
from astraflow.addons.patterns.spawn import spawn
from astraflow.addons.search.retrieval.index import check_index, open_index
from astraflow.addons.search.search import search
from astraflow.config import Use, check_args, load_attr
from astraflow.errors import ConfigError
from astraflow.workflows.calls import CALL_PARSERS
from astraflow.workflows.config import (
    AgentConfig,
    HostedConfig,
    ProgramConfig,
    SearchConfig,
    ToolConfig,
    ToolUseConfig,
    WorkflowConfig,
)
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.environment import environment
from astraflow.workflows.multi_turn import multi_turn
from astraflow.workflows.roles import PolicyRoles, WorkflowVariant
from astraflow.workflows.single_turn import single_turn
from astraflow.workflows.solve_and_check import solve_and_check
from astraflow.workflows.solve_and_verify import solve_and_verify
from astraflow.workflows.tool_use import tool_use
from astraflow.workflows.tools import Tool, make_tool

__all__ = ["WORKFLOWS", "is_replayable", "make_workflow"]

WORKFLOWS: dict[str, Callable[..., Awaitable[Rewards]]] = {
    "agent": agent,
    "code_and_test": code_and_test,
    "debate": debate,
    "environment": environment,
    "multi_turn": multi_turn,
    "plan_and_solve": plan_and_solve,
    "propose_and_select": propose_and_select,
    "route": route,
    "search": search,
    "single_turn": single_turn,
    "solve_and_check": solve_and_check,
    "solve_and_verify": solve_and_verify,
    "spawn": spawn,
    "tool_use": tool_use,
}
"""Built-in workflows by name; a workflow's config has exactly the function's keyword arguments as fields."""


def make_workflow(config: WorkflowConfig, *, private: tuple[Path, ...] = ()) -> Workflow:
    """Binds the workflow's arguments, and loads the user's functions that it names.

    `private`: files and folders that the recipe's agent programs must not see.

    Raises: ConfigError if a function of the user's does not exist, is not async where it must be, or does not
    take the arguments, or if the Python of a host does not exist; DataError if the index of a search is
    missing or broken.
    """
    if isinstance(config, WorkflowVariant):
        return cast("Workflow", config.make())
    if isinstance(config, HostedConfig):
        config.interpreter()
        parser = _parser(config)
        return Hosted(config, CALL_PARSERS[parser] if isinstance(parser, str) else parser)
    if not isinstance(config, Use):
        if isinstance(config, AgentConfig) and isinstance(config.run, ProgramConfig):
            return _program_agent(config.run, _parser(config), private)
        return cast("Workflow", partial(WORKFLOWS[config.name], **_arguments(config)))
    function = load_attr(config.use, where="workflow.use")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"workflow.use = {config.use!r} is not an async function; expected "
            f"`async def {config.use.partition(':')[2]}(task, policies) -> Rewards`"
        )
    check_args(function, config.args, where="workflow.args")
    return cast("Workflow", partial(function, **config.args))


def is_replayable(config: WorkflowConfig) -> bool:
    """Whether the workflow is known to be replayable; one of the user's own is not."""
    return isinstance(config, PolicyRoles) and config.is_replayable


def _arguments(config: PolicyRoles) -> dict[str, Any]:
    """The keyword arguments of a built-in workflow: its config's fields, with functions loaded by name."""
    arguments = {key: getattr(config, key) for key in type(config).model_fields if key != "name"}
    if isinstance(config, AgentConfig):
        assert isinstance(config.run, Use)
        run = function_run(_function(config.run, "workflow.run"))
        return {**arguments, "run": run, "parser": _parser(config)}
    if isinstance(config, SearchConfig):
        check_index(config.index)
        return {**arguments, "index": partial(open_index, config.index)}
    if not isinstance(config, ToolUseConfig):
        return arguments
    tools = tuple(_tool(tool, f"workflow.tools.{idx}") for idx, tool in enumerate(config.tools))
    names = [tool.spec.name for tool in tools]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ConfigError(f"workflow.tools: two tools are named {min(repeated)!r}; a call could mean either")
    return {**arguments, "tools": tools, "parser": _parser(config)}


def _tool(config: ToolConfig, where: str) -> Tool:
    function = _function(config, where)
    made = make_tool(function)
    if not config.processes:
        return made
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{where}: {config.use} is async and is cancelled at its deadline; `processes` is for functions "
            "that block, so leave it out"
        )
    processes = ToolProcesses(config, num=config.processes)
    return replace(made, function=processes.call, turns=processes.turns)


def _parser(config: ToolUseConfig | AgentConfig | HostedConfig) -> str | Callable[..., Any]:
    """The name of a built-in parser of calls, or the user's own parser."""
    parser = config.parser
    return parser if isinstance(parser, str) else _function(parser, "workflow.parser")


def _program_agent(
    config: ProgramConfig, parser: str | Callable[..., Any], private: tuple[Path, ...]
) -> Workflow:
    """The workflow `agent` for a program; the metric `unboxed` counts episodes that ran without a box."""
    runs = ProgramRuns(config, private=private)

    async def workflow(task: ScoredTask, policies: Policies) -> Rewards:
        model = config.model or next(iter(policies))
        rewards = await agent(task, policies, run=partial(runs, model=model), parser=parser)
        if not await runs.is_boxed():
            rewards.add_metric("unboxed", 1.0)
        return rewards

    return workflow


def _function(use: Use, where: str) -> Callable[..., Any]:
    function = load_attr(use.use, where=f"{where}.use")
    if not callable(function):
        raise ConfigError(f"{where}.use = {use.use!r} is not a function")
    check_args(function, use.args, where=f"{where}.args")
    return partial(function, **use.args) if use.args else function
