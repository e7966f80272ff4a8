"""Bases of the config classes of sources and rewards, for AstraFlow's own and for those of any package.

A module that subclasses one of them is imported while `tasks.config` is: it imports this file, and not that
one. What it describes is imported when it is made.
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
"""Columns that travel with a task, besides prompt and answer."""
PROMPT_MARK = "{prompt}"
"""Stands for the prompt in a source's `template`."""


# --- sources --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source gets from the recipe around it."""

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
    """Whether its rows were checked when they were written. Of many tasks, only some are then read before a
    run."""

    def make(self, context: SourceContext) -> TaskSource:
        """Opens the source. Raises: ConfigError or DataError."""
        raise NotImplementedError

    def task_columns(self) -> tuple[str, ...] | None:
        """The columns that its tasks bring for rewards; None if that isn't known before the tasks are."""
        return None

    def runs_answers(self, allow: Collection[str]) -> bool:
        """Whether its scorer runs completions in a sandbox. `allow`: see `tasks.reward.allow`."""
        del allow
        return False

    @classmethod
    def make_scorer(cls, allow: Collection[str]) -> Scorer | None:
        """Makes what the reward `source` scores tasks of this kind with; None if it cannot score them.

        `allow`: data sets whose scorers may run completions outside the sandbox.
        """
        del allow
        return None


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


# --- rewards --------------------------------------------------------------------------------------


class RewardVariant(Variant):
    """Base of a reward's config that an installed package adds."""

    needs_sandbox: ClassVar[bool] = False
    """Whether it runs programs of completions, in a sandbox."""
    is_harmless: ClassVar[bool] = False
    """Whether its calls neither hang nor run code outside a sandbox. They run in the rollout service, those
    of other rewards in processes that can be ended."""
    keeps_keys: ClassVar[bool] = False
    """Whether its process keeps environment variables that look like secrets, such as the key of an API."""
    scores_rows: ClassVar[bool] = False
    """Whether the reward `source` uses it, with its defaults, for tasks that are a prompt and an answer. One
    installed reward may say so."""

    def make(self) -> Scorer:
        """Makes the scorer, in the process that calls it."""
        raise NotImplementedError

    def checker(self, source: Config) -> Callable[[Task], object] | None:
        """What checks before a run that a task can be scored; None if a source's tasks need no check.

        The function raises DataError. `source` is the config of the tasks' source.
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
