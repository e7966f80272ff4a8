"""The `tasks` section of a recipe: task sources, environments and rewards."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from astraflow.addons.code.config import CodeTestsReward
from astraflow.config import Config, Use
from astraflow.user_input.hub_names import is_hub_name
from astraflow.user_input.mistakes import hint
from astraflow.user_input.text_forms import Name

__all__ = [
    "JUDGE_PROMPT",
    "MAX_COLUMNS",
    "PROMPT_MARK",
    "EnvironmentConfig",
    "EnvironmentSourceConfig",
    "ExactMatchReward",
    "ExactReward",
    "ExtractMode",
    "F1Reward",
    "FormatReward",
    "HostedSourceConfig",
    "HubSourceConfig",
    "JsonlSourceConfig",
    "JudgeReward",
    "MathVerifyReward",
    "Pattern",
    "PreparedSourceConfig",
    "PromptsConfig",
    "ReasoningGymConfig",
    "RewardConfig",
    "RowsConfig",
    "SingleRewardConfig",
    "SourceReward",
    "TaskSourceConfig",
    "TasksConfig",
    "TrlReward",
    "VerlReward",
    "WeightedReward",
]


_UNOWNED = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)
"""An old name on the hub, without an owner, e.g. `gsm8k`."""
MAX_COLUMNS = 64
"""Columns that travel with a task, besides prompt and answer."""
PROMPT_MARK = "{prompt}"
"""Stands for the prompt in a source's `template`."""
MAX_REWARDS = 64
"""Parts of a weighted reward; each is a metric of every episode."""
ExtractMode = Literal["whole", "last_line", "after_equals", "answer_tag", "boxed"]


def _compiles(value: str) -> str:
    try:
        re.compile(value)
    except re.error as err:
        raise ValueError(f"{value!r} is no regular expression: {err}") from err
    return value


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression."""
_PartName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
_Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


class ReasoningGymConfig(Config):
    """Generated tasks with verifiable answers from the `reasoning-gym` library."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the data set, e.g. `basic_arithmetic`."""
    size: int = Field(default=10_000, ge=1, le=10**9)
    """Number of tasks."""
    seed: int = 0
    """Seed of the data set. Different seeds give different tasks that may overlap; use `split` for disjoint
    sets."""
    split: Literal["all", "train", "heldout"] = "all"
    """Which tasks to use, decided by a hash of the prompt; `train` and `heldout` never share a prompt."""
    heldout_frac: float = Field(default=0.1, gt=0, lt=1)
    """Share of prompts that are held out; use the same value in training, in evaluation and in the model's
    spec."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the data set, e.g. `{min_terms: 3, max_digits: 2}`."""
    system: str = ""
    """System message before each prompt; empty: none."""


class PromptsConfig(Config):
    """Base of the sources whose tasks are rows of data: which rows become tasks, and what stands around a
    prompt."""

    system: str = ""
    """System message before each prompt; empty: none."""
    template: str = ""
    """Text around each prompt, which stands where the text says `{prompt}`; all other braces stay as they
    are. Empty: the prompt alone."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Rows whose prompt has more tokens are left out; a warning says how many. The tokenizer of the first
    trained policy counts the texts of all messages, without the tokens of the chat template. 0: no limit."""
    limit: int = Field(default=0, ge=0)
    """Number of tasks to use: the first ones, of those that are not left out. 0: all."""

    @field_validator("template")
    @classmethod
    def _template_holds_the_prompt(cls, value: str) -> str:
        if value and value.count(PROMPT_MARK) != 1:
            raise ValueError(f"a template holds {PROMPT_MARK} once, where the prompt stands")
        return value


class RowsConfig(PromptsConfig):
    """Base of the sources of files: which column is what."""

    prompt_key: str = Field(default="prompt", min_length=1)
    """Column of the prompt: a text, or a list of messages (`role`, `content`) that ends with one of the user.
    `a.b` is the key `b` of the mapping in column `a`."""
    answer_key: str = "answer"
    """Column of the reference answer, e.g. `reward_model.ground_truth`; a list of texts holds several right
    answers. Empty: the tasks have no answer."""
    columns: tuple[str, ...] = Field(default=(), max_length=MAX_COLUMNS)
    """Further columns that travel with each task; the reward gets them by name."""


class JsonlSourceConfig(RowsConfig):
    """A JSONL file with one task per line."""

    name: Literal["jsonl"] = "jsonl"
    path: str
    """Path of the file, relative to the folder that the command runs in."""


class HubSourceConfig(RowsConfig):
    """A Hugging Face data set: a local folder or file (parquet, JSON, JSONL, CSV, Arrow), or a name on the
    hub. A name that ends like a file is never looked for on the hub."""

    name: Literal["datasets"] = "datasets"
    path: str
    """Local path, or name on the hub: `OWNER/NAME` or `OWNER/NAME@REVISION`."""
    subset: str = ""
    """Name of the data set's configuration; empty: the default one."""
    split: str = "train"
    """Name of the data set's split; a single file has only one, which is used whatever this says."""

    @property
    def is_local(self) -> bool:
        """Whether the path names a file or folder of this machine, there or not, and never the hub."""
        is_alone = _UNOWNED.fullmatch(self.path) and not Path(self.path).exists()
        return not (is_alone or is_hub_name(self.path))


class PreparedSourceConfig(PromptsConfig):
    """A known data set, from the folder that `astraflow data prepare` wrote. Nothing is downloaded."""

    name: Literal["prepared"] = "prepared"
    dataset: str
    """Name of the data set, from `astraflow data list`."""
    folder: str = ""
    """Folder of the prepared data set; empty: `data/DATASET`."""
    split: str = ""
    """Which of its splits to use; empty: the only one."""

    @property
    def where(self) -> str:
        """The folder: the one that is given, or the usual one."""
        return self.folder or f"data/{self.dataset}"


class EnvironmentSourceConfig(Config):
    """The tasks of one of `tasks.environments`."""

    name: Literal["environment"] = "environment"
    environment: str = ""
    """Name of the environment; empty: the only one."""
    split: str = "train"
    """Which of its tasks to use; the environment says which splits it has."""


class HostedSourceConfig(Config):
    """The tasks of the environment that the workflow `hosted` names."""

    name: Literal["hosted"] = "hosted"
    split: str = ""
    """Which of its tasks to use; the environment says which splits it has."""
    skip: int = Field(default=0, ge=0)
    """Number of tasks to pass over, e.g. those that are trained on, in an evaluation set."""
    limit: int = Field(default=0, ge=0, le=1_000_000)
    """Number of tasks to use, behind those; 0: all. A set of tasks without an end needs one."""


TaskSourceConfig = Annotated[
    ReasoningGymConfig
    | JsonlSourceConfig
    | HubSourceConfig
    | PreparedSourceConfig
    | EnvironmentSourceConfig
    | HostedSourceConfig
    | Use,
    Field(discriminator="name"),
]


class EnvironmentConfig(Use):
    """An environment of your own: its tasks, their scoring and, if it is interactive, its replies."""

    call_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a call of `reset`, `step` or `end` fails its episode."""
    open_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds after which an environment that does not open fails the rollout service."""


class SourceReward(Config):
    """The task source's own scorer: that of reasoning-gym or of the environment, or `math_verify` for
    prompt/answer data."""

    name: Literal["source"] = "source"
    allow: tuple[str, ...] = ()
    """Data sets of reasoning-gym whose scorers may run a completion as Python outside of the sandbox."""


class MathVerifyReward(Config):
    """1 if the final answer of the text equals the task's answer, compared as mathematics by `math-verify`;
    else 0."""

    name: Literal["math_verify"] = "math_verify"


class ExactReward(Config):
    """1 if the stripped text equals the task's answer; else 0."""

    name: Literal["exact"] = "exact"


class ExactMatchReward(Config):
    """1 if the text equals one of the answers as SQuAD's grader compares them (without case, punctuation and
    articles); else 0."""

    name: Literal["em"] = "em"


class F1Reward(Config):
    """F1 of the words of the text and of the best answer, as SQuAD's grader computes it: 0 to 1."""

    name: Literal["f1"] = "f1"


class FormatReward(Config):
    """1 if the whole completion matches a pattern, else `otherwise`. As one of `factors` of a weighted reward
    it multiplies the others."""

    name: Literal["format"] = "format"
    pattern: Pattern
    """Regular expression for the whole completion; `.` also matches line breaks."""
    otherwise: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Value of a completion that does not match."""


JUDGE_PROMPT = (
    "Question:\n{prompt}\n\nRight answer:\n{answer}\n\nGiven answer:\n{text}\n\n"
    "Is the given answer right? Think briefly, and end with yes or no."
)


class JudgeReward(Config):
    """The verdict of a model: a frozen policy of the run, or a model behind an OpenAI-compatible endpoint."""

    name: Literal["judge"] = "judge"
    policy: str = ""
    """The frozen policy that judges; empty if `url` is set."""
    url: str = ""
    """Base URL of an endpoint, e.g. `http://127.0.0.1:8000/v1`; empty if `policy` is set."""
    model: str = ""
    """Name of the model at `url`; empty: the first one that it lists."""
    key_variable: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Environment variable of the rollout services that holds the key for `url`; empty: it needs none."""
    prompt: str = JUDGE_PROMPT
    """What the judge is asked; `{prompt}` and `{answer}` stand for those of the task, `{text}` for what is
    judged."""
    verdicts: dict[str, float] = Field(
        default_factory=lambda: {"yes": 1.0, "no": 0.0}, min_length=1, max_length=64
    )
    """Words and their values; the one that stands last in the reply counts, behind any reasoning."""
    unclear: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Value of a reply without any of the words, and of a completion without the part that is judged."""
    max_tokens: int = Field(default=512, ge=1)
    """Largest number of tokens of the reply, which is greedy."""

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        if bool(self.policy) == bool(self.url):
            raise ValueError("a judge is either a `policy` or the model at a `url`; name one of them")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} is no URL; expected e.g. http://127.0.0.1:8000/v1")
        if (self.model or self.key_variable) and not self.url:
            raise ValueError("model and key_variable belong to `url`, which is empty")
        if "{text}" not in self.prompt:
            raise ValueError("prompt: it must show what is judged, where it says {text}")
        return self


class TrlReward(Use):
    """A reward function in the form of TRL: `def reward(completions, **columns)` returns a list of numbers.
    It gets whole completions."""

    name: Literal["trl"] = "trl"  # pyright: ignore[reportIncompatibleVariableOverride] - another variant


class VerlReward(Use):
    """A reward function in the form of verl: `def compute_score(data_source, solution_str, ground_truth,
    extra_info)` returns a number, or a mapping with `score`. It gets whole completions."""

    name: Literal["verl"] = "verl"  # pyright: ignore[reportIncompatibleVariableOverride] - another variant


SingleRewardConfig = Annotated[
    SourceReward
    | MathVerifyReward
    | ExactReward
    | CodeTestsReward
    | ExactMatchReward
    | F1Reward
    | FormatReward
    | JudgeReward
    | TrlReward
    | VerlReward
    | Use,
    Field(discriminator="name"),
]


class WeightedReward(Config):
    """The sum of several rewards, each times its weight. Each one alone is the metric `reward/NAME`."""

    name: Literal["weighted"] = "weighted"
    rewards: dict[_PartName, SingleRewardConfig] = Field(min_length=1, max_length=MAX_REWARDS)
    """Named rewards."""
    weights: dict[str, _Weight] = Field(default_factory=dict)
    """Weight of each reward by its name; 1 for one that is not named here."""
    factors: tuple[str, ...] = ()
    """Names of rewards that are not added: the sum of the others is multiplied by them, e.g. by one of a
    format."""

    @model_validator(mode="after")
    def _names_are_of_rewards(self) -> Self:
        for key, names in (("weights", self.weights), ("factors", self.factors)):
            for name in names:
                if name not in self.rewards:
                    raise ValueError(f"{key}: {name!r} is not a reward (rewards: {', '.join(self.rewards)})")
        if both := [name for name in self.factors if name in self.weights]:
            raise ValueError(f"weights: {both[0]!r} is one of `factors`, which have no weight")
        if judges := [name for name in self.factors if isinstance(self.rewards[name], JudgeReward)]:
            raise ValueError(f"factors: {judges[0]!r} is a judge, which can only be added")
        if not set(self.rewards) - set(self.factors):
            raise ValueError("factors: all rewards are factors; one that they multiply must be left")
        return self

    def weight(self, name: str) -> float:
        """The weight of a reward."""
        return self.weights.get(name, 1.0)


RewardConfig = Annotated[
    SourceReward
    | MathVerifyReward
    | ExactReward
    | CodeTestsReward
    | ExactMatchReward
    | F1Reward
    | FormatReward
    | JudgeReward
    | TrlReward
    | VerlReward
    | WeightedReward
    | Use,
    Field(discriminator="name"),
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
    """Which part of the completion is scored as the answer."""
    format: Pattern = ""
    """Regular expression that the whole completion should match (`.` also matches line breaks); empty:
    none."""
    format_weight: float = Field(default=0.1, ge=0, le=1)
    """Share of `format` in the score: (1 - weight) * reward + weight * matches."""

    @model_validator(mode="after")
    def _sources_have_environments(self) -> Self:
        for name, source in self.sources.items():
            if not isinstance(source, EnvironmentSourceConfig):
                continue
            is_only_one = not source.environment and len(self.environments) == 1
            if not is_only_one and source.environment not in self.environments:
                raise ValueError(
                    f"sources.{name}.environment = {source.environment!r} is not one "
                    f"of tasks.environments{hint(source.environment, list(self.environments))}"
                )
        return self
