"""The `workflow` section of a recipe: how policies and a task talk.

Each workflow has a config whose fields are the keyword arguments of its function. Those of add-ons and of
other packages are found by their entry points.
"""

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from astraflow.config import Use, with_installed
from astraflow.errors import ConfigError
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.environment import environment
from astraflow.workflows.multi_turn import FEEDBACK, multi_turn
from astraflow.workflows.single_turn import single_turn
from astraflow.workflows.solve_and_check import CHECK_PROMPT, solve_and_check
from astraflow.workflows.solve_and_verify import RETRY_PROMPT, VERIFY_PROMPT, solve_and_verify
from astraflow.workflows.tool_process import ToolProcesses
from astraflow.workflows.tool_use import tool_use
from astraflow.workflows.tools import Tool, make_tool
from astraflow.workflows.variant import (
    ParserChoice,
    PolicyRoles,
    Share,
    WorkflowVariant,
    check_differ,
    load_function,
    load_parser,
    template,
)

__all__ = [
    "EnvironmentWorkflowConfig",
    "MultiTurnConfig",
    "SingleTurnConfig",
    "SolveAndCheckConfig",
    "SolveAndVerifyConfig",
    "ToolConfig",
    "ToolUseConfig",
    "WorkflowConfig",
]


class SingleTurnConfig(PolicyRoles):
    """One prompt, one completion, one score."""

    is_replayable: ClassVar[bool] = True
    name: Literal["single_turn"] = "single_turn"
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""

    def make(self) -> Workflow:
        """The workflow."""
        return self.bound(single_turn)


class MultiTurnConfig(PolicyRoles):
    """A wrong answer gets feedback and another try in the same conversation."""

    is_replayable: ClassVar[bool] = True
    name: Literal["multi_turn"] = "multi_turn"
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""
    turns: int = Field(default=3, ge=1)
    """Largest number of answers per episode."""
    feedback: Annotated[str, template("score")] = FEEDBACK
    """What the model is told after a wrong answer; `{score}` is the score of that answer."""
    rewards_each_turn: bool = False
    """Reward each turn with its own score, instead of the whole conversation with the last score."""

    def make(self) -> Workflow:
        """The workflow."""
        return self.bound(multi_turn)


class EnvironmentWorkflowConfig(PolicyRoles):
    """The policy replies to the environment of the task until it is done; each turn has its own reward."""

    name: Literal["environment"] = "environment"
    policy: str = ""
    """Policy that replies; empty: the recipe's first policy."""
    max_turns: int = Field(default=16, ge=1)
    """Largest number of replies per episode."""

    def make(self) -> Workflow:
        """The workflow."""
        return self.bound(environment)


class ToolConfig(Use):
    """A function that a model may call. Example: `{use: "my_tools:search", args: {index: ./papers}}`."""

    processes: int = Field(default=0, ge=0, le=256)
    """Number of processes of the rollout service in which calls run, each of which is killed when a call
    takes longer than `call_timeout_s`; 0: calls run in threads of the service, which nothing can kill."""

    def make(self, where: str) -> Tool:
        """The tool. Raises: ConfigError, naming its place in the recipe, if it cannot be loaded."""
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
    """Plain functions with annotated parameters and a docstring; parameters that `args` sets are not shown to
    the model, nor one annotated `ToolContext`, which tells the tool its task and its episode."""
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""
    parser: ParserChoice = "tagged"
    """How calls are written: JSON in `<tool_call>` tags (Hermes, Qwen), bare JSON (Llama 3), or a function of
    your own from a text to calls."""
    max_calls: int = Field(default=8, ge=1)
    """Largest number of calls per episode."""
    call_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which a call is given up, or killed if it runs in a process; the model is told."""
    max_result_chars: int = Field(default=4096, ge=1)
    """Largest number of characters of a result that the model is shown."""
    error_cost: float = Field(default=0.0, ge=0)
    """Subtracted from the reward per call that failed."""

    def make(self) -> Workflow:
        """The workflow. Raises: ConfigError if a tool or the parser cannot be loaded."""
        tools = tuple(tool.make(f"workflow.tools.{idx}") for idx, tool in enumerate(self.tools))
        names = [tool.spec.name for tool in tools]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ConfigError(
                f"workflow.tools: two tools are named {min(repeated)!r}; a call could mean either"
            )
        return self.bound(tool_use, tools=tools, parser=load_parser(self.parser))


class SolveAndVerifyConfig(PolicyRoles):
    """A verifier approves or rejects an answer; a rejected task is solved again with the critique."""

    roles: ClassVar[tuple[str, ...]] = ("solver", "verifier")
    is_replayable: ClassVar[bool] = True
    name: Literal["solve_and_verify"] = "solve_and_verify"
    solver: str = ""
    """Policy that solves; empty: the recipe's first policy."""
    verifier: str = ""
    """Policy that verifies; empty: the recipe's second policy."""
    rounds: int = Field(default=2, ge=1)
    """Largest number of attempts."""
    verify_prompt: Annotated[str, template("prompt", "answer")] = VERIFY_PROMPT
    """Prompt of the verifier, with `{prompt}` and `{answer}`."""
    retry_prompt: Annotated[str, template("prompt", "answer", "critique")] = RETRY_PROMPT
    """Prompt of the solver after a rejection, with `{prompt}`, `{answer}` and `{critique}`."""
    approve: str = Field(default="yes", min_length=1)
    """Text that approves; if both this and `reject` occur, the last one counts."""
    reject: str = Field(default="no", min_length=1)
    """Text that rejects."""
    keeps_history: bool = True
    """Keep one growing conversation; if false, each attempt starts a new one."""
    splits_verdicts: bool = False
    """Record the verifier as `verifier_of_right` or `verifier_of_wrong`, depending on the answer that it
    judges, for credit `role_balanced`."""
    team_share: Share = 0.0
    """Share of the episode's score in each reward: 0 is individual, 1 is shared."""

    @model_validator(mode="after")
    def _choices_differ(self) -> "SolveAndVerifyConfig":
        check_differ(self.approve, self.reject)
        return self

    def make(self) -> Workflow:
        """The workflow."""
        return self.bound(solve_and_verify)


class SolveAndCheckConfig(PolicyRoles):
    """A checker reads the solver's answer and gives the final answer itself."""

    roles: ClassVar[tuple[str, ...]] = ("solver", "checker")
    is_replayable: ClassVar[bool] = True
    name: Literal["solve_and_check"] = "solve_and_check"
    solver: str = ""
    """Policy that solves; empty: the recipe's first policy."""
    checker: str = ""
    """Policy that checks; empty: the recipe's second policy."""
    check_prompt: Annotated[str, template("prompt", "answer")] = CHECK_PROMPT
    """Prompt of the checker, with `{prompt}` and `{answer}`."""
    team_share: Share = 0.0
    """Share of the final answer's score in the solver's reward."""

    def make(self) -> Workflow:
        """The workflow."""
        return self.bound(solve_and_check)


WorkflowConfig = (
    SingleTurnConfig
    | MultiTurnConfig
    | EnvironmentWorkflowConfig
    | ToolUseConfig
    | SolveAndVerifyConfig
    | SolveAndCheckConfig
    | WorkflowVariant
    | Use
)
if not TYPE_CHECKING:  # a type checker cannot know which workflows are installed
    WorkflowConfig = with_installed(WorkflowConfig, "astraflow.workflows")
