"""50 questions of general knowledge, which show whether a model forgets while it learns something else, and
164 everyday requests. The texts are in `trivia.toml`.

A completion of an everyday request has no score: with `train.auxiliary.kl`, a recipe that draws them keeps
the model's answers close to those that it gave before the training.
"""

import re
import tomllib
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from astraflow.tasks.answers import has_text, right_answers
from astraflow.tasks.sources import ListSource
from astraflow.types import Task
from astraflow.types.row_columns import Row, with_row

__all__ = ["FACTS", "REQUESTS", "everyday_requests", "facts", "is_everyday", "knows_fact", "names_answer"]

_TEXTS = tomllib.loads(Path(__file__).with_name("trivia.toml").read_text("utf-8"))
FACTS: Sequence[tuple[str, Sequence[str]]] = _TEXTS["facts"]
"""(question, its right answers)."""
REQUESTS: Sequence[str] = _TEXTS["everyday"]
_EVERYDAY = "everyday"
_BEFORE = r"(?<!\w)(?<!\d[.,])(?<![-\u2212](?=\d))"
_AFTER = r"(?!\w|[+#](?!\s)|(?<=\d)[.,]\d)"


def facts(*, source: str) -> ListSource:
    """Makes the questions of general knowledge."""
    return ListSource(
        with_row(
            Task(id=f"{source}/trivia-{idx}", source=source, prompt=question, answer=answers[0]),
            Row(answer=answers) if len(answers) > 1 else Row(),
        )
        for idx, (question, answers) in enumerate(FACTS)
    )


def everyday_requests(*, source: str) -> ListSource:
    """Makes the everyday requests."""
    return ListSource(
        Task(id=f"{source}/everyday-{idx}", source=source, prompt=request, spec=_EVERYDAY)
        for idx, request in enumerate(REQUESTS)
    )


def is_everyday(task: Task) -> bool:
    """Returns whether a task is an everyday request."""
    return task.spec == _EVERYDAY


def knows_fact(task: Task, text: str) -> float:
    """1 if a completion contains one of the task's answers as a whole word; else 0. Meant for evaluation: a
    completion that lists many words would be right too.

    Raises: DataError if the task has no answer.
    """
    return float(names_answer(text, right_answers(task, has_text)))


def names_answer(text: str, answers: Sequence[str]) -> bool:
    """Returns whether one of the answers is in a text, as whole words and with any capitals.

    A number isn't a part of another one, such as `5` of `-5` and `1.5`, and `C` isn't in `C++`.
    """
    text = unicodedata.normalize("NFC", text)
    return any(
        re.search(
            rf"{_BEFORE}{re.escape(unicodedata.normalize('NFC', answer.strip()))}{_AFTER}",
            text,
            re.IGNORECASE,
        )
        for answer in answers
    )
