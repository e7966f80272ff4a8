"""The columns of a row of data that travel with its task, for the reward and the workflow.

They are stored in `Task.spec`, so the dataflow need not know what a column is. A task without columns whose
prompt and answer are plain texts has no such spec.
"""

import json
from typing import Any, cast

import msgspec

from astraflow.errors import DataError
from astraflow.types import Task

__all__ = ["Row", "answers_of", "is_of_row", "number_text", "row_of", "with_row"]

_MAX_CHARS = 1024 * 1024
"""Characters of the columns of one task, as JSON: they travel with each of its leases."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="row"):
    """The content of a task's row in addition to the texts of prompt and answer.

    Example: `Row(columns={"data_source": "openai/gsm8k"}, is_chat=True)`.
    """

    columns: dict[str, Any] = {}
    """Values by column: anything that JSON can hold."""
    answer: Any = None
    """The answer if it is not a text: a number, a list, a mapping, true or false. `Task.answer` has it as
    text or JSON."""
    is_chat: bool = False
    """Whether the prompt was a list of messages."""


def with_row(task: Task, row: Row) -> Task:
    """The task with its row in the spec; the same task if the row holds nothing further.

    Example: `with_row(task, Row(columns={"level": 3}))`; a reward `(task, text, *, level)` then gets 3.

    Raises: DataError if a value cannot be written as JSON, or if the columns are too large.
    """
    if row == Row():
        return task
    for name, value in (*row.columns.items(), ("the answer", row.answer)):
        _check_json(name, value)
    spec = json.dumps(msgspec.to_builtins(row), ensure_ascii=False)
    if len(spec) > _MAX_CHARS:
        largest = max(row.columns, key=lambda name: len(json.dumps(row.columns[name])), default="the answer")
        raise DataError(
            f"its columns have {len(spec)} characters as JSON (the largest: {largest}); a task has at most "
            f"{_MAX_CHARS}; list fewer columns"
        )
    return msgspec.structs.replace(task, spec=spec)


def row_of(task: Task) -> Row:
    """The row of a task; an empty one for a task of another kind."""
    if not task.spec:
        return Row()
    try:
        return msgspec.json.decode(task.spec, type=Row)
    except msgspec.DecodeError:
        return Row()  # the spec belongs to a source of another kind, such as reasoning-gym


def answers_of(task: Task) -> tuple[str, ...]:
    """The right answers of a task, each as text; none if it has no answer.

    They are the entries of a list of texts and numbers, or else the answer itself. Example: the row
    `{"question": "Who?", "answer": ["Ann", "Ann Lee"]}` has two.

    Raises: DataError if the answer is a mapping, a truth value, or a list that holds one.
    """
    value = row_of(task).answer
    if value is None:
        return (task.answer,) if task.answer.strip() else ()
    entries = cast("list[object]", value if isinstance(value, list) else [value])
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, str | int | float):
            raise DataError(
                f"the answer of task {task.id} is {task.answer[:60]}, not a text, a number or a list "
                "of them; only your own reward can compare it; set one in tasks.reward"
            )
    texts = [
        entry if isinstance(entry, str) else number_text(entry)
        for entry in cast("list[str | float]", entries)
    ]
    return tuple([text for text in texts if text.strip()])


def number_text(value: float) -> str:
    """A number as text. A whole one has no decimals: `7.0` is `7`.

    Tables store whole numbers as `7.0` if others of their column are missing or have decimals.
    """
    return str(value + 0).removesuffix(".0")  # `-0.0 + 0` is 0.0


def is_of_row(task: Task) -> bool:
    """Whether a task comes from a row of data: it has no spec, or one of this file."""
    return not task.spec or row_of(task) != Row()


def _check_json(name: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as err:
        kind = type(value).__name__
        raise DataError(
            f"{name!r} holds a {kind} that JSON cannot hold ({err}); store it as text (the source `jsonl` "
            "reads dates as text), or leave the column out"
        ) from err
