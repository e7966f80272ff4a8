"""Conversations in rows of data: which turns are trained, and why a row can't be learned.

Keys of a message that aren't listed here are ignored. Whether a conversation fits the policy's chat template
and context is decided where it is rendered (`supervised.py`).
"""

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from msgspec.structs import replace

from astraflow import wire
from astraflow.addons.data_sets.config import HubSourceConfig
from astraflow.addons.data_sets.hub_rows import load_rows
from astraflow.addons.view.trace_formats import rows_of
from astraflow.errors import DataError, WireError
from astraflow.tasks.sources import ListSource
from astraflow.types import Task, ToolSpec
from astraflow.types.bounds import as_label
from astraflow.types.model_text import find_reasoning

if TYPE_CHECKING:
    from astraflow.addons.supervised.config import MessagesSourceConfig

__all__ = ["Chat", "Function", "Turn", "UnfitRowError", "chat_of_row", "read_chats"]

_log = logging.getLogger(__name__)
_MOST_NAMED = 20
"""Number of rows that a warning names for each reason."""
Unfit = Literal[
    "bad_message", "empty_turn", "nothing_trained", "bad_calls", "too_long", "refused_by_template"
]


class UnfitRowError(DataError):
    """A row can't be learned. `kind`: the reason, as metrics name it."""

    def __init__(self, kind: Unfit, text: str) -> None:
        super().__init__(text)
        self.kind: Unfit = kind


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of a function, or its description."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """A mapping, once the row is read."""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Call(msgspec.Struct, frozen=True):
    function: Function
    id: str | None = None
    type: str = "function"


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message in the format of OpenAI's chat completions. Once read, `reasoning_content` has all reasoning,
    a result names its tool, and `train` is set."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: object = None
    tool_call_id: str | None = None
    name: str | None = None
    train: bool | None = None
    weight: float | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """The tokens of the assistant's reply and its end, if they are known with those of the whole prompt."""

    @property
    def text(self) -> str:
        """The content of a turn that was read."""
        return cast("str", self.content)

    @property
    def calls(self) -> list[Function]:
        """The functions that it calls."""
        return [call.function for call in self.tool_calls or ()]


class Chat(msgspec.Struct, frozen=True, tag_field="kind", tag="messages"):
    """A conversation, as a task's `spec` holds it."""

    turns: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...]


def read_chats(config: "MessagesSourceConfig", *, name: str) -> ListSource:
    """Reads the conversations of a data set. Raises: ConfigError or DataError if there is none to learn."""
    data_set = HubSourceConfig(path=config.path, subset=config.subset, split=config.split)
    is_json = config.path.endswith((".json", ".jsonl"))
    tasks: list[Task] = []
    unfit: dict[Unfit, list[str]] = {}
    num_rows = 0
    for number, row in enumerate(load_rows(data_set), start=1):
        try:
            rows = rows_of(row if is_json else _without_missing(row))
            chats = [chat_of_row(each, only_last=config.train == "last") for each in rows]
            found = [_task(name, number, part, chat) for part, chat in enumerate(chats)]
        except (DataError, WireError) as err:
            kind: Unfit = err.kind if isinstance(err, UnfitRowError) else "bad_message"
            unfit.setdefault(kind, []).append(f"row {number}: {err}")
        else:
            num_rows += 1
            tasks += found
    total = num_rows + sum(map(len, unfit.values()))
    for kind, rows in unfit.items():
        named = "; ".join(rows[:_MOST_NAMED]) + ("; ..." if len(rows) > _MOST_NAMED else "")
        _log.warning("%s: %d of %d rows are left out (%s): %s", config.path, len(rows), total, kind, named)
    if not tasks:
        first = next((rows[0] for rows in unfit.values()), "it has no rows")
        raise DataError(f"{config.path} has no conversation that can be learned: {first}")
    return ListSource(tasks)


def _task(name: str, number: int, part: int, chat: Chat) -> Task:
    """Makes the task of a row's conversation number `part`. Raises: WireError if it is too long."""
    asked = next((turn.text for turn in chat.turns if turn.role == "user"), "")
    spec = msgspec.json.encode(chat).decode()
    place = f"{number - 1}.{part}" if part else str(number - 1)
    return wire.checked(Task(id=f"{name}/{place}", source=name, prompt=asked, spec=spec))


def _without_missing(value: Any) -> Any:
    """Drops keys without a value: Arrow adds the keys of other rows to each mapping."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return {key: _without_missing(each) for key, each in pairs if each is not None}
    return [_without_missing(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def chat_of_row(row: Mapping[str, Any], *, only_last: bool = False) -> Chat:
    """Reads a row's conversation, and checks it. `only_last`: only the assistant's last turn is trained,
    unless messages have flags. Raises: UnfitRowError if it can't be learned."""
    given: list[Turn] = _converted(row.get("messages"), list[Turn])
    listed = _converted(row.get("tools") or [], list[dict[str, Any]])
    functions: list[Function] = _converted([each.get("function", each) for each in listed], list[Function])
    tools = tuple(
        ToolSpec(
            name=f.name,
            description=f.description or "",
            parameters=json.dumps(f.parameters or {"type": "object", "properties": {}}),
        )
        for f in functions
    )
    own = [idx for idx, turn in enumerate(given) if turn.role == "assistant"]
    turns: list[Turn] = []
    waiting: list[tuple[str | None, _Call]] = []
    num_calls = 0
    for idx, turn in enumerate(given):
        at = f"message {idx + 1} ({turn.role})"
        flag = turn.weight if turn.train is None else turn.train
        if flag not in {None, 0, 1} or (flag and turn.role != "assistant"):
            raise UnfitRowError("bad_message", f"{at} has the weight {flag}; expected 1 (assistant) or 0")
        is_trained = bool(flag) if flag is not None else idx in (own[-1:] if only_last else own)
        read = replace(
            _read_turn(turn, at, num_calls), train=is_trained, name=turn.name and as_label(turn.name)
        )
        if turn.role == "tool":
            call = _take_call(waiting, turn, at)
            read = replace(read, name=call.function.name, tool_call_id=call.id)
        elif waiting:
            name = waiting[0][1].function.name
            raise UnfitRowError("bad_calls", f"{at}: the call of {name!r} has no result yet")
        if other := {call.name for call in read.calls} - {tool.name for tool in tools}:
            raise UnfitRowError("bad_calls", f"{at} calls {min(other)!r}, which isn't one of the row's tools")
        waiting += zip([call.id for call in turn.tool_calls or ()], read.tool_calls or (), strict=True)
        num_calls += len(read.calls)
        turns.append(read)
    if not any(turn.train for turn in turns):
        raise UnfitRowError("nothing_trained", "no turn of the assistant is trained")
    return Chat(tuple(turns), tools)


def _converted(value: object, kind: Any) -> Any:
    """Converts a column, which may be JSON text, to structs."""
    try:
        return msgspec.convert(json.loads(value) if isinstance(value, str) else value, kind)
    except (msgspec.ValidationError, ValueError, RecursionError) as err:
        raise UnfitRowError("bad_message", f"its messages or tools can't be read: {err}") from err


def _take_call(waiting: list[tuple[str | None, _Call]], turn: Turn, at: str) -> _Call:
    """Takes the call to which a result belongs out of a list: by its id, or else the first."""
    place = next((idx for idx, (id_, _) in enumerate(waiting) if turn.tool_call_id in {None, id_}), -1)
    if place < 0:
        raise UnfitRowError("bad_calls", f"{at} is a result without a call")
    return waiting.pop(place)[1]


def _read_turn(turn: Turn, at: str, num_calls: int) -> Turn:
    """The turn's text, reasoning, and calls, each in one form. `num_calls`: those of earlier turns. Ids are
    numbered, because Mistral's templates accept only nine letters and digits."""
    text = turn.content or ""
    if not isinstance(text, str):
        if other := next((part.type for part in text if part.type != "text"), ""):
            raise UnfitRowError("bad_message", f"{at} has a part of type {other!r}; only texts are learned")
        text = "".join(part.text for part in text)
    reasoning = (turn.reasoning_content or turn.reasoning or turn.thinking or "").strip()
    place = find_reasoning(text) if turn.role == "assistant" and not reasoning else None
    if place is not None and place.is_finished and not text[: place.start].strip():
        reasoning = place.text_in(text).strip()
        text = text[place.end :].lstrip()
    calls = [
        _Call(_read_call(call.function, at), id=f"call{number:05}")
        for number, call in enumerate(turn.tool_calls or (), start=num_calls)
    ]
    if turn.function_call or (calls and turn.role != "assistant"):
        raise UnfitRowError("bad_calls", f"{at} has calls that aren't `tool_calls` of the assistant")
    if turn.role == "assistant" and not calls and not text.strip() and not turn.token_ids:
        raise UnfitRowError("empty_turn", f"{at} is empty")
    return Turn(
        role=turn.role,
        content=text,
        reasoning_content=reasoning or None,
        tool_calls=calls or None,
        prompt_token_ids=turn.prompt_token_ids,
        token_ids=turn.token_ids,
    )


def _read_call(call: Function, at: str) -> Function:
    given = call.arguments or {}
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as err:
        raise UnfitRowError("bad_calls", f"{at}: the arguments of {call.name!r} aren't JSON: {err}") from err
    if not isinstance(given, dict):
        raise UnfitRowError("bad_calls", f"{at}: the arguments of {call.name!r} aren't a JSON object")
    return Function(call.name, cast("dict[str, Any]", given))
