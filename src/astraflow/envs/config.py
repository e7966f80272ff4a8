"""Task sources, rewards and evaluation sets of a recipe."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from astraflow.config import Config, Use

__all__ = [
    "EvalConfig",
    "EvalSetConfig",
    "ExactReward",
    "HubSourceConfig",
    "JsonlSourceConfig",
    "MathVerifyReward",
    "ReasoningGymConfig",
    "RewardConfig",
    "SourceReward",
    "TaskSourceConfig",
    "TasksConfig",
]


class ReasoningGymConfig(Config):
    """Generated, verifiable tasks of the `reasoning-gym` library."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the data set, e.g. `basic_arithmetic`."""
    size: int = Field(default=10_000, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Different seeds give different tasks, but not disjoint ones: see `split`."""
    split: Literal["all", "train", "heldout"] = "all"
    """Side of the hash of the prompt that tasks are from; `train` and `heldout` never share a prompt."""
    heldout_frac: float = Field(default=0.1, gt=0, lt=1)
    """Share of prompts on the held-out side; the same in training, evaluation and the model's spec."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the data set, e.g. `{min_terms: 3, max_digits: 2}`."""
    system: str = ""
    """A system message before each prompt; empty for none."""


class JsonlSourceConfig(Config):
    """A JSONL file with one task a line."""

    name: Literal["jsonl"] = "jsonl"
    path: str
    """File, relative to the folder that the command runs in."""
    prompt_key: str = "prompt"
    """Key of the prompt in a row."""
    answer_key: str = "answer"
    """Key of the reference answer in a row."""
    system: str = ""
    """A system message before each prompt; empty for none."""


class HubSourceConfig(Config):
    """A Hugging Face data set: a local folder or file, or a name on the hub."""

    name: Literal["datasets"] = "datasets"
    path: str
    """Local path, or name on the hub."""
    subset: str = ""
    """Configuration name; empty for the default."""
    split: str = "train"
    """Which split of the data set."""
    prompt_key: str = "prompt"
    """Key of the prompt in a row."""
    answer_key: str = "answer"
    """Key of the reference answer in a row."""
    system: str = ""
    """A system message before each prompt; empty for none."""


TaskSourceConfig = Annotated[
    ReasoningGymConfig | JsonlSourceConfig | HubSourceConfig | Use, Field(discriminator="name")
]


class SourceReward(Config):
    """The task source's own scorer: reasoning-gym's, or `math_verify` for prompt/answer data."""

    name: Literal["source"] = "source"
    allow: tuple[str, ...] = ()
    """Data sets of reasoning-gym whose scorers run a completion as Python, and are used nevertheless."""


class MathVerifyReward(Config):
    """1 if the final answer of the text is the task's, compared as mathematics by `math-verify`; else 0."""

    name: Literal["math_verify"] = "math_verify"


class ExactReward(Config):
    """1 if the text, stripped, equals the task's answer, else 0."""

    name: Literal["exact"] = "exact"


RewardConfig = Annotated[SourceReward | MathVerifyReward | ExactReward | Use, Field(discriminator="name")]


class TasksConfig(Config):
    """What is trained on and how it is scored."""

    sources: dict[str, TaskSourceConfig] = Field(min_length=1)
    """Named task sources, drawn from in proportion to their size."""
    reward: RewardConfig = SourceReward()
    """What scores a completion."""
    score_timeout_s: float = Field(default=10.0, gt=0)
    """Hard deadline of one scoring call; its process is ended and the episode fails."""
    extract: Literal["whole", "last_line", "after_equals", "answer_tag", "boxed"] = "whole"
    """Which part of the completion is the answer that is scored."""
    format: str = ""
    """Regular expression that the whole completion should match (`.` matches line breaks); empty: none."""
    format_weight: float = Field(default=0.1, ge=0, le=1)
    """With `format`, its share of the score: (1 - weight) * reward + weight * matches."""

    @field_validator("format")
    @classmethod
    def _format_compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as err:
            raise ValueError(f"{value!r} is no regular expression: {err}") from err
        return value


class EvalSetConfig(Config):
    """One set of held-out tasks."""

    source: TaskSourceConfig
    """Where the tasks come from; not one of `tasks.sources`."""
    num_tasks: int = Field(default=256, ge=1)
    """The first tasks of the source."""
    samples: int = Field(default=1, ge=1)
    """Episodes a task."""


class EvalConfig(Config):
    """Evaluation while training, at pinned versions, without pausing anything."""

    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    every: int = Field(default=10, ge=1)
    """Steps between evaluations; version 0 and the last version are always evaluated."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling in evaluation; 0 is greedy."""
    deadline_s: float = Field(default=300.0, gt=0)
    """A round that is not done after this long is reported with what it has."""
