"""Rewards of a recipe: which part of a completion is the answer, and how it is scored.

`make_reward` needs only the recipe's `tasks` section and returns a plain callable that can be pickled. A
scoring process can therefore make the same reward without torch. The libraries of scorers are imported at the
first call that needs them.
"""

import json
import re
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

from astraflow.config import Use, check_args, load_attr
from astraflow.envs.config import (
    ExactReward,
    HubSourceConfig,
    JsonlSourceConfig,
    MathVerifyReward,
    ReasoningGymConfig,
    RewardConfig,
    SourceReward,
    TasksConfig,
    TaskSourceConfig,
)
from astraflow.envs.environment import make_environment, without_environment
from astraflow.envs.math_answers import is_right, readable_gold
from astraflow.envs.math_text import boxes, fold
from astraflow.envs.reasoning_gym import GYM, check_scorer, score_gym
from astraflow.errors import DataError
from astraflow.protocols import Environment, Reward, TaskSource
from astraflow.types import Task

__all__ = [
    "check_gradable",
    "extract_answer",
    "make_reward",
]

_COMPARING_S = 4.0
"""An answer that takes longer to parse and compare counts as wrong, so that it does not reach the deadline of
the scoring process, which would end the process."""


def make_reward(config: TasksConfig) -> Reward:
    """Makes the recipe's reward, which scores the part of a completion that `extract` names.

    A completion without that part scores 0, without a call of the scorer. `format_weight` is the share of
    `format` in the score.

    Raises: ConfigError if a scorer cannot be made, or would run completions as Python and is not allowed.
    """
    for source in config.sources.values():
        _check_source(config.reward, source)
    weight = config.format_weight if config.format else 0.0
    return _ExtractedReward(_scorer(config), config.extract, config.format, weight)


@dataclass(frozen=True, slots=True)
class _ExtractedReward:
    """Scores the extracted part of a completion, and adds the share of the format."""

    scorer: Reward
    mode: str
    pattern: str
    format_weight: float

    def __call__(self, task: Task, text: str) -> float:
        answer = extract_answer(text, mode=self.mode)
        if answer is not None and self._compares_mathematics(task):
            # The comparison gets the box itself, so that it takes all of the content as the answer. Several
            # boxes may together be one answer, so `boxes` looks for them in the whole text.
            answer = f"\\boxed{{{boxes(text) or answer}}}" if self.mode == "boxed" else answer
        score = 0.0 if answer is None else float(self.scorer(task, answer))
        if self.format_weight == 0:
            return score
        matches = re.fullmatch(self.pattern, text, re.DOTALL) is not None
        return (1 - self.format_weight) * score + self.format_weight * matches

    def _compares_mathematics(self, task: Task) -> bool:
        """Whether the task's answer is compared as mathematics, and not by another scorer."""
        return self.scorer is _score_by_math_verify or (
            isinstance(self.scorer, _SourceScorer) and not task.spec
        )


def check_gradable(reward: RewardConfig, source: TaskSource, config: TaskSourceConfig) -> None:
    """Checks that a built-in reward can score each task of a file, and may score those of a generator.

    Raises: DataError for a task without an answer; ConfigError for a scorer that would run completions as
    Python and is not allowed.
    """
    _check_source(reward, config)
    if isinstance(reward, Use) or not isinstance(config, JsonlSourceConfig | HubSourceConfig):
        return
    for idx in range(len(source)):
        _check_answer(source.task(idx), reward)


def _check_source(reward: RewardConfig, config: TaskSourceConfig) -> None:
    if isinstance(reward, SourceReward) and isinstance(config, ReasoningGymConfig):
        check_scorer(config.dataset, reward.allow)


def _check_answer(task: Task, reward: RewardConfig) -> None:
    is_text = isinstance(reward, ExactReward)
    if not (task.answer.strip() if is_text else fold(readable_gold(task.answer))):
        raise DataError(
            f"task {task.id} has no answer to compare with: it reads {task.answer[:60]!r}; fix the data, or "
            "name another scorer in tasks.reward"
        )


def _scorer(config: TasksConfig) -> Reward:
    match config.reward:
        case SourceReward():
            made = {name: make_environment(name, env) for name, env in config.environments.items()}
            return _SourceScorer(config.reward.allow, made)
        case MathVerifyReward():
            return _score_by_math_verify
        case ExactReward():
            return _score_exact
        case Use():
            return _user_scorer(config.reward)


# --- extraction -----------------------------------------------------------------------------------


def extract_answer(text: str, *, mode: str) -> str | None:
    """The part of a completion that is scored; None if the completion does not have it.

    Modes: `whole`; `last_line` (the last line that is not blank); `after_equals` (the text after the last
    `=`); `answer_tag` (the content of the last `<answer>...</answer>`); `boxed` (the content of the last
    `\\boxed{...}`).
    """
    return _EXTRACTORS[mode](text)


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _after_equals(text: str) -> str | None:
    _, equals, answer = text.rpartition("=")
    return answer.strip() if equals else None


def _answer_tag(text: str) -> str | None:
    before, closing, _ = text.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if closing and opening else None


def _boxed(text: str) -> str | None:
    _, opening, rest = text.rpartition("\\boxed{")
    depth = 1 if opening else 0
    for position, char in enumerate(rest if opening else ""):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[:position].strip()
    return None


def _whole(text: str) -> str | None:
    return text


_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "after_equals": _after_equals,
    "answer_tag": _answer_tag,
    "boxed": _boxed,
    "last_line": _last_line,
    "whole": _whole,
}


# --- scorers --------------------------------------------------------------------------------------


def _score_exact(task: Task, text: str) -> float:
    _check_answer(task, ExactReward())
    return float(text.strip() == task.answer.strip())


@dataclass(frozen=True, slots=True)
class _SourceScorer:
    """Scores a task with the scorer of its source.

    That is the task's environment, reasoning-gym's own scorer, or `math_verify` for a task that has only a
    prompt and an answer.
    """

    allowed: tuple[str, ...]
    environments: Mapping[str, Environment]

    def __call__(self, task: Task, text: str) -> float:
        if not task.spec:
            return _score_by_math_verify(task, text)
        name, own = without_environment(task)
        if name:
            return self._environment(name, task).score(own, text)
        spec = json.loads(task.spec)
        if spec.get("kind") != GYM:
            raise DataError(
                f"task {task.id}: its spec is of kind {spec.get('kind')!r}, which has no scorer here; name "
                "one in tasks.reward"
            )
        return score_gym(task, text, spec, allowed=self.allowed)

    def _environment(self, name: str, task: Task) -> Environment:
        if name not in self.environments:
            raise DataError(
                f"task {task.id} belongs to the environment {name!r}, which is not one of tasks.environments "
                f"({', '.join(self.environments) or 'there are none'})"
            )
        return self.environments[name]


def _score_by_math_verify(task: Task, text: str) -> float:
    _check_answer(task, MathVerifyReward())
    try:
        with _time_limit(_COMPARING_S):
            return float(is_right(task.answer, text))
    except _OutOfTime:
        return 0.0


class _OutOfTime(BaseException):
    """Raised when time is up. It is not an Exception, so that the algebra's own code does not catch it."""


@contextmanager
def _time_limit(seconds: float) -> Generator[None]:
    """Raises `_OutOfTime` in a block that takes longer.

    It uses a signal, which only the main thread may set. In other threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _user_scorer(config: Use) -> Reward:
    scorer = cast("Callable[..., float]", load_attr(config.use, where="tasks.reward.use"))
    check_args(scorer, config.args, where="tasks.reward.args")
    return partial(scorer, **config.args)
