"""Makes the reward of a recipe, which extracts the answer from a completion and scores it.

`make_reward` needs only the recipe's `tasks` section and returns a plain callable that can be pickled. So a
scoring process can make the same reward without torch. `RecipeReward.load` imports the libraries that its
scorers need; without it, the first call that needs a library imports it.

An exception or a time limit never becomes a score. A comparison that runs out of time is a `LateScoreError`;
an exception that a scorer of this module does not expect is a `ScorerError`.
"""

import asyncio
import inspect
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from astraflow.config import Use
from astraflow.errors import ConfigError, DataError, Error, RolloutError
from astraflow.protocols import Environment, Score, Scorer, ScoringCall, TaskSource
from astraflow.tasks.answers import AnswerScorer, answer_checker, extract_answer, has_text
from astraflow.tasks.config import (
    ExactReward,
    FormatReward,
    RewardConfig,
    SingleRewardConfig,
    SourceReward,
    TasksConfig,
    TaskSourceConfig,
    WeightedReward,
)
from astraflow.tasks.environment import make_environment, without_environment
from astraflow.tasks.own_rewards import OwnReward, check_own_reward, make_own_reward
from astraflow.tasks.rows import name_row_in_errors
from astraflow.tasks.selection import tasks_to_check
from astraflow.tasks.variants import JudgeVariant, PromptsConfig, RewardVariant, RowsConfig, SourceVariant
from astraflow.types import Task
from astraflow.types.bounds import as_label, as_number
from astraflow.types.model_text import find_reasoning, with_opening
from astraflow.types.row_columns import is_of_row
from astraflow.user_input.mistakes import configs_in, tag_of
from astraflow.user_input.own_code import describe_error

__all__ = [
    "RecipeReward",
    "check_gradable",
    "is_waiting",
    "keeps_keys",
    "make_reward",
    "needs_sandbox",
]

_MAX_REPORTED = 64
"""Largest number of metrics that one reward may report in addition to its score."""


def make_reward(config: TasksConfig) -> "RecipeReward":
    """Makes the recipe's reward, which scores the part of a completion that `extract` names.

    Judges are left out, because the rollout service asks them. A completion without that part scores 0
    without calling the scorer. `format_weight` is the share of `format` in the score.

    Raises: ConfigError if a scorer cannot be made.
    """
    format_weight = config.format_weight if config.format else 0.0
    factors = config.reward.factors if isinstance(config.reward, WeightedReward) else ()
    parts = tuple(
        _Part(_make_scorer(reward, config, where), config.extract, name, weight, name in factors)
        for name, where, reward, weight in _single_rewards(config.reward)
        if not isinstance(reward, JudgeVariant)
    )
    return RecipeReward(parts, config.format, format_weight)


@dataclass(frozen=True, slots=True)
class RecipeReward:
    """The reward of a recipe. Implements `Reward`.

    Example: `make_reward(tasks)(task, "2+3=5")` is a `Score`. The steps of a call, for callers that run many
    calls at once: `started = reward.start(task, text)`, then `await reward.waited(task, started)` if it
    `is_waiting`, and then `reward.total(task, text, started)`.
    """

    parts: "tuple[_Part, ...]"
    pattern: str
    format_weight: float

    def load(self) -> None:
        """Imports the libraries of the scorers, so no call has to wait for that.

        Raises: ConfigError if a library cannot be imported; ScorerError if one does not work.
        """
        for part in self.parts:
            part.scorer.load()

    async def open(self) -> None:
        """Starts what calls need, in the event loop that awaits them. Raises: ConfigError."""
        for part in self.parts:
            await part.scorer.open()

    async def close(self) -> None:
        """Ends what `open` or a call started."""
        for part in self.parts:
            await part.scorer.close()

    @property
    def is_async(self) -> bool:
        """Whether a scorer is `async`; then many calls can run concurrently."""
        return any(part.scorer.is_async for part in self.parts)

    @property
    def queue(self) -> str:
        """What calls wait for, as text; empty if no scorer knows."""
        return next((queue for part in self.parts if (queue := part.scorer.queue)), "")

    def __call__(self, task: Task, text: str) -> Score:
        """The score of a completion. If a function is `async`, no event loop may run in this thread."""
        values = self.start(task, text)
        if is_waiting(values):
            values = asyncio.run(self._wait_alone(task, values))
        return self.total(task, text, values)

    def start(self, task: Task, text: str) -> list[object]:
        """Calls the function of each part. Returns their values, or awaitables of them.

        Raises: RolloutError that names the line if a user's function raised.
        """
        values: list[object] = []
        text = with_opening(text)
        try:
            for part in self.parts:
                values.append(part.start(task, text))  # noqa: PERF401 - coroutines are closed if a later one fails
        except BaseException:
            for value in values:
                if inspect.iscoroutine(value):
                    value.close()
            raise
        return values

    async def _wait_alone(self, task: Task, values: Sequence[object]) -> list[object]:
        """Like `waited`, in a private event loop: opens and closes what calls need."""
        try:
            await self.open()
            return await self.waited(task, values)
        finally:
            await self.close()

    async def waited(self, task: Task, values: Sequence[object]) -> list[object]:
        """Awaits all awaitables among the values concurrently, and returns the results.

        Raises: RolloutError if one of them raised, once all have ended.
        """
        work = [part.wait(task, value) for part, value in zip(self.parts, values, strict=True)]
        done = await asyncio.gather(*work, return_exceptions=True)
        for value in done:
            if isinstance(value, BaseException):
                raise value
        return done

    def total(self, task: Task, text: str, values: Sequence[object]) -> Score:
        """The total score and its parts. Raises: RolloutError if a value is not a finite number."""
        score = 0.0
        product = 1.0
        metrics: dict[str, float] = {}
        for part, value in zip(self.parts, values, strict=True):
            number, reported = part.read(task, value)
            if part.is_factor:
                product *= 1.0 if number is None else number
            else:
                score += part.weight * (number or 0.0)
            if part.name and number is not None:
                metrics[f"reward/{part.name}"] = number
            metrics |= reported
        score *= product
        if reasoning := find_reasoning(text):
            metrics["unfinished_reasoning"] = float(not reasoning.is_finished)
        if self.format_weight > 0:
            matches = re.fullmatch(self.pattern, with_opening(text), re.DOTALL) is not None
            score = (1 - self.format_weight) * score + self.format_weight * matches
            metrics["format_match"] = float(matches)
        return Score(score, metrics)


def keeps_keys(config: TasksConfig) -> bool:
    """Whether scoring may need environment variables with secrets: users' own rewards and environments
    may."""
    return bool(config.environments) or any(
        isinstance(part, Use) or (isinstance(part, RewardVariant) and part.keeps_keys)
        for _, _, part, _ in _single_rewards(config.reward)
    )


def needs_sandbox(config: TasksConfig) -> bool:
    """Whether scoring runs programs of completions."""
    return any(
        part.needs_sandbox if isinstance(part, RewardVariant) else _runs_answers(part, config)
        for _, _, part, _ in _single_rewards(config.reward)
    )


def _runs_answers(reward: SingleRewardConfig, config: TasksConfig) -> bool:
    """Whether a scorer of the recipe's sources runs completions, in a sandbox."""
    return isinstance(reward, SourceReward) and any(
        isinstance(source, SourceVariant) and source.runs_answers(reward.allow)
        for source in config.sources.values()
    )


def is_waiting(values: Sequence[object]) -> bool:
    """Whether one of the values must still be awaited."""
    return any(inspect.isawaitable(value) for value in values)


@dataclass(frozen=True, slots=True)
class _Part:
    """One scorer, the extraction mode of its answers, and its name and weight in the sum."""

    scorer: Scorer
    mode: str
    name: str
    """Name in a weighted reward; empty for a single reward."""
    weight: float
    is_factor: bool = False
    """Whether it multiplies the sum of the others."""

    def start(self, task: Task, text: str) -> object:
        """Calls the scorer. Returns a value or an awaitable."""
        gets_all = self.scorer.gets_all or (self.mode == "whole" and isinstance(self.scorer, OwnReward))
        answer = text if gets_all else extract_answer(text, mode=self.mode)
        if answer is None:
            return 0.0
        try:
            return self.scorer(ScoringCall(task, answer, text, self.mode))
        except BaseException as error:
            if isinstance(error, Error) and not isinstance(self.scorer, OwnReward):
                raise  # its message names the task
            raise self._failure(task, error) from error

    async def wait(self, task: Task, value: Any) -> object:
        """Returns the value, or the result of an awaitable."""
        if not inspect.isawaitable(value):
            return value
        try:
            return await value
        except asyncio.CancelledError as error:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise  # the deadline cancelled this task; the user's code did not raise
            raise self._failure(task, error) from error
        except BaseException as error:
            raise self._failure(task, error) from error

    def _failure(self, task: Task, error: BaseException) -> RolloutError:
        # Retrying may help if a service that the function calls did not answer.
        is_retryable = error.is_retryable if isinstance(error, RolloutError) else False
        what = f": {error}" if isinstance(error, Error) else f" raised {describe_error(error)}"
        return RolloutError(
            f"{self._who(task)}{what}",
            is_retryable=is_retryable or isinstance(error, ConnectionError | TimeoutError),
        )

    def _who(self, task: Task) -> str:
        return f"task {task.id}: the reward{f' {self.name!r}' if self.name else ''}"

    def read(self, task: Task, value: object) -> tuple[float | None, dict[str, float]]:
        """Reads the number and the metrics that a scorer returned.

        A reward is a number, a `Score` with metrics, or a mapping with `score` whose other numbers are
        metrics. In a sum, None means that the reward does not apply to the task.
        """
        if value is None and self.name:
            return None, {}
        if isinstance(value, Score):
            return self._number(task, float(value), "returned a Score of"), self._metrics(task, value.parts)
        if not isinstance(value, Mapping):
            return self._number(task, value, "returned"), {}
        fields = cast("Mapping[object, object]", value)
        if "score" not in fields:
            raise RolloutError(
                f"{self._who(task)} returned a mapping without `score`: {_format_value(fields)}",
                is_retryable=False,
            )
        others = {key: number for key, number in fields.items() if key != "score"}
        return self._number(task, fields["score"], "returned, under 'score',"), self._metrics(task, others)

    def _metrics(self, task: Task, fields: Mapping[Any, object]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for key, number in fields.items():
            # Other values, such as text for people to read, are not metrics.
            if as_number(number) is not None:
                name = "/".join(["reward", *([self.name] if self.name else []), as_label(str(key))])
                metrics[name] = self._number(task, number, f"returned, under {str(key)[:64]!r},")
        if len(metrics) > _MAX_REPORTED:
            raise RolloutError(
                f"{self._who(task)} reports {len(metrics)} numbers; at most {_MAX_REPORTED} become metrics",
                is_retryable=False,
            )
        return metrics

    def _number(self, task: Task, value: object, how: str) -> float:
        number = as_number(value)
        if number is None or not math.isfinite(number):
            raise RolloutError(
                f"{self._who(task)} {how} {_format_value(value)}; expected a finite number",
                is_retryable=False,
            )
        return number


def _format_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _single_rewards(reward: RewardConfig) -> list[tuple[str, str, SingleRewardConfig, float]]:
    """The rewards of a sum, or the only one: name, place in the recipe, config and weight."""
    if not isinstance(reward, WeightedReward):
        return [("", "tasks.reward", reward, 1.0)]
    return [
        (name, f"tasks.reward.rewards.{name}", part, reward.weight(name))
        for name, part in reward.rewards.items()
    ]


def check_gradable(reward: RewardConfig, source: TaskSource, config: TaskSourceConfig) -> None:
    """Checks that the rewards can score a source's tasks (of a large prepared data set, some of them).

    Raises: DataError for a task without an answer; ConfigError if a user's function has a parameter that the
    tasks have no value for.
    """
    columns = _columns(config)
    for _, where, part, _ in _single_rewards(reward):
        if isinstance(part, Use):
            check_own_reward(part, columns, where=where)
        elif (check := _make_checker(part, config)) is not None:
            for task in tasks_to_check(source, config):
                with name_row_in_errors(task, config):
                    check(task)


def _make_checker(reward: SingleRewardConfig, source: TaskSourceConfig) -> Callable[[Task], object] | None:
    """Makes the check that a reward can score a task; None if the source's tasks need no check."""
    match reward:
        case RewardVariant():
            return reward.checker(source)
        case ExactReward():  # compares characters, so an answer may be any text
            return answer_checker(source, has_text, allowed=("list", "mapping", "text"))
        case SourceReward() if isinstance(source, PromptsConfig):
            return _find_rows_reward().checker(source)
        case _:
            return None


def _columns(config: TaskSourceConfig) -> tuple[str, ...] | None:
    """The columns of a source's tasks; None if only its tasks tell."""
    match config:
        case RowsConfig():
            return config.columns
        case SourceVariant():
            return config.task_columns()
        case _:
            return None


def _make_scorer(reward: SingleRewardConfig, config: TasksConfig, where: str) -> Scorer:
    match reward:
        case SourceReward():
            return _SourceScorer(reward.allow, config)
        case ExactReward():
            return AnswerScorer(_exact)
        case FormatReward():
            return _FormatScorer(reward.pattern, reward.otherwise)
        case RewardVariant():
            return reward.make()
        case Use():
            return make_own_reward(reward, where=where)


def _exact(text: str, answers: Sequence[str]) -> float:
    answer, *right = (unicodedata.normalize("NFC", each).strip() for each in (text, *answers))
    return float(answer in right)


class _FormatScorer(Scorer):
    """Scores whether the whole completion matches a pattern."""

    def __init__(self, pattern: str, otherwise: float) -> None:
        self._pattern = pattern
        self._otherwise = otherwise

    @property
    def gets_all(self) -> bool:
        return True

    def __call__(self, call: ScoringCall) -> float:
        return 1.0 if re.fullmatch(self._pattern, call.completion, re.DOTALL) else self._otherwise


class _SourceScorer(Scorer):
    """Scores a task with the scorer of its environment, or of its source's variant.

    The installed reward for such tasks scores a task that is only a prompt and an answer.
    """

    def __init__(self, allow: Sequence[str], config: TasksConfig) -> None:
        self._allow = allow
        self._sources = tuple(config.sources.values())
        self._environments = {
            name: make_environment(name, environment) for name, environment in config.environments.items()
        }
        self._rows: Scorer | None = None
        self._kinds: dict[str, Scorer | None] = {}

    def load(self) -> None:
        for source in self._sources:
            if isinstance(source, PromptsConfig):
                self._rows_scorer().load()
            elif isinstance(source, SourceVariant):
                source.load_for_scoring()
                if (scorer := self._kind_scorer(source.name)) is not None:
                    scorer.load()
            elif isinstance(source, Use):  # its tasks may be prompts and answers
                with suppress(ConfigError):
                    self._rows_scorer().load()

    async def open(self) -> None:
        for source in self._sources:
            if isinstance(source, SourceVariant) and source.runs_answers(self._allow):
                scorer = self._kind_scorer(source.name)
                if scorer is not None:
                    await scorer.open()

    async def close(self) -> None:
        for scorer in (self._rows, *self._kinds.values()):
            if scorer is not None:
                await scorer.close()

    def __call__(self, call: ScoringCall) -> object:
        task = call.task
        if is_of_row(task):
            return self._rows_scorer()(call)
        name, own = without_environment(task)
        if name:
            return self._environment(name, task).score(own, call.text)
        kind = json.loads(task.spec).get("kind")
        scorer = self._kind_scorer(str(kind))
        if scorer is None:
            raise DataError(
                f"task {task.id}: its spec is of kind {kind!r}, which has no scorer here; name one in "
                "tasks.reward"
            )
        return scorer(call)

    def _environment(self, name: str, task: Task) -> Environment:
        if name not in self._environments:
            raise DataError(
                f"task {task.id} belongs to the environment {name!r}, which is not one of tasks.environments "
                f"({', '.join(self._environments) or 'there are none'})"
            )
        return self._environments[name]

    def _rows_scorer(self) -> Scorer:
        if self._rows is None:
            self._rows = _find_rows_reward().make()
        return self._rows

    def _kind_scorer(self, kind: str) -> Scorer | None:
        """The scorer of the source variant with this name; None if there is none."""
        if kind not in self._kinds:
            variants = [v for v in configs_in(TaskSourceConfig) if issubclass(v, SourceVariant)]
            named = next((variant for variant in variants if tag_of(variant) == kind), None)
            self._kinds[kind] = named.make_scorer(self._allow) if named is not None else None
        return self._kinds[kind]


def _find_rows_reward() -> RewardVariant:
    """The installed reward for tasks that are a prompt and an answer. Raises: ConfigError."""
    variants = [v for v in configs_in(SingleRewardConfig) if issubclass(v, RewardVariant) and v.scores_rows]
    if len(variants) != 1:
        names = ", ".join(sorted(str(tag_of(variant)) for variant in variants)) or "none"
        raise ConfigError(
            "tasks.reward = source needs one installed reward for tasks that are a prompt and an answer "
            f"(installed: {names}); name a reward in tasks.reward, such as exact"
        )
    return variants[0].model_validate({})
