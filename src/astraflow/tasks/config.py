"""The `tasks` section of a recipe: task sources, environments and rewards."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self, Union, get_args

from pydantic import AfterValidator, Field, model_validator

from astraflow.config import Config, Name, Use, with_installed
from astraflow.errors import ConfigError
from astraflow.tasks.variants import JudgeVariant, RewardVariant, RowsConfig, SourceVariant
from astraflow.user_input.mistakes import hint

__all__ = [
    "EnvironmentConfig",
    "EnvironmentSourceConfig",
    "ExactReward",
    "ExtractMode",
    "FormatReward",
    "JsonlSourceConfig",
    "Pattern",
    "RewardConfig",
    "SingleRewardConfig",
    "SourceReward",
    "TaskSourceConfig",
    "TasksConfig",
    "TrlReward",
    "VerlReward",
    "WeightedReward",
    "judges_of",
]


_MAX_REWARDS = 64
"""Parts of a weighted reward; each is a metric of every episode."""
ExtractMode = Literal["whole", "last_line", "after_equals", "answer_tag", "boxed"]


def _check_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as err:
        raise ValueError(f"{value!r} is not a regular expression: {err}") from err
    return value


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A regular expression."""
_PartName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
_Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


class JsonlSourceConfig(RowsConfig):
    """A JSONL file with one task per line."""

    name: Literal["jsonl"] = "jsonl"
    path: str
    """Path of the file, relative to the folder that the command runs in."""

    def row_place(self, idx: int) -> str:
        """Describes where row number `idx`, from 0, is: `tasks.jsonl, line 3`."""
        return f"{self.path}, line {idx + 1}"


class EnvironmentSourceConfig(Config):
    """The tasks of one of `tasks.environments`."""

    name: Literal["environment"] = "environment"
    environment: str = ""
    """Name of the environment; empty: the only one."""
    split: str = "train"
    """Which of its tasks to use; the environment says which splits it has."""

    def choose_environment(self, environments: Mapping[str, object]) -> str:
        """Returns the name of the environment to use. Raises: ConfigError if the recipe lacks it."""
        name = self.environment
        if not environments:
            raise ConfigError("the recipe has no environments; add one under tasks.environments")
        if not name and len(environments) == 1:
            return next(iter(environments))
        if name not in environments:
            given = f"environment = {name!r} is not one" if name else "`environment` is empty; name one"
            raise ConfigError(f"{given} of tasks.environments{hint(name, list(environments))}")
        return name


TaskSourceConfig = JsonlSourceConfig | EnvironmentSourceConfig | SourceVariant | Use
if not TYPE_CHECKING:  # which sources are installed is known only at run time
    TaskSourceConfig = with_installed(TaskSourceConfig, "astraflow.sources")


class EnvironmentConfig(Use):
    """An environment of your own: its tasks, their scoring and, if it is interactive, its replies."""

    call_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a call of `reset`, `step` or `end` fails its episode."""
    open_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds after which an environment that does not open fails the rollout service."""


class SourceReward(Config):
    """Uses the scorer that comes with a task: that of its environment or of its source. A task that is only a
    prompt and an answer is scored by `math_verify`."""

    name: Literal["source"] = "source"
    allow: tuple[str, ...] = ()
    """Data sets of the sources whose scorers may run a completion as Python outside the sandbox."""


class ExactReward(Config):
    """1 if the stripped text equals the task's answer; else 0."""

    name: Literal["exact"] = "exact"


class FormatReward(Config):
    """1 if the whole completion matches a pattern, else `otherwise`. As one of `factors` of a weighted reward
    it multiplies the others."""

    name: Literal["format"] = "format"
    pattern: Pattern
    """Regular expression for the whole completion; `.` also matches line breaks."""
    otherwise: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Value of a completion that does not match."""


class TrlReward(Use):
    """A reward function in the form of TRL: `def reward(completions, **columns)` returns a list of numbers.
    It gets whole completions."""

    name: Literal["trl"] = "trl"  # pyright: ignore[reportIncompatibleVariableOverride] - another variant


class VerlReward(Use):
    """A reward function in the form of verl: `def compute_score(data_source, solution_str, ground_truth,
    extra_info)` returns a number, or a mapping with `score`. It gets whole completions."""

    name: Literal["verl"] = "verl"  # pyright: ignore[reportIncompatibleVariableOverride] - another variant


SingleRewardConfig = SourceReward | ExactReward | FormatReward | TrlReward | VerlReward | RewardVariant | Use
if not TYPE_CHECKING:
    SingleRewardConfig = with_installed(SingleRewardConfig, "astraflow.rewards")


class WeightedReward(Config):
    """The sum of several rewards, each times its weight. Each one alone is the metric `reward/NAME`."""

    name: Literal["weighted"] = "weighted"
    rewards: dict[_PartName, SingleRewardConfig] = Field(min_length=1, max_length=_MAX_REWARDS)
    """Named rewards."""
    weights: dict[str, _Weight] = Field(default_factory=dict)
    """Weight of each reward by its name; 1 for a reward that is not named here."""
    factors: tuple[str, ...] = ()
    """Names of rewards that are not added, but multiply the sum of the others, e.g. a `format` reward."""

    @model_validator(mode="after")
    def _names_are_of_rewards(self) -> Self:
        for key, names in (("weights", self.weights), ("factors", self.factors)):
            for name in names:
                if name not in self.rewards:
                    raise ValueError(f"{key}: {name!r} is not a reward (rewards: {', '.join(self.rewards)})")
        if both := [name for name in self.factors if name in self.weights]:
            raise ValueError(
                f"weights: {both[0]!r} is one of `factors`, which have no weight; remove it from one of them"
            )
        if judges := [name for name in self.factors if isinstance(self.rewards[name], JudgeVariant)]:
            raise ValueError(f"factors: {judges[0]!r} is a judge, which can only be added")
        if not set(self.rewards) - set(self.factors):
            raise ValueError("factors: all rewards are factors; leave at least one for them to multiply")
        return self

    def weight(self, name: str) -> float:
        """The weight of a reward."""
        return self.weights.get(name, 1.0)


if TYPE_CHECKING:
    RewardConfig = SingleRewardConfig | WeightedReward
else:
    # One flat union: `with_installed` returns Annotated[Union[...], ...], whose members have to be merged for
    # the discriminator.
    RewardConfig = Annotated[
        Union[(*get_args(get_args(SingleRewardConfig)[0]), WeightedReward)], Field(discriminator="name")
    ]


class TasksConfig(Config):
    """The tasks that are trained on, and how they are scored."""

    sources: dict[Name, TaskSourceConfig] = Field(min_length=1)
    """Named task sources; tasks are drawn from them in proportion to their sizes."""
    environments: dict[Name, EnvironmentConfig] = Field(default_factory=dict)
    """Named environments; each rollout service opens them once, and sources and evaluation sets take their
    tasks from them."""
    reward: RewardConfig = SourceReward()
    """Scores a completion."""
    score_timeout_s: float = Field(default=60.0, gt=0)
    """Hard deadline of one scoring call, in seconds. After it, the scoring process is ended, and the episode
    is tried again."""
    async_calls: int = Field(default=32, ge=1, le=1024)
    """Largest number of calls that one scoring process runs at a time if the reward is `async`."""
    extract: ExtractMode = "whole"
    """Which part of the reply (the completion without its reasoning) is scored as the answer. With `whole`,
    your own rewards get the reasoning too."""
    format: Pattern = ""
    """Regular expression that the whole completion should match (`.` also matches line breaks); empty:
    none."""
    format_weight: float = Field(default=0.1, ge=0, le=1)
    """Share of `format` in the score: (1 - weight) * reward + weight * matches."""

    @model_validator(mode="after")
    def _sources_have_environments(self) -> Self:
        for name, source in self.sources.items():
            if isinstance(source, EnvironmentSourceConfig):
                try:
                    source.choose_environment(self.environments)
                except ConfigError as err:
                    raise ValueError(f"sources.{name}: {err}") from err
        return self


def judges_of(tasks: TasksConfig) -> dict[str, JudgeVariant]:
    """The judges in a reward, by name. A reward that isn't part of a sum has an empty name."""
    reward = tasks.reward
    parts = reward.rewards if isinstance(reward, WeightedReward) else {"": reward}
    return {name: part for name, part in parts.items() if isinstance(part, JudgeVariant)}
