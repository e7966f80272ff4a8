"""The `workflow` section of a recipe: how policies and a task talk.

Each built-in workflow has a config whose fields are the keyword arguments of its function. A role for which
no policy is named is played by the recipe's policy at the role's place, or by the last one if the recipe has
fewer policies. A single policy therefore plays all roles.
"""

import re
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from astraflow.addons.agents.hosts.config import HostConfig
from astraflow.addons.code.code_and_test import CASE_PATTERN, FAILED_PROMPT, TEST_PROMPT
from astraflow.addons.patterns.debate import DEBATE_PROMPT, seats
from astraflow.addons.patterns.plan_and_solve import FOLLOW_PROMPT, PLAN_PROMPT
from astraflow.addons.patterns.propose_and_select import SELECT_PROMPT
from astraflow.addons.patterns.route import ROUTE_PROMPT
from astraflow.addons.patterns.spawn import RESULTS_PROMPT, SPLIT_PROMPT
from astraflow.addons.search.retrieval.config import IndexConfig
from astraflow.addons.search.search import PASSAGE, QUERY_PATTERN, RESULTS
from astraflow.config import Config, Use, with_installed
from astraflow.user_input.text_forms import Variable
from astraflow.workflows.multi_turn import FEEDBACK
from astraflow.workflows.roles import PolicyRoles, WorkflowVariant
from astraflow.workflows.solve_and_check import CHECK_PROMPT
from astraflow.workflows.solve_and_verify import RETRY_PROMPT, VERIFY_PROMPT

__all__ = [
    "AgentConfig",
    "CodeAndTestConfig",
    "DebateConfig",
    "EnvironmentWorkflowConfig",
    "HostedConfig",
    "MultiTurnConfig",
    "PlanAndSolveConfig",
    "ProgramConfig",
    "ProgramSandboxConfig",
    "ProposeAndSelectConfig",
    "RouteConfig",
    "SearchConfig",
    "SingleTurnConfig",
    "SolveAndCheckConfig",
    "SolveAndVerifyConfig",
    "SpawnConfig",
    "ToolConfig",
    "ToolUseConfig",
    "WorkflowConfig",
]

Share = Annotated[float, Field(ge=0, le=1)]


def _template(*names: str) -> AfterValidator:
    """Checks that a text has no placeholders `{NAME}` but those of `names`; a brace as such is doubled."""

    def check(text: str) -> str:
        try:
            used = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        except ValueError as err:
            raise ValueError(f"{err}; a brace that stands for itself is written twice") from err
        unknown = used - set(names)
        if unknown:
            choices = ", ".join(f"{{{name}}}" for name in names)
            raise ValueError(f"{{{min(unknown)}}} is not a placeholder of this text (choices: {choices})")
        return text

    return AfterValidator(check)


def _check_differ(first: str, second: str) -> None:
    """Checks that two choices differ also where upper and lower case do not count, as in verdicts."""
    if first.lower() == second.lower():
        raise ValueError(f"{first!r} stands for both choices; give each a text of its own")


class SingleTurnConfig(PolicyRoles):
    """One prompt, one completion, one score."""

    is_replayable: ClassVar[bool] = True
    name: Literal["single_turn"] = "single_turn"
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""


class MultiTurnConfig(PolicyRoles):
    """A wrong answer gets feedback and another try in the same conversation."""

    is_replayable: ClassVar[bool] = True
    name: Literal["multi_turn"] = "multi_turn"
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""
    turns: int = Field(default=3, ge=1)
    """Largest number of answers per episode."""
    feedback: Annotated[str, _template("score")] = FEEDBACK
    """What the model is told after a wrong answer; `{score}` is the score of that answer."""
    rewards_each_turn: bool = False
    """Reward each turn with its own score, instead of the whole conversation with the last score."""


class EnvironmentWorkflowConfig(PolicyRoles):
    """The policy replies to the environment of the task until it is done; each turn has its own reward."""

    name: Literal["environment"] = "environment"
    policy: str = ""
    """Policy that replies; empty: the recipe's first policy."""
    max_turns: int = Field(default=16, ge=1)
    """Largest number of replies per episode."""


class ToolConfig(Use):
    """A function that a model may call. Example: `{use: "my_tools:search", args: {index: ./papers}}`."""

    processes: int = Field(default=0, ge=0, le=256)
    """Number of processes of the rollout service in which calls run, each of which is killed when a call
    takes longer than `call_timeout_s`; 0: calls run in threads of the service, which nothing can kill."""


class ToolUseConfig(PolicyRoles):
    """The model may call functions, which its own chat template presents to it, until it answers."""

    name: Literal["tool_use"] = "tool_use"
    tools: tuple[ToolConfig, ...] = Field(min_length=1)
    """Plain functions with annotated parameters and a docstring; parameters that `args` sets are not shown to
    the model, nor one annotated `ToolContext`, which tells the tool its task and its episode."""
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""
    parser: Literal["tagged", "bare_json"] | Use = "tagged"
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


def _has_one_group(pattern: str) -> str:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as err:
        raise ValueError(f"{pattern!r} is no regular expression: {err}") from err
    if num_groups < 1:
        raise ValueError(f"{pattern!r} has no group; the query is what its first group matches")
    return pattern


class SearchConfig(PolicyRoles):
    """The policy searches an index, by tags in its text or by tool calls, until it answers."""

    is_replayable: ClassVar[bool] = True
    name: Literal["search"] = "search"
    index: IndexConfig
    """What is searched."""
    policy: str = ""
    """Policy that searches and answers; empty: the recipe's first policy."""
    style: Literal["tags", "tools"] = "tags"
    """How it searches: by text that `query_pattern` finds, or by calls of a tool `search` in `<tool_call>`
    tags, which its chat template shows it."""
    query_pattern: Annotated[str, AfterValidator(_has_one_group)] = QUERY_PATTERN
    """Regular expression whose first group is the query (`.` also matches line breaks). End completions after
    a query by `sampling.stop`, e.g. `["</search>"]`."""
    max_searches: int = Field(default=4, ge=1)
    """Largest number of searches per episode."""
    top_k: int = Field(default=3, ge=1, le=100)
    """Number of documents that a search shows."""
    passage: Annotated[str, _template("number", "title", "text")] = PASSAGE
    """How a document is shown, with `{number}`, `{title}` and `{text}`."""
    results: Annotated[str, _template("results")] = RESULTS
    """What is around the documents of a search, where the style is `tags`."""
    max_passage_chars: int = Field(default=2_000, ge=1)
    """Characters of a document's text that are shown."""
    search_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a search fails its episode."""


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
    verify_prompt: Annotated[str, _template("prompt", "answer")] = VERIFY_PROMPT
    """Prompt of the verifier, with `{prompt}` and `{answer}`."""
    retry_prompt: Annotated[str, _template("prompt", "answer", "critique")] = RETRY_PROMPT
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
        _check_differ(self.approve, self.reject)
        return self


class SolveAndCheckConfig(PolicyRoles):
    """A checker reads the solver's answer and gives the final answer itself."""

    roles: ClassVar[tuple[str, ...]] = ("solver", "checker")
    is_replayable: ClassVar[bool] = True
    name: Literal["solve_and_check"] = "solve_and_check"
    solver: str = ""
    """Policy that solves; empty: the recipe's first policy."""
    checker: str = ""
    """Policy that checks; empty: the recipe's second policy."""
    check_prompt: Annotated[str, _template("prompt", "answer")] = CHECK_PROMPT
    """Prompt of the checker, with `{prompt}` and `{answer}`."""
    team_share: Share = 0.0
    """Share of the final answer's score in the solver's reward."""


def _finds_cases(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as err:
        raise ValueError(f"{pattern!r} is no regular expression: {err}") from err
    if missing := {"input", "output"} - set(groups):
        raise ValueError(f"it has no group (?P<{min(missing)}>...), which holds that part of a test case")
    return pattern


class CodeAndTestConfig(PolicyRoles):
    """A test writer makes test cases for a coder's program; a program that fails one is written again."""

    roles: ClassVar[tuple[str, ...]] = ("coder", "tester")
    is_replayable: ClassVar[bool] = True
    name: Literal["code_and_test"] = "code_and_test"
    coder: str = ""
    """Policy that writes programs; empty: the recipe's first policy."""
    tester: str = ""
    """Policy that writes test cases; empty: the recipe's second policy."""
    rounds: int = Field(default=2, ge=1)
    """Largest number of programs."""
    test_prompt: Annotated[str, _template("prompt", "code")] = TEST_PROMPT
    """Prompt of the tester, with `{prompt}` and `{code}`."""
    retry_prompt: Annotated[str, _template("prompt", "code", "input", "output")] = FAILED_PROMPT
    """Prompt of the coder after a failed case, with `{prompt}`, `{code}`, `{input}` and `{output}`."""
    case_pattern: Annotated[str, AfterValidator(_finds_cases)] = CASE_PATTERN
    """Regular expression that finds a case in the tester's reply, with the groups `input` and `output`."""
    max_cases: int = Field(default=4, ge=1, le=64)
    """Largest number of cases that are used; more are ignored."""
    reference: str = ""
    """Column with a right program, which decides whether a case is valid; empty: the task's answer. The
    source's `columns` have to name it."""
    success_share: Share = 0.5
    """Share of the last program's score in the tester's reward; the rest is the valid share of its cases."""
    keeps_history: bool = True
    """Keep one growing conversation with the coder; if false, each program starts a new one."""


class PlanAndSolveConfig(PolicyRoles):
    """A planner writes a plan, and solvers follow it."""

    roles: ClassVar[tuple[str, ...]] = ("planner", "solver")
    is_replayable: ClassVar[bool] = True
    name: Literal["plan_and_solve"] = "plan_and_solve"
    planner: str = ""
    """Policy that plans; empty: the recipe's first policy."""
    solver: str = ""
    """Policy that solves; empty: the recipe's second policy."""
    num_solvers: int = Field(default=1, ge=1, le=1024)
    """Number of answers that follow the plan, in parallel."""
    plan_prompt: Annotated[str, _template("prompt")] = PLAN_PROMPT
    """Prompt of the planner, with `{prompt}`."""
    follow_prompt: Annotated[str, _template("prompt", "plan")] = FOLLOW_PROMPT
    """Prompt of a solver, with `{prompt}` and `{plan}`."""
    team_share: Share = 0.0
    """Share of the solvers' mean score in a solver's reward."""


class ProposeAndSelectConfig(PolicyRoles):
    """A proposer makes several proposals in parallel, and a selector picks one."""

    roles: ClassVar[tuple[str, ...]] = ("proposer", "selector")
    is_replayable: ClassVar[bool] = True
    name: Literal["propose_and_select"] = "propose_and_select"
    proposer: str = ""
    """Policy that proposes; empty: the recipe's first policy."""
    selector: str = ""
    """Policy that selects; empty: the recipe's second policy."""
    num_proposals: int = Field(default=4, ge=2, le=1024)
    """Number of proposals to choose from."""
    select_prompt: Annotated[str, _template("prompt", "proposals", "count")] = SELECT_PROMPT
    """Prompt of the selector, with `{prompt}`, `{proposals}` (numbered from 1) and `{count}`."""
    team_share: Share = 0.0
    """Share of the picked proposal's score in the reward of each proposal."""


class RouteConfig(PolicyRoles):
    """A router sends each task to a small or to a large model."""

    roles: ClassVar[tuple[str, ...]] = ("router", "small", "large")
    is_replayable: ClassVar[bool] = True
    name: Literal["route"] = "route"
    router: str = ""
    """Policy that routes; empty: the recipe's first policy."""
    small: str = ""
    """The small model; empty: the recipe's second policy."""
    large: str = ""
    """The large model; empty: the recipe's third policy."""
    large_cost: float = Field(default=0.2, ge=0)
    """Subtracted from the router's reward when it chooses the large model."""
    route_prompt: Annotated[str, _template("prompt")] = ROUTE_PROMPT
    """Prompt of the router, with `{prompt}`."""
    small_choice: str = Field(default="small", min_length=1)
    """Text that chooses the small model; if both this and `large_choice` occur, the last one counts."""
    large_choice: str = Field(default="large", min_length=1)
    """Text that chooses the large model."""

    @model_validator(mode="after")
    def _choices_differ(self) -> "RouteConfig":
        _check_differ(self.small_choice, self.large_choice)
        return self


class DebateConfig(PolicyRoles):
    """Several debaters answer, read each other's answers, answer again, and vote."""

    is_replayable: ClassVar[bool] = True
    name: Literal["debate"] = "debate"
    debaters: tuple[str, ...] = ()
    """Policies that take the seats in turn; empty: all policies of the recipe."""
    num_debaters: int = Field(default=2, ge=2, le=1024)
    """Number of seats."""
    rounds: int = Field(default=2, ge=1)
    """Number of answers per debater."""
    debate_prompt: Annotated[str, _template("prompt", "answers")] = DEBATE_PROMPT
    """Prompt of each further round, with `{prompt}` and the other debaters' `{answers}`."""
    team_share: Share = 0.0
    """Share of the vote's score in each reward."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each seat to its policy."""
        seated = seats(names, self.debaters, self.num_debaters)
        return {f"debaters.{idx}": name for idx, name in enumerate(seated)}


class SpawnConfig(PolicyRoles):
    """An agent may split its problem and start sub-agents in parallel, down to a given depth."""

    roles: ClassVar[tuple[str, ...]] = ("agent", "helper")
    is_replayable: ClassVar[bool] = True
    name: Literal["spawn"] = "spawn"
    agent: str = ""
    """Policy that gets the task; empty: the recipe's first policy."""
    helper: str = ""
    """Policy that solves the parts; empty: the recipe's second policy."""
    depth: int = Field(default=1, ge=1, le=64)
    """Number of levels of helpers."""
    max_parts: int = Field(default=4, ge=1, le=1024)
    """Largest number of helpers per agent."""
    max_helpers: int = Field(default=16, ge=1, le=1024)
    """Largest number of helpers per episode."""
    helper_cost: float = Field(default=0.0, ge=0)
    """Subtracted from the root agent's reward per helper."""
    split_prompt: Annotated[str, _template("prompt")] = SPLIT_PROMPT
    """Prompt of an agent that may split, with `{prompt}`; parts stand between `<task>` and `</task>`."""
    results_prompt: Annotated[str, _template("prompt", "results")] = RESULTS_PROMPT
    """Prompt of an agent whose parts are solved, with `{prompt}` and `{results}`."""


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


class AgentConfig(PolicyRoles):
    """An unmodified agent program talks to the policies through an OpenAI-compatible endpoint."""

    name: Literal["agent"] = "agent"
    run: Annotated[ProgramConfig | Use, Field(discriminator="name")]
    """A program, or a function `(task, endpoint)` of your own."""
    parser: Literal["tagged", "bare_json"] | Use = "tagged"
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


class HostedConfig(HostConfig):
    """An environment in a Python of its own, such as a task set of `verifiers`, plays the episodes."""

    name: Literal["hosted"] = "hosted"
    roles: dict[str, str] = Field(default_factory=dict)
    """Policy of each role of the environment, e.g. `{solver: actor}`; empty: the recipe's policies in their
    order, and its last one for all roles that are left."""
    parser: Literal["tagged", "bare_json"] | Use = "tagged"
    """How the model writes tool calls: JSON in `<tool_call>` tags (Hermes, Qwen), bare JSON (Llama 3), or a
    function of your own from a text to calls."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each role to a policy. Which roles there are without `roles`, only the host knows."""
        return {
            f"roles.{role}": name for role, name in (self.roles or {name: name for name in names}).items()
        }


WorkflowConfig = (
    SingleTurnConfig
    | AgentConfig
    | MultiTurnConfig
    | EnvironmentWorkflowConfig
    | HostedConfig
    | ToolUseConfig
    | SearchConfig
    | SolveAndVerifyConfig
    | SolveAndCheckConfig
    | CodeAndTestConfig
    | PlanAndSolveConfig
    | ProposeAndSelectConfig
    | RouteConfig
    | DebateConfig
    | SpawnConfig
    | WorkflowVariant
    | Use
)
if not TYPE_CHECKING:  # a type checker cannot know which workflows are installed
    WorkflowConfig = with_installed(WorkflowConfig, "astraflow.workflows")
