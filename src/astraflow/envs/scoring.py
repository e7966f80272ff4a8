"""Rewards of a recipe: what part of a completion is the answer, and how it is scored.

`make_reward` builds a plain picklable callable from the recipe's `tasks` section alone, so that a scoring
process can build it again without torch. Scorers' libraries are imported at the first call that needs them.
"""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

from astraflow.config import Use, check_args, load_attr
from astraflow.envs.config import ExactReward, MathVerifyReward, RewardConfig, SourceReward, TasksConfig
from astraflow.envs.gym import GYM, score_gym
from astraflow.errors import ConfigError, DataError
from astraflow.protocols import Reward
from astraflow.types import Task

__all__ = ["extract_answer", "make_reward"]

_PARSING_TIMEOUT_S = 2
"""An answer that takes longer to parse or compare is wrong, rather than the end of its scoring process."""


def make_reward(config: TasksConfig) -> Reward:
    """The recipe's reward, applied to the part of the completion that `extract` names.

    A completion without that part scores 0 and its scorer is not asked; `format` makes `format_weight` of the
    score. Raises: ConfigError.
    """
    weight = config.format_weight if config.format else 0.0
    return _ExtractedReward(_scorer(config.reward), config.extract, config.format, weight)


@dataclass(frozen=True, slots=True)
class _ExtractedReward:
    scorer: Reward
    mode: str
    pattern: str
    format_weight: float

    def __call__(self, task: Task, text: str) -> float:
        answer = extract_answer(text, mode=self.mode)
        score = 0.0 if answer is None else float(self.scorer(task, answer))
        if self.format_weight == 0:
            return score
        matches = re.fullmatch(self.pattern, text, re.DOTALL) is not None
        return (1 - self.format_weight) * score + self.format_weight * matches


def _scorer(config: RewardConfig) -> Reward:
    match config:
        case SourceReward():
            return _score_by_source
        case MathVerifyReward():
            return _score_by_math_verify
        case ExactReward():
            return _score_exact
        case Use():
            return _user_scorer(config)


# --- extraction -----------------------------------------------------------------------------------


def extract_answer(text: str, *, mode: str) -> str | None:
    """The scored part of a completion; None if it is not there.

    Modes: `whole`; `last_line` (the last that is not blank); `after_equals` (after the last `=`);
    `answer_tag` (in the last `<answer>...</answer>`); `boxed` (in the last `\\boxed{...}`).
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
    return float(text.strip() == task.answer.strip())


def _score_by_source(task: Task, text: str) -> float:
    """By what made the task: reasoning-gym's own scorer, or `math-verify` for prompt and answer."""
    if not task.spec:
        return _score_by_math_verify(task, text)
    spec = json.loads(task.spec)
    if spec.get("kind") != GYM:
        raise DataError(
            f"task {task.id}: its spec is of kind {spec.get('kind')!r}, which has no scorer here; name one "
            "in tasks.reward"
        )
    return score_gym(task, text, spec)


def _score_by_math_verify(task: Task, text: str) -> float:
    if not task.answer:
        raise DataError(f"task {task.id} has no answer to compare with; name another scorer in tasks.reward")
    parse, verify = _math_verify()
    gold = _parsed_gold(task.answer)
    if not gold:
        return _score_exact(task, text)
    seconds = _timeout_s()
    parsed = parse(text, parsing_timeout=seconds)
    return float(bool(verify(gold, parsed, timeout_seconds=seconds)))


@lru_cache(maxsize=1024)
def _parsed_gold(answer: str) -> list[Any]:
    parse, _ = _math_verify()
    return cast("list[Any]", parse(answer, parsing_timeout=_timeout_s()))


def _timeout_s() -> int | None:
    """math-verify's own timeout uses a signal, which only a main thread may set."""
    return _PARSING_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Its `parse` and `verify`, untyped as they are."""
    try:
        import math_verify
    except ImportError as err:
        raise ConfigError("the reward `math_verify` needs the package: pip install astraflow[tasks]") from err
    return cast("Callable[..., Any]", math_verify.parse), cast("Callable[..., Any]", math_verify.verify)


def _user_scorer(config: Use) -> Reward:
    scorer = cast("Callable[..., float]", load_attr(config.use, where="tasks.reward.use"))
    check_args(scorer, config.args, where="tasks.reward.args")
    return partial(scorer, **config.args)
