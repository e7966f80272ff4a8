"""Makes a task from a row of data: its prompt, its answer, and the columns that the reward needs.

A prompt is text, or a chat whose last message is the user's. The other messages become the task's context, so
every workflow handles the task like any other. A value that a task can't hold is an error that names the row
and the column. So are the substitutes that tools write for a value: NaN for a missing one, and text for a
chat.
"""

import datetime
import json
import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, cast, get_args

import msgspec

from astraflow import wire
from astraflow.errors import DataError, WireError
from astraflow.tasks.variants import PROMPT_MARK, RowsConfig
from astraflow.types import Message, Task
from astraflow.types.row_columns import Row, number_text, with_row
from astraflow.user_input.mistakes import nearest_hint

__all__ = ["name_row_in_errors", "shorten", "system_context", "task_from_row"]

_ROLES: tuple[str, ...] = get_args(msgspec.structs.fields(Message)[0].type)
_USUAL = {
    "prompt_key": ("question", "problem", "instruction", "messages", "query", "input"),
    "answer_key": ("reward_model.ground_truth", "ground_truth", "solution", "target", "label", "output"),
}
"""Usual names of the columns for prompts and answers in data sets, for hints."""
_MISSING = ("nan", "NaN", "<NA>", "NaT")
"""What pandas writes for a missing value when it turns a column into text."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""NUL, and halves of surrogate pairs, which don't occur in real text."""
_CHAT_START = re.compile(r"""\s*\[?\s*\{\s*["'](role|content|from|value)["']\s*:""")
_CHAT_KEYS = (
    re.compile(r"""["'](role|from)["']\s*:"""),
    re.compile(r"""["'](content|value)["']\s*:"""),
)


def task_from_row(row: Mapping[str, Any], config: RowsConfig, *, task: Task, where: str) -> Task:
    """Makes the task with the row's prompt, answer and columns.

    `task`: has the id and source. `where`: names the row in messages.
    Raises: DataError if a column is missing, or its value cannot be a prompt or an answer.
    """
    prompt = _value(row, config.prompt_key, where, "prompt_key")
    is_chat = isinstance(prompt, list | tuple)
    context, text = (
        _chat(cast("Sequence[object]", prompt), config, where)
        if is_chat
        else (system_context(config.system), _text(prompt, config.prompt_key, where))
    )
    if _is_blank(text):
        raise DataError(f"{where}: {config.prompt_key!r} is empty; fill it in, or remove the row")
    if not is_chat and _is_chat_text(text):
        raise DataError(
            f"{where}: {config.prompt_key!r} is a chat that was written as text: {shorten(text)}; store it "
            "as a list of messages, e.g. with json.loads, so the model's chat template applies"
        )
    if config.template:
        text = config.template.replace(PROMPT_MARK, text)
    answer, value = _answer(row, config, where)
    columns = {name: _value(row, name, where, "columns", is_path=False) for name in config.columns}
    made = msgspec.structs.replace(task, prompt=text, context=context, answer=answer)
    try:
        return wire.checked(with_row(made, Row(columns=columns, answer=value, is_chat=is_chat)))
    except (DataError, WireError) as err:
        at = next((name for name in (config.answer_key, *columns) if _has_surrogate(row.get(name))), "")
        raise DataError(f"{where}{f': {at!r}' if at else ''}: {err}") from err


def system_context(system: str) -> tuple[Message, ...]:
    """The messages before a prompt: the system message, unless it is empty."""
    return (Message(role="system", content=system),) if system else ()


@contextmanager
def name_row_in_errors(task: Task, config: object) -> Generator[None]:
    """Adds file and line to an error about a task of a file. `config`: the config of the task's source."""
    try:
        yield
    except DataError as err:
        if not isinstance(config, RowsConfig):
            raise
        raise DataError(f"{config.row_place(int(task.id.rpartition('/')[2]))}: {err}") from err


def shorten(text: str) -> str:
    """Shortens a text for messages, to 60 characters."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def _value(row: Mapping[str, Any], key: str, where: str, setting: str, *, is_path: bool = True) -> Any:
    """The value of a key, or of a path of keys: `a.b` is the value of `b` in the mapping or list of column
    `a`.

    `setting`: the recipe's key that names `key`. Raises: DataError with the nearest key if there is none.
    """
    if key in row or not is_path or "." not in key:
        return _step(row, key, where, key, setting)
    value: Any = row
    done: list[str] = []
    for part in key.split("."):
        at = f"{where}: {'.'.join(done)!r}" if done else where
        value = _step(value, part, at, key, setting)
        done.append(part)
    return value


def _step(value: object, part: str, where: str, key: str, setting: str) -> Any:
    if isinstance(value, Mapping):
        row = cast("Mapping[str, Any]", value)
        if part in row:
            return row[part]
        hint = _hint(part, row, setting if part == key else "")
        raise DataError(f"{where} has no key {part!r}{hint}; name the right one in the recipe's {setting}")
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        if part.isdigit() and int(part) < len(items):
            return items[int(part)]
        raise DataError(f"{where} is a list of {len(items)}; {part!r} is not a position in it ({setting})")
    raise DataError(f"{where} is {shorten(repr(value))}, which has no key {part!r} ({setting} = {key!r})")


def _hint(key: str, row: Mapping[str, Any], setting: str) -> str:
    names = sorted(str(name) for name in row)
    suggestion = nearest_hint(key, names)
    usual = next((name for name in _USUAL.get(setting, ()) if _has(row, name)), "")
    if usual and not suggestion:
        suggestion = f'; did you mean "{usual}"?'
    return f"{suggestion} (keys: {', '.join(names)})"


def _has(row: Mapping[str, Any], path: str) -> bool:
    first, _, rest = path.partition(".")
    if first not in row:
        return False
    below = row[first]
    return not rest or (isinstance(below, Mapping) and rest in below)


def _text(value: object, key: str, where: str) -> str:
    """A text or number as text. Raises: DataError for other values, and for substitutes of a missing
    value."""
    if value is None or (isinstance(value, float) and math.isnan(value)) or value in _MISSING:
        way_out = (
            f" (if it is the right answer, write it as a list: [{value!r}])" if value in _MISSING else ""
        )
        raise DataError(
            f"{where}: {key!r} is {value!r}, which means a missing value; expected a text or a number: fill "
            f"it in, or remove the row{way_out}"
        )
    if isinstance(value, str):
        return _check_text(value, f"{where}: {key!r}")
    if isinstance(value, Decimal) and value.is_finite():
        return format(value, "f")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return number_text(value)
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        raise DataError(
            f"{where}: {key!r} is {value!r}, which isn't a text; if the file has a text there, the source "
            "`jsonl` reads it as it is written; else store the column as text"
        )
    raise DataError(f"{where}: {key!r} is {shorten(repr(value))}; expected a text or a finite number")


def _check_text(text: str, what: str) -> str:
    """Returns the text. Raises: DataError if it contains characters that are not text."""
    if match := _NO_TEXT.search(text):
        kind = "a NUL" if match[0] == "\0" else "half of a surrogate pair, which is not valid Unicode"
        raise DataError(
            f"{what} has {match[0]!r} at character {match.start() + 1}, {kind}; correct the text, or remove "
            "the character"
        )
    return text


def _has_surrogate(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return True
    return False


def _is_blank(text: str) -> bool:
    """Whether a text has no visible character."""
    return not any(char.isprintable() and not char.isspace() for char in text)


def _is_chat_text(text: str) -> bool:
    """Whether a text is one or several chat messages, written as JSON or Python text."""
    is_begun = _CHAT_START.match(text) is not None
    return is_begun and text.rstrip()[-1] in "]}" and all(key.search(text) for key in _CHAT_KEYS)


def _answer(row: Mapping[str, Any], config: RowsConfig, where: str) -> tuple[str, Any]:
    """The answer as text, and its value if it isn't a text but JSON can hold it."""
    if not config.answer_key:
        return "", None
    value = _value(row, config.answer_key, where, "answer_key")
    if isinstance(value, list | tuple | dict | bool):
        plain = cast("Any", value)
        try:
            return json.dumps(plain, ensure_ascii=False, allow_nan=False), plain
        except (TypeError, ValueError) as err:
            raise DataError(
                f"{where}: {config.answer_key!r} cannot be written as JSON: {err}; correct the answer, or "
                "remove the row"
            ) from err
    text = _text(value, config.answer_key, where)
    return text, value if isinstance(value, int | float) else None


def _chat(prompt: Sequence[object], config: RowsConfig, where: str) -> tuple[tuple[Message, ...], str]:
    """The messages before the last one, and the text of the last one, which is the user's."""
    if not prompt:
        raise DataError(f"{where}: {config.prompt_key!r} is empty")
    at = f"{where}: {config.prompt_key!r}, message"
    messages = [_message(entry, f"{at} {number}") for number, entry in enumerate(prompt, start=1)]
    for number, message in enumerate(messages, start=1):
        if message.role == "user" and _is_blank(message.content):
            raise DataError(
                f"{where}: {config.prompt_key!r} is empty: the user's message {number} has no text; fill it "
                "in, or remove the row"
            )
    last = messages[-1]
    if last.role != "user":
        raise DataError(
            f"{at} {len(messages)} has the role {last.role!r}; the last message of a prompt must be the "
            "user's, which the policy answers"
        )
    if config.system and any(message.role == "system" for message in messages):
        raise DataError(
            f"{where}: the prompt has a system message already; remove `system` from the recipe's source, or "
            "the message from the data"
        )
    return (*system_context(config.system), *messages[:-1]), last.content


def _message(entry: object, where: str) -> Message:
    """Reads a chat message. Ignores keys without a value: Arrow adds the keys of other rows to each
    message."""
    if not isinstance(entry, Mapping):
        raise DataError(f"{where} is {shorten(repr(entry))}; expected a mapping with `role` and `content`")
    fields = {str(key): value for key, value in cast("Mapping[Any, Any]", entry).items() if value is not None}
    missing = [key for key in ("role", "content") if key not in fields]
    if missing:
        raise DataError(f"{where} has no {missing[0]!r} (keys: {', '.join(sorted(fields))})")
    further = sorted(fields.keys() - {"role", "content", "name"})
    if further:
        raise DataError(
            f"{where} has the key {further[0]!r}, which is not supported (supported: role, content, name)"
        )
    role = fields["role"]
    if role not in _ROLES:
        raise DataError(f"{where} has the role {role!r} (choices: {', '.join(_ROLES)})")
    name = fields.get("name", "")
    return Message(role=role, content=_content(fields["content"], where), name=name)


def _content(content: Any, where: str) -> str:
    """The text of a message, which may be given in parts: `[{"type": "text", "text": ...}]`."""
    if isinstance(content, str):
        return _check_text(content, f"{where}: its content")
    excerpt = shorten(repr(content))
    parts = cast("Sequence[Any]", content) if isinstance(content, list | tuple) else ()
    texts = [_part(part) for part in parts]
    if not texts or None in texts:
        raise DataError(f"{where} has the content {excerpt}; expected a text, or parts of type `text`")
    return _check_text("".join(cast("list[str]", texts)), f"{where}: its content")


def _part(part: Any) -> str | None:
    fields = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
    text = fields.get("text")
    return text if fields.get("type") == "text" and isinstance(text, str) else None
