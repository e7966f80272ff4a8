"""Answers: extracts them from completions, finds the right ones of a task, and compares the two."""

import ast
import json
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Literal, cast

from astraflow.config import Config
from astraflow.errors import DataError
from astraflow.protocols import Scorer, ScoringCall
from astraflow.tasks.rows import shorten
from astraflow.tasks.variants import PromptsConfig, RowsConfig
from astraflow.types import Task
from astraflow.types.model_text import without_reasoning
from astraflow.types.row_columns import answers_of

__all__ = ["AnswerScorer", "answer_checker", "extract_answer", "group_end", "has_text", "right_answers"]


def extract_answer(text: str, *, mode: str) -> str | None:
    """The part of a completion that is compared with the answer; None if the completion lacks it.

    Reasoning is never part of it, and a completion that is nothing but reasoning lacks it.

    Modes: `whole`; `last_line` (the last line that is not blank); `after_equals` (the text after the last
    `=`); `answer_tag` (the content of the last `<answer>...</answer>`); `boxed` (the content of the last
    `\\boxed{...}`).
    """
    reply = without_reasoning(text)
    if reply != text.strip():
        text = reply
        if not text:
            return None
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
    end = group_end("{" + rest, 0) if opening else None
    return None if end is None else rest[: end - 2].strip()


_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "after_equals": _after_equals,
    "answer_tag": _answer_tag,
    "boxed": _boxed,
    "last_line": _last_line,
    "whole": lambda text: text,
}


def group_end(text: str, start: int) -> int | None:
    """The position after the brace that closes the group at `start`; None if the group is not closed."""
    depth = 0
    position = start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1
        else:
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return position + 1
        position += 1
    return None


class AnswerScorer(Scorer):
    """Compares a text with the right answers of its task. Example: `AnswerScorer(exact_match)`."""

    def __init__(self, compare: Callable[[str, Sequence[str]], float]) -> None:
        self._compare = compare

    def __call__(self, call: ScoringCall) -> float:
        """Returns the score. Raises: DataError if the task has no answer."""
        return self._compare(call.text, right_answers(call.task, has_text))


def has_text(answer: str) -> bool:
    """Whether an answer has text that can be compared. Blanks and invisible characters are none."""
    return any(char.isprintable() and not char.isspace() for char in answer)


def right_answers(task: Task, is_answer: Callable[[str], bool]) -> tuple[str, ...]:
    """The task's right answers for which `is_answer` holds. Raises: DataError if there are none."""
    answers = tuple(answer for answer in answers_of(task) if is_answer(answer))
    if not answers:
        raise DataError(
            f"task {task.id} has no answer to compare with: its answer is {task.answer[:60]!r}; fix the "
            "data, or name another scorer in tasks.reward"
        )
    return answers


def answer_checker(
    source: Config, is_answer: Callable[[str], bool], *, allowed: Collection[str] = ()
) -> Callable[[Task], object] | None:
    """Makes the check of a source's answers before a run; None if its tasks are not rows of data.

    `allowed`: kinds of values that an answer may be as JSON or Python text: `list`, `mapping` or `text`.
    """
    if not isinstance(source, PromptsConfig):
        return None
    is_of_file = isinstance(source, RowsConfig)

    def check(task: Task) -> None:
        for answer in right_answers(task, is_answer):
            if is_of_file:
                _check_text(answer, allowed)

    return check


def _check_text(answer: str, allowed: Collection[str]) -> None:
    """Raises: DataError if an answer is a value written as text, which no completion would match."""
    kind = _kind_in_text(answer)
    if kind and kind not in allowed:
        raise DataError(
            f"the answer is {shorten(answer)}, a {kind} that was written as JSON or Python text, which no "
            "completion matches; store the value itself, and if it is a mapping, name the key of the answer, "
            "e.g. answer_key: answer.ground_truth"
        )


def _kind_in_text(text: str) -> Literal["", "list", "mapping", "text"]:
    """The kind of value that an answer contains as JSON or Python text; empty for a plain answer.

    A list of numbers is a plain answer: `[0, 1]` is an interval.
    """
    stripped = text.strip()
    if stripped[:1] not in {"[", "{", '"', "'"}:
        return ""
    try:
        value: object = json.loads(stripped)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings(action="ignore"):  # about backslashes, of which LaTeX has many
                value = ast.literal_eval(stripped)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return ""
    match value:
        case dict():
            return "mapping"
        case str():
            return "text"
        case list():
            entries = cast("list[object]", value)
            return "" if entries and _is_numeric(entries) else "list"
        case _:
            return ""


def _is_numeric(value: object) -> bool:
    """Whether a value is a number, or a list or tuple of such values."""
    if isinstance(value, list | tuple):
        return all(_is_numeric(entry) for entry in cast("Sequence[object]", value))
    return isinstance(value, int | float) and not isinstance(value, bool)
