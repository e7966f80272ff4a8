"""Base classes of the configs of sources and rewards, AstraFlow's own and those of any package.

`tasks.config` imports the modules that subclass them. So such a module imports this file, not `tasks.config`,
and imports what the config describes only when that is made.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from astraflow.config import Config, Variant
from astraflow.protocols import Judge, Scorer, TaskSource
from astraflow.types import Task

__all__ = [
    "MAX_COLUMNS",
    "PROMPT_MARK",
    "JudgeVariant",
    "PromptsConfig",
    "RewardVariant",
    "RowsConfig",
    "SourceContext",
    "SourceVariant",
]

MAX_COLUMNS = 64
"""Largest number of columns that a task carries in addition to prompt and answer."""
PROMPT_MARK = "{prompt}"
"""Placeholder of the prompt in a source's `template`."""


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source gets from the rest of the recipe."""

    name: str = ""
    """The source's name in the recipe: the tasks' `source`, and the start of their ids."""
    workflow: Config | None = None
    """The workflow that runs the tasks."""
    tokenizer_dir: Path | None = None
    """The model folder whose tokenizer counts the tokens of prompts."""


class SourceVariant(Variant):
    """Base of a source's config that an installed package adds.

    A task whose scoring is up to its source has a `spec` with the variant's name under `kind`.
    """

    needs_workflow: ClassVar[bool] = False
    """Whether `make` reads the recipe's workflow."""
    is_checked: ClassVar[bool] = False
    """Whether its rows were checked when they were written. If so, only some of many tasks are read before a
    run."""

    def make(self, context: SourceContext) -> TaskSource:
        """Opens the source. Raises: ConfigError or DataError."""
        raise NotImplementedError

    def task_columns(self) -> tuple[str, ...] | None:
        """The columns that its tasks have for rewards; None if they are unknown before the tasks are read."""
        return None

    def runs_answers(self, allow: Collection[str]) -> bool:
        """Whether its scorer runs completions in a sandbox. `allow`: see `tasks.reward.allow`."""
        del allow
        return False

    def load_for_scoring(self) -> None:
        """Imports what scoring the source's tasks needs, in the process that scores. Raises: ConfigError."""

    @classmethod
    def make_scorer(cls, allow: Collection[str]) -> Scorer | None:
        """Makes the scorer that the reward `source` uses for tasks of this kind; None if there is none.

        `allow`: data sets whose scorers may run completions outside the sandbox.
        """
        del allow
        return None


class PromptsConfig(Config):
    """Base of the sources whose tasks are rows of data: which rows become tasks, and what surrounds a
    prompt."""

    system: str = ""
    """System message before each prompt; empty: none."""
    template: str = ""
    """Text around each prompt, which replaces `{prompt}`; other braces are kept. Empty: the prompt alone."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Rows whose prompt has more tokens are left out; a warning says how many. The tokenizer of the first
    trained policy counts the texts of all messages, without the tokens of the chat template. 0: no limit."""
    limit: int = Field(default=0, ge=0)
    """Number of tasks to use, the first of those that are not left out. 0: all."""

    @field_validator("template")
    @classmethod
    def _template_holds_the_prompt(cls, value: str) -> str:
        if value and value.count(PROMPT_MARK) != 1:
            raise ValueError(f"a template must contain {PROMPT_MARK} exactly once")
        return value


class RowsConfig(PromptsConfig):
    """Base of the sources that read files: what each column is used for."""

    prompt_key: str = Field(default="prompt", min_length=1)
    """Column of the prompt: a text, or a list of messages (`role`, `content`) that ends with one of the user.
    `a.b` is the key `b` of the mapping in column `a`."""
    answer_key: str = "answer"
    """Column of the reference answer, e.g. `reward_model.ground_truth`; a list of texts holds several right
    answers. Empty: the tasks have no answer."""
    columns: tuple[str, ...] = Field(default=(), max_length=MAX_COLUMNS)
    """Further columns that travel with each task; the reward gets them by name."""

    def row_place(self, idx: int) -> str:
        """Describes where row number `idx`, from 0, is."""
        return f"row {idx + 1}"


class RewardVariant(Variant):
    """Base of a reward's config that an installed package adds."""

    needs_sandbox: ClassVar[bool] = False
    """Whether it runs programs of completions, in a sandbox."""
    is_harmless: ClassVar[bool] = False
    """Whether its calls neither hang nor run code outside a sandbox. If so, they run in the rollout service;
    calls of other rewards run in processes that can be ended."""
    keeps_keys: ClassVar[bool] = False
    """Whether its process keeps environment variables that look like secrets, such as the key of an API."""
    scores_rows: ClassVar[bool] = False
    """Whether the reward `source` uses it, with its defaults, for tasks that are a prompt and an answer. Only
    one installed reward may set this."""

    def make(self) -> Scorer:
        """Makes the scorer, in the process that calls it."""
        raise NotImplementedError

    def checker(self, source: Config) -> Callable[[Task], object] | None:
        """Makes the check before a run that a task can be scored; None if a source's tasks need no check.

        The check raises DataError. `source`: the config of the tasks' source.
        """
        del source
        return None


class JudgeVariant(RewardVariant):
    """Base of a reward's config whose values a model gives.

    The rollout service asks the model, and not a process that scores. So such a reward can be added to
    others, but not be one of the `factors` that multiply them.
    """

    is_harmless: ClassVar[bool] = True

    @property
    def judging_policy(self) -> str:
        """The policy of the run that it asks, which must be frozen; empty: none."""
        return ""

    @property
    def endpoint(self) -> str:
        """What it asks outside of the run, as `astraflow join --allow` names it; empty: nothing."""
        return ""

    def make_judge(self) -> Judge:
        """Makes what asks the model, in a rollout service."""
        raise NotImplementedError
