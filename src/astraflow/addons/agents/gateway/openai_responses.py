"""OpenAI's Responses API on top of chat completions, with the same policies, histories, and recordings.

A request is converted to a `ChatRequest`, and its answer to a `Response` or the events of a stream. Input
items are messages, calls, and results of calls. `previous_response_id` continues an answer of the same
episode. What only OpenAI's servers can do (hosted tools, stored prompts and conversations, background
requests) is refused by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from astraflow.addons.agents.gateway.chat_wire import (
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    ChatTool,
    Choice,
    ContentPart,
    JsonSchema,
    ReplyFormat,
    TokenLogprob,
    assistant_message,
    bad_request,
    parts_of,
    text_of,
)
from astraflow.types.bounds import (
    JsonText,
    Label,
    LongText,
    OpaqueId,
    Position,
    Temperature,
    TopP,
    UncheckedLabel,
    as_label,
)

__all__ = [
    "Event",
    "InputItem",
    "OutputItem",
    "OutputText",
    "Response",
    "ResponseUsage",
    "ResponsesRequest",
    "chat_of",
    "events_of",
    "input_messages",
    "response_of",
]

_MAX_ITEMS = 16_384
_MAX_PARTS = 1024
"""Largest number of parts in a message, and of tools and `include` entries in a request."""
_WITH_LOGPROBS = "message.output_text.logprobs"

_EchoedValue = object
"""A value of the request that the answer repeats unchanged."""
_Schema = Annotated[dict[str, object], Meta(max_length=_MAX_PARTS)]


# --- requests -------------------------------------------------------------------------------------


_Content = LongText | Annotated[tuple[ContentPart, ...], Meta(max_length=_MAX_PARTS)]
_TEXTS = ("input_text", "output_text", "text")
"""Types of text parts."""


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message, a call, or the result of a call. Unknown fields are ignored, because clients send items back
    with fields that they have added."""

    type: Label = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content | None = None
    call_id: OpaqueId = ""
    name: Label = ""
    namespace: Label | None = None
    arguments: JsonText = "{}"
    output: _Content | None = None


class _GroupedTool(msgspec.Struct, frozen=True, kw_only=True):
    type: Label
    name: Label = ""
    description: LongText | None = None
    parameters: _Schema | None = None


class _Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: Label
    name: Label = ""
    description: LongText | None = None
    parameters: _Schema | None = None
    tools: Annotated[tuple[_GroupedTool, ...], Meta(max_length=_MAX_PARTS)] | None = None
    """The tools of a group. A group has the type `namespace`."""


class _Format(msgspec.Struct, frozen=True):
    type: Label
    name: Label = ""
    schema: _Schema | None = None


class _TextSettings(msgspec.Struct, frozen=True):
    format: _Format | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`."""

    model: Label
    input: LongText | Annotated[tuple[InputItem, ...], Meta(max_length=_MAX_ITEMS)]
    instructions: LongText | None = None
    previous_response_id: OpaqueId | None = None
    max_output_tokens: Position | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    tools: Annotated[tuple[_Tool, ...], Meta(max_length=_MAX_PARTS)] | None = None
    tool_choice: UncheckedLabel | _Schema | None = None
    text: _TextSettings | None = None
    include: Annotated[tuple[UncheckedLabel, ...], Meta(max_length=_MAX_PARTS)] | None = None
    top_logprobs: Position | None = None
    background: bool | None = None
    stream_options: object = None
    max_tool_calls: object = None
    parallel_tool_calls: object = None
    reasoning: object = None
    metadata: object = None
    store: object = None
    truncation: object = None
    user: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    prompt_cache_retention: object = None
    client_metadata: object = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer includes the logprobs of its tokens."""
        return _WITH_LOGPROBS in (self.include or ())


def chat_of(request: ResponsesRequest, messages: Sequence[ChatMessage]) -> ChatRequest:
    """Converts a request to a chat request. `messages`: the whole conversation, without the instructions.

    Raises: RefusedError if a policy can't do what it asks for.
    """
    if request.background:
        raise bad_request("background: background requests are not supported; leave it out")
    if len(messages) > _MAX_ITEMS:
        raise bad_request(f"the conversation has {len(messages)} messages; it may have {_MAX_ITEMS}")
    if request.instructions:
        messages = (ChatMessage(role="system", content=request.instructions), *messages)
    return ChatRequest(
        model=request.model,
        messages=tuple(messages),
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=_chat_tools(request.tools) if request.tools else None,
        tool_choice=_chat_tool_choice(request.tool_choice),
        logprobs=request.has_logprobs or None,
        top_logprobs=request.top_logprobs,
        response_format=_chat_format(request.text),
    )


def input_messages(request: ResponsesRequest) -> tuple[ChatMessage, ...]:
    """Converts the input to chat messages. A call belongs to the assistant message before it.

    Raises: RefusedError for an item that isn't a message, a call, or the result of a call.
    """
    if isinstance(request.input, str):
        return (ChatMessage(role="user", content=request.input),)
    messages: list[ChatMessage] = []
    for item in request.input:
        if item.type == "function_call" and messages and messages[-1].role == "assistant":
            messages[-1] = _with_call(messages[-1], item)
        else:
            messages.append(_chat_message(item))
    return tuple(messages)


def _chat_message(item: InputItem) -> ChatMessage:
    match item.type:
        case "message" if item.role is not None:
            read = parts_of if item.role == "user" else text_of
            return ChatMessage(role=item.role, content=read(item.content, _TEXTS))
        case "function_call":
            return _with_call(ChatMessage(role="assistant"), item)
        case "function_call_output":
            return ChatMessage(role="tool", content=text_of(item.output, _TEXTS), tool_call_id=item.call_id)
        case _:
            raise bad_request(
                f"input: an item of type {item.type!r} cannot be shown to a policy; expected message with a "
                "role, function_call or function_call_output",
                "unsupported_value",
            )


def _with_call(message: ChatMessage, item: InputItem) -> ChatMessage:
    """Adds a call to an assistant message."""
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return assistant_message(
        message.text, [*calls, (item.call_id, _shown_name(item.namespace, item.name), item.arguments)]
    )


def _chat_tools(tools: Sequence[_Tool]) -> tuple[ChatTool, ...]:
    """Converts tools to chat tools. The tools of a group get the group's name as a prefix."""
    chat_tools: list[ChatTool] = []
    for tool in tools:
        if tool.type == "namespace":
            chat_tools += [_chat_tool(each, tool.name) for each in tool.tools or ()]
        else:
            chat_tools.append(_chat_tool(tool, None))
    if len(chat_tools) > _MAX_PARTS:
        raise bad_request(
            f"tools: there are {len(chat_tools)} with those of groups; there may be {_MAX_PARTS}"
        )
    return tuple(chat_tools)


def _chat_tool(tool: _Tool | _GroupedTool, namespace: str | None) -> ChatTool:
    name = _shown_name(namespace, tool.name)
    if tool.type != "function":
        raise bad_request(
            f"tools: no policy has a tool of type {tool.type!r} (name {name!r}); only function tools, which "
            "the caller runs",
            "unsupported_value",
        )
    if as_label(name) != name:
        raise bad_request(f"tools: the name {as_label(name)!r}, with that of its group, is too long")
    function = {"name": name, "description": tool.description, "parameters": tool.parameters}
    return msgspec.convert({"type": "function", "function": function}, ChatTool)


def _shown_name(namespace: str | None, name: str) -> str:
    """A tool's name as the policy sees it."""
    return f"{namespace}.{name}" if namespace else name


def _chat_tool_choice(choice: str | dict[str, object] | None) -> str | dict[str, object] | None:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case _:
            return choice


def _chat_format(settings: _TextSettings | None) -> ReplyFormat | None:
    if settings is None or settings.format is None:
        return None
    wish = settings.format
    return ReplyFormat(wish.type, JsonSchema(wish.name, wish.schema))


# --- answers --------------------------------------------------------------------------------------

_Status = Literal["in_progress", "completed", "incomplete"]


class _Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class OutputText(_Answer, frozen=True, kw_only=True):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: tuple[()]
    logprobs: tuple[TokenLogprob, ...]


class OutputItem(_Answer, frozen=True, kw_only=True):
    """A message with `role` and `content`, or a call with `call_id`, `name`, and `arguments`."""

    id: str
    type: Literal["message", "function_call"]
    status: _Status
    role: str | None = None
    content: tuple[OutputText, ...] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    """The group of the tool, if it has one."""
    arguments: str | None = None


class _CachedTokens(_Answer, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class _ReasoningTokens(_Answer, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(_Answer, frozen=True, kw_only=True):
    """The token counts of a request. Reasoning is not counted separately."""

    input_tokens: int
    input_tokens_details: _CachedTokens
    output_tokens: int
    output_tokens_details: _ReasoningTokens
    total_tokens: int


class _Incomplete(_Answer, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"]


class Response(_Answer, frozen=True, kw_only=True):
    """The answer to a request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: _Status
    model: str
    output: tuple[OutputItem, ...]
    instructions: str | None
    previous_response_id: str | None
    tools: tuple[_Tool, ...]
    tool_choice: _EchoedValue
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    metadata: _EchoedValue
    error: None
    incomplete_details: _Incomplete | None
    usage: ResponseUsage | None


class Event(_Answer, frozen=True, kw_only=True):
    """One event of a stream."""

    type: str
    sequence_number: int
    response: Response | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


def response_of(request: ResponsesRequest, completed: ChatCompletion) -> Response:
    """Converts a chat completion to the answer to a Responses request."""
    choice = completed.choices[0]
    is_cut = choice.finish_reason == "length"
    usage = completed.usage
    return Response(
        id=completed.id.replace("chatcmpl-", "resp_"),
        object="response",
        created_at=completed.created,
        status="incomplete" if is_cut else "completed",
        model=completed.model,
        output=_output_items(
            choice, completed.id.removeprefix("chatcmpl-"), _names_by_group(request.tools or ())
        ),
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        tools=request.tools or (),
        tool_choice=request.tool_choice or "auto",
        parallel_tool_calls=True,
        temperature=request.temperature,
        top_p=request.top_p,
        metadata=request.metadata or {},
        error=None,
        incomplete_details=_Incomplete(reason="max_output_tokens") if is_cut else None,
        usage=ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=_CachedTokens(cached_tokens=0, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=_ReasoningTokens(reasoning_tokens=0),
            total_tokens=usage.total_tokens,
        ),
    )


def _names_by_group(tools: Sequence[_Tool]) -> dict[str, tuple[str, str]]:
    """Name that the policy sees -> group and name, for the tools of groups."""
    return {
        _shown_name(tool.name, each.name): (tool.name, each.name)
        for tool in tools
        if tool.type == "namespace"
        for each in tool.tools or ()
    }


def _output_items(
    choice: Choice, name: str, grouped: Mapping[str, tuple[str, str]]
) -> tuple[OutputItem, ...]:
    """Converts a completion to items: its text (unless it is empty and there are calls), and its calls."""
    assert choice.message is not None
    status: _Status = "incomplete" if choice.finish_reason == "length" else "completed"
    text = choice.message.content or ""
    calls = tuple(
        OutputItem(
            id=f"fc_{name}_{place}",
            type="function_call",
            status=status,
            call_id=call.id,
            namespace=grouped.get(call.function.name, (None, ""))[0],
            name=grouped.get(call.function.name, ("", call.function.name))[1],
            arguments=call.function.arguments,
        )
        for place, call in enumerate(choice.message.tool_calls)
    )
    if calls and not text:
        return calls
    logprobs = choice.logprobs.content if choice.logprobs else ()
    part = OutputText(type="output_text", text=text, annotations=(), logprobs=logprobs)
    message = OutputItem(id=f"msg_{name}", type="message", status=status, role="assistant", content=(part,))
    return (message, *calls)


def events_of(response: Response) -> Iterator[Event]:
    """Converts an answer to a stream: its start, each item in one piece, and its end."""
    begun = msgspec.structs.replace(
        response, status="in_progress", output=(), incomplete_details=None, usage=None
    )
    events = [
        Event(type="response.created", sequence_number=0, response=begun),
        Event(type="response.in_progress", sequence_number=0, response=begun),
    ]
    for place, item in enumerate(response.output):
        events += _call_events(item, place) if item.content is None else _message_events(item, place)
    events.append(Event(type=f"response.{response.status}", sequence_number=0, response=response))
    for number, event in enumerate(events):
        yield msgspec.structs.replace(event, sequence_number=number)


def _message_events(item: OutputItem, place: int) -> list[Event]:
    assert item.content
    part = item.content[0]
    begun = msgspec.structs.replace(item, status="in_progress", content=())
    empty = msgspec.structs.replace(part, text="", logprobs=())
    at = Event(type="", sequence_number=0, output_index=place, content_index=0, item_id=item.id)
    return [
        Event(type="response.output_item.added", sequence_number=0, output_index=place, item=begun),
        msgspec.structs.replace(at, type="response.content_part.added", part=empty),
        msgspec.structs.replace(
            at, type="response.output_text.delta", delta=part.text, logprobs=part.logprobs
        ),
        msgspec.structs.replace(at, type="response.output_text.done", text=part.text, logprobs=part.logprobs),
        msgspec.structs.replace(at, type="response.content_part.done", part=part),
        Event(type="response.output_item.done", sequence_number=0, output_index=place, item=item),
    ]


def _call_events(item: OutputItem, place: int) -> list[Event]:
    begun = msgspec.structs.replace(item, status="in_progress", arguments="")
    at = Event(type="", sequence_number=0, output_index=place, item_id=item.id)
    kind = "response.function_call_arguments"
    return [
        Event(type="response.output_item.added", sequence_number=0, output_index=place, item=begun),
        msgspec.structs.replace(at, type=f"{kind}.delta", delta=item.arguments),
        msgspec.structs.replace(at, type=f"{kind}.done", name=item.name, arguments=item.arguments),
        Event(type="response.output_item.done", sequence_number=0, output_index=place, item=item),
    ]
