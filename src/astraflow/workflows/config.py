"""The workflow of a recipe: how policies and a task talk.

Each pattern has a config whose fields are its function's keyword arguments. A role that names no policy is
played by the recipe's policy at the role's place, or by its last one, so that one policy can play all roles.
"""

import string
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from astraflow.config import Config, Use
from astraflow.workflows.debate import DEBATE_PROMPT, seats
from astraflow.workflows.multi_turn import FEEDBACK
from astraflow.workflows.plan_and_solve import FOLLOW_PROMPT, PLAN_PROMPT
from astraflow.workflows.propose_and_select import SELECT_PROMPT
from astraflow.workflows.roles import name_at
from astraflow.workflows.route import ROUTE_PROMPT
from astraflow.workflows.solve_and_check import CHECK_PROMPT
from astraflow.workflows.solve_and_verify import RETRY_PROMPT, VERIFY_PROMPT
from astraflow.workflows.spawn import RESULTS_PROMPT, SPLIT_PROMPT

__all__ = [
    "AgentConfig",
    "DebateConfig",
    "MultiTurnConfig",
    "PacedConfig",
    "PlanAndSolveConfig",
    "PolicyRoles",
    "ProgramConfig",
    "ProposeAndSelectConfig",
    "RouteConfig",
    "SingleTurnConfig",
    "SolveAndCheckConfig",
    "SolveAndVerifyConfig",
    "SpawnConfig",
    "ToolUseConfig",
    "WorkflowConfig",
]

Share = Annotated[float, Field(ge=0, le=1)]


def _template(*names: str) -> AfterValidator:
    """A text in which {NAME} stands for each of `names`; a brace of its own is written twice."""

    def check(text: str) -> str:
        try:
            used = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        except ValueError as err:
            raise ValueError(f"{err}; a brace that stands for itself is written twice") from err
        unknown = used - set(names)
        if unknown:
            choices = ", ".join(f"{{{name}}}" for name in names)
            raise ValueError(f"{{{min(unknown)}}} is nothing to put in here (choices: {choices})")
        return text

    return AfterValidator(check)


def _check_differ(first: str, second: str) -> None:
    if first.lower() == second.lower():
        raise ValueError(f"{first!r} stands for both choices; give each a text of its own")


class PolicyRoles(Config):
    """Base of the patterns: which policy plays which role."""

    roles: ClassVar[tuple[str, ...]] = ("policy",)
    """Fields that name policies, by their places."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Role -> policy, where the recipe's policies are `names`."""
        return {role: name_at(names, getattr(self, role), place) for place, role in enumerate(self.roles)}


class SingleTurnConfig(PolicyRoles):
    """One prompt, one completion, one score."""

    name: Literal["single_turn"] = "single_turn"
    policy: str = ""
    """Which policy answers; empty for the recipe's first."""


class MultiTurnConfig(PolicyRoles):
    """A wrong answer gets feedback and another try, in the same conversation."""

    name: Literal["multi_turn"] = "multi_turn"
    policy: str = ""
    """Which policy answers; empty for the recipe's first."""
    turns: int = Field(default=3, ge=1)
    """Most answers in an episode."""
    feedback: Annotated[str, _template("score")] = FEEDBACK
    """What a wrong answer is told; `{score}` is its score."""
    rewards_each_turn: bool = False
    """Reward each turn with its own score instead of the conversation with the last one."""


class ToolUseConfig(PolicyRoles):
    """A model calls functions, shown by its own chat template, until it answers."""

    name: Literal["tool_use"] = "tool_use"
    tools: tuple[Use, ...] = Field(min_length=1)
    """Plain functions with annotated parameters and a docstring; `args` are bound and not shown."""
    policy: str = ""
    """Which policy answers; empty for the recipe's first."""
    parser: Literal["tagged", "bare_json"] | Use = "tagged"
    """How calls are written: JSON in `<tool_call>` tags (Hermes, Qwen), bare JSON (Llama 3), or a function of
    your own from a text to calls."""
    max_calls: int = Field(default=8, ge=1)
    """Most calls in an episode."""
    call_timeout_s: float = Field(default=10.0, gt=0)
    """After this long the model is told that the call took too long."""
    max_result_chars: int = Field(default=4096, ge=1)
    """Characters of a result that the model is told."""
    error_cost: float = Field(default=0.0, ge=0)
    """Taken off the reward for each call that could not be done."""


class SolveAndVerifyConfig(PolicyRoles):
    """A verifier approves or rejects; what is rejected is solved again with the critique."""

    roles: ClassVar[tuple[str, ...]] = ("solver", "verifier")
    name: Literal["solve_and_verify"] = "solve_and_verify"
    solver: str = ""
    """Empty for the recipe's first policy."""
    verifier: str = ""
    """Empty for the recipe's second policy."""
    rounds: int = Field(default=2, ge=1)
    """Most attempts."""
    verify_prompt: Annotated[str, _template("prompt", "answer")] = VERIFY_PROMPT
    """What the verifier is asked; `{prompt}`, `{answer}`."""
    retry_prompt: Annotated[str, _template("prompt", "answer", "critique")] = RETRY_PROMPT
    """What the solver is told after a rejection; `{prompt}`, `{answer}`, `{critique}`."""
    approve: str = Field(default="yes", min_length=1)
    """The text that approves; of this and `reject`, the one that comes last counts."""
    reject: str = Field(default="no", min_length=1)
    """The text that rejects."""
    keeps_history: bool = True
    """One growing conversation; false starts a new one for each attempt."""
    splits_verdicts: bool = False
    """Record the verifier as `verifier_of_right` or `verifier_of_wrong`, by the answer that it judges, for
    credit `role_balanced`."""
    team_share: Share = 0.0
    """Part of each reward that is the episode's score: 0 individual, 1 shared, between mixed."""

    @model_validator(mode="after")
    def _choices_differ(self) -> "SolveAndVerifyConfig":
        _check_differ(self.approve, self.reject)
        return self


class SolveAndCheckConfig(PolicyRoles):
    """A checker reads the solver's answer and gives the final answer itself."""

    roles: ClassVar[tuple[str, ...]] = ("solver", "checker")
    name: Literal["solve_and_check"] = "solve_and_check"
    solver: str = ""
    """Empty for the recipe's first policy."""
    checker: str = ""
    """Empty for the recipe's second policy."""
    check_prompt: Annotated[str, _template("prompt", "answer")] = CHECK_PROMPT
    """What the checker is asked; `{prompt}`, `{answer}`."""
    team_share: Share = 0.0
    """Part of the solver's reward that is the final answer's score."""


class PlanAndSolveConfig(PolicyRoles):
    """A planner writes a plan, solvers follow it."""

    roles: ClassVar[tuple[str, ...]] = ("planner", "solver")
    name: Literal["plan_and_solve"] = "plan_and_solve"
    planner: str = ""
    """Empty for the recipe's first policy."""
    solver: str = ""
    """Empty for the recipe's second policy."""
    num_solvers: int = Field(default=1, ge=1)
    """Answers that follow the plan, in parallel."""
    plan_prompt: Annotated[str, _template("prompt")] = PLAN_PROMPT
    """What the planner is asked; `{prompt}`."""
    follow_prompt: Annotated[str, _template("prompt", "plan")] = FOLLOW_PROMPT
    """What a solver is asked; `{prompt}`, `{plan}`."""
    team_share: Share = 0.0
    """Part of a solver's reward that is the mean over the solvers."""


class ProposeAndSelectConfig(PolicyRoles):
    """Several proposals in parallel, and a selector that picks one."""

    roles: ClassVar[tuple[str, ...]] = ("proposer", "selector")
    name: Literal["propose_and_select"] = "propose_and_select"
    proposer: str = ""
    """Empty for the recipe's first policy."""
    selector: str = ""
    """Empty for the recipe's second policy."""
    num_proposals: int = Field(default=4, ge=2)
    """Answers to choose from."""
    select_prompt: Annotated[str, _template("prompt", "proposals", "count")] = SELECT_PROMPT
    """What the selector is asked; `{prompt}`, `{proposals}` (numbered from 1), `{count}`."""
    team_share: Share = 0.0
    """Part of a proposal's reward that is the picked one's score."""


class RouteConfig(PolicyRoles):
    """A router sends each task to a small or to a large model."""

    roles: ClassVar[tuple[str, ...]] = ("router", "small", "large")
    name: Literal["route"] = "route"
    router: str = ""
    """Empty for the recipe's first policy."""
    small: str = ""
    """Empty for the recipe's second policy."""
    large: str = ""
    """Empty for the recipe's third policy."""
    large_cost: float = Field(default=0.2, ge=0)
    """Taken off the router's reward when the large model is asked."""
    route_prompt: Annotated[str, _template("prompt")] = ROUTE_PROMPT
    """What the router is asked; `{prompt}`."""
    small_choice: str = Field(default="small", min_length=1)
    """The text that asks the small model; of this and `large_choice`, the one that comes last counts."""
    large_choice: str = Field(default="large", min_length=1)
    """The text that asks the large model."""

    @model_validator(mode="after")
    def _choices_differ(self) -> "RouteConfig":
        _check_differ(self.small_choice, self.large_choice)
        return self


class DebateConfig(PolicyRoles):
    """Several debaters answer, read each other, answer again, and vote."""

    name: Literal["debate"] = "debate"
    debaters: tuple[str, ...] = ()
    """Policies that take the seats in turn; empty for all of the recipe's."""
    num_debaters: int = Field(default=2, ge=2)
    """Seats."""
    rounds: int = Field(default=2, ge=1)
    """Answers of each debater."""
    debate_prompt: Annotated[str, _template("prompt", "answers")] = DEBATE_PROMPT
    """What starts a further round; `{prompt}`, `{answers}` of the others."""
    team_share: Share = 0.0
    """Part of each reward that is the score of the vote."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Seat -> policy."""
        seated = seats(names, self.debaters, self.num_debaters)
        return {f"debaters.{idx}": name for idx, name in enumerate(seated)}


class SpawnConfig(PolicyRoles):
    """An agent that may split its problem and start sub-agents in parallel, down to a depth."""

    roles: ClassVar[tuple[str, ...]] = ("agent", "helper")
    name: Literal["spawn"] = "spawn"
    agent: str = ""
    """Empty for the recipe's first policy."""
    helper: str = ""
    """Who solves the parts; empty for the recipe's second policy."""
    depth: int = Field(default=1, ge=1)
    """Levels of helpers."""
    max_parts: int = Field(default=4, ge=1)
    """Most helpers of one agent."""
    max_helpers: int = Field(default=16, ge=1)
    """Most helpers in an episode."""
    helper_cost: float = Field(default=0.0, ge=0)
    """Taken off the root agent's reward for each helper."""
    split_prompt: Annotated[str, _template("prompt")] = SPLIT_PROMPT
    """What an agent that may split is asked; `{prompt}`. Parts stand between `<task>` and `</task>`."""
    results_prompt: Annotated[str, _template("prompt", "results")] = RESULTS_PROMPT
    """What it is told when its parts are done; `{prompt}`, `{results}`."""


class PacedConfig(PolicyRoles):
    """For benchmarks: every policy speaks in turn, and an environment takes an emulated time to answer."""

    name: Literal["paced"] = "paced"
    turns: int = Field(default=1, ge=1)
    """Completions of each policy."""
    env_s: float = Field(default=0.0, ge=0)
    """Median of the environment's time after a completion, in emulated seconds; log-normal."""
    env_sigma: float = Field(default=1.0, ge=0)
    """Of the logarithm of that time."""
    time_scale: float = Field(default=1.0, gt=0)
    """Emulated seconds in a second of the wall clock; the same everywhere in a recipe."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """All of them."""
        return {f"speaker {name}": name for name in names}


class ProgramConfig(Config):
    """A program that is started for each episode."""

    name: Literal["program"] = "program"
    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, started where the rollout service was, e.g. `[python, my_agent.py]`."""
    model: str = ""
    """The policy that `ASTRAFLOW_MODEL` names; empty for the recipe's first."""
    timeout_s: float = Field(default=240.0, gt=0)
    """A program that takes longer is killed, with all that it started, and its episode fails."""
    box: Literal["required", "preferred", "none"] = "preferred"
    """Whether it runs in a box that hides the run's secrets and other episodes' keys. Where the machine has
    none, `preferred` goes without, with a warning and the metric `unboxed`, and `required` refuses."""
    keeps_env: tuple[str, ...] = ()
    """Further variables of the service's environment that the program gets, e.g. the key of a search tool."""

    @field_validator("keeps_env")
    @classmethod
    def _keeps_no_secret_of_the_run(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if own := [name for name in names if name.startswith("ASTRAFLOW_")]:
            raise ValueError(f"{own[0]} is the service's own and goes to no program")
        return names


class AgentConfig(PolicyRoles):
    """An unmodified agent program talks to the policies through an OpenAI-compatible endpoint."""

    name: Literal["agent"] = "agent"
    run: Annotated[ProgramConfig | Use, Field(discriminator="name")]
    """A program, or a function `(task, endpoint)` of your own."""
    parser: Literal["tagged", "bare_json"] | Use = "tagged"
    """How the model writes tool calls: JSON in `<tool_call>` tags (Hermes, Qwen), bare JSON (Llama 3), or a
    function of your own from a text to calls."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Any policy may be asked, as a model."""
        named = (
            {"run.model": self.run.model} if isinstance(self.run, ProgramConfig) and self.run.model else {}
        )
        return {**named, **{f"model {name}": name for name in names}}


WorkflowConfig = Annotated[
    SingleTurnConfig
    | AgentConfig
    | MultiTurnConfig
    | ToolUseConfig
    | SolveAndVerifyConfig
    | SolveAndCheckConfig
    | PlanAndSolveConfig
    | ProposeAndSelectConfig
    | RouteConfig
    | DebateConfig
    | SpawnConfig
    | PacedConfig
    | Use,
    Field(discriminator="name"),
]
