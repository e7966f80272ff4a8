"""Anthropic's Messages API on top of chat completions, with the same policies, histories, and recordings.

A request is converted to a `ChatRequest`, and its answer to a `MessageAnswer` or the events of a stream. The
blocks of messages are texts, images, calls (`tool_use`), and results of calls (`tool_result`). Everything
else is refused by name: documents, reasoning of another model, tools that Anthropic's servers run, and
prefilled replies.
"""

import json
from collections.abc import Iterator
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
    Model,
    ReplyFormat,
    assistant_message,
    bad_request,
    image_part,
    parts_of,
    text_of,
)
from astraflow.errors import RefusedError
from astraflow.types.bounds import Label, LongText, OpaqueId, Position, StopText, Temperature, TopP

__all__ = [
    "ContentBlock",
    "MessageAnswer",
    "MessageError",
    "MessageEvent",
    "MessageModel",
    "MessageModels",
    "MessageUsage",
    "MessagesRequest",
    "TokenCount",
    "chat_of",
    "events_of",
    "message_of",
    "models_of",
]

_MAX_MESSAGES = 16_384
_MAX_PARTS = 1024
"""Largest number of blocks in a message, and of tools in a request."""

_Parts = Annotated[tuple[ContentPart, ...], Meta(max_length=_MAX_PARTS)]
_Schema = Annotated[dict[str, object], Meta(max_length=_MAX_PARTS)]


# --- requests -------------------------------------------------------------------------------------


class _Source(msgspec.Struct, frozen=True):
    type: Label = ""
    media_type: Label = ""
    data: LongText = ""


class _Block(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a message. Unknown fields are ignored, because clients add fields when they send replies
    back."""

    type: Label
    text: LongText = ""
    id: OpaqueId = ""
    name: Label = ""
    input: _Schema | None = None
    tool_use_id: OpaqueId = ""
    content: LongText | _Parts | None = None
    source: _Source | None = None


class _Message(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: LongText | Annotated[tuple[_Block, ...], Meta(max_length=_MAX_PARTS)]


class _Tool(msgspec.Struct, frozen=True, kw_only=True):
    name: Label
    type: Label | None = None
    description: LongText | None = None
    input_schema: _Schema | None = None


class _ToolChoice(msgspec.Struct, frozen=True):
    type: Label
    name: Label = ""


class _Format(msgspec.Struct, frozen=True):
    type: Label
    schema: _Schema | None = None


class _OutputConfig(msgspec.Struct, frozen=True):
    format: _Format | None = None


class _Edit(msgspec.Struct, frozen=True):
    type: Label


class _ContextManagement(msgspec.Struct, frozen=True):
    edits: Annotated[tuple[_Edit, ...], Meta(max_length=_MAX_PARTS)] = ()


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`, and `POST /v1/messages/count_tokens`, which needs no `max_tokens`."""

    model: Label
    messages: Annotated[tuple[_Message, ...], Meta(max_length=_MAX_MESSAGES)]
    max_tokens: Position | None = None
    system: LongText | _Parts | None = None
    stop_sequences: Annotated[tuple[StopText, ...], Meta(max_length=32)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Position | None = None
    tools: Annotated[tuple[_Tool, ...], Meta(max_length=_MAX_PARTS)] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    context_management: _ContextManagement | None = None
    cache_control: object = None
    diagnostics: object = None
    inference_geo: object = None
    metadata: object = None
    service_tier: object = None
    speed: object = None
    thinking: object = None


def chat_of(request: MessagesRequest) -> ChatRequest:
    """Converts a request to a chat request.

    Raises: RefusedError if a policy can't do what it asks for.
    """
    _check(request)
    messages = [ChatMessage(role="system", content=text_of(request.system))] if request.system else []
    for message in request.messages:
        messages += _chat_messages(message)
    if len(messages) > _MAX_MESSAGES:
        raise bad_request(
            f"the conversation has {len(messages)} messages and results; it may have {_MAX_MESSAGES}"
        )
    return ChatRequest(
        model=request.model,
        messages=tuple(messages),
        max_completion_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        tools=tuple(map(_chat_tool, request.tools)) if request.tools else None,
        tool_choice=_chat_tool_choice(request.tool_choice),
        response_format=_chat_format(request),
    )


def _check(request: MessagesRequest) -> None:
    """Refuses what only Messages requests can ask for. `ChatRequest.check` refuses the rest."""
    if request.messages and request.messages[-1].role == "assistant":
        raise bad_request(
            "messages: the last one is the assistant's, but prefilled replies are not supported; end with a "
            "user message",
            "unsupported_value",
        )
    edits = request.context_management.edits if request.context_management else ()
    # Replies have no reasoning blocks, so there is nothing to clear.
    other = [edit.type for edit in edits if not edit.type.startswith("clear_thinking")]
    if other:
        raise bad_request(
            f"context_management: {other[0]!r} is not supported; edit the history in the agent, and send "
            "what the policy is to see",
            "unsupported_value",
        )


def _chat_messages(message: _Message) -> Iterator[ChatMessage]:
    """Converts a message to chat messages. Each result of a call becomes a separate message."""
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
    elif message.role == "assistant":
        yield _assistant_message(message.content)
    else:
        yield from _split_blocks(message.role, message.content)


def _assistant_message(blocks: tuple[_Block, ...]) -> ChatMessage:
    texts: list[str] = []
    calls: list[tuple[str, str, str]] = []
    for block in blocks:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            calls.append((block.id, block.name, json.dumps(block.input or {})))
        else:
            raise _unknown(block, "the assistant", "text or tool_use")
    return assistant_message("".join(texts), calls)


def _split_blocks(role: Literal["system", "user"], blocks: tuple[_Block, ...]) -> Iterator[ChatMessage]:
    """Splits blocks into messages: one per result, and one for the texts and images between results."""
    parts: list[ContentPart] = []
    for block in blocks:
        if block.type == "text":
            parts.append(ContentPart(type="text", text=block.text))
        elif block.type == "image" and role == "user":
            parts.append(_image(block))
        elif block.type == "tool_result":
            if parts:
                yield ChatMessage(role=role, content=parts_of(parts))
                parts = []
            yield ChatMessage(role="tool", content=text_of(block.content), tool_call_id=block.tool_use_id)
        else:
            raise _unknown(block, f"the {role}", "text, image or tool_result")
    if parts or not blocks:
        yield ChatMessage(role=role, content=parts_of(parts))


def _image(block: _Block) -> ContentPart:
    source = block.source
    if source is None or source.type != "base64":
        raise bad_request(
            f"messages: an image has a source of type {source.type if source else ''!r}; images are not "
            "fetched: send the file itself, with type base64",
            "unsupported_value",
        )
    return image_part(f"data:{source.media_type};base64,{source.data}")


def _unknown(block: _Block, speaker: str, expected: str) -> RefusedError:
    return bad_request(
        f"messages: a block of type {block.type!r} of {speaker} cannot be shown to a policy; expected "
        f"{expected}",
        "unsupported_value",
    )


def _chat_tool(tool: _Tool) -> ChatTool:
    if tool.type not in {None, "custom"}:
        raise bad_request(
            f"tools: no policy has a tool of type {tool.type!r}; only tools with an input_schema, which the "
            "caller runs",
            "unsupported_value",
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return msgspec.convert({"type": "function", "function": function}, ChatTool)


def _chat_tool_choice(choice: _ToolChoice | None) -> str | dict[str, object] | None:
    if choice is None:
        return None
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.name}}
        case _:
            raise bad_request("tool_choice: type must be auto, any, none or tool", "unsupported_value")


def _chat_format(request: MessagesRequest) -> ReplyFormat | None:
    wish = request.output_config.format if request.output_config else None
    wish = wish or request.output_format
    return None if wish is None else ReplyFormat(wish.type, JsonSchema("", wish.schema))


# --- answers --------------------------------------------------------------------------------------

_StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class _Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class ContentBlock(_Answer, frozen=True, kw_only=True):
    """A text, or a call with `id`, `name`, and `input`."""

    type: Literal["text", "tool_use"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw | None = None
    """As JSON."""


class MessageUsage(_Answer, frozen=True, kw_only=True):
    """The token counts of a request."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageAnswer(_Answer, frozen=True, kw_only=True):
    """The answer to a request."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: tuple[ContentBlock, ...]
    stop_reason: _StopReason | None
    """None until a stream ends."""
    stop_sequence: str | None
    """The text from `stop_sequences` that ended the reply, if one did."""
    usage: MessageUsage


class _Delta(_Answer, frozen=True, kw_only=True):
    type: Literal["text_delta", "input_json_delta"]
    text: str | None = None
    partial_json: str | None = None


class _End(_Answer, frozen=True, kw_only=True):
    stop_reason: _StopReason | None
    stop_sequence: str | None


class MessageEvent(_Answer, frozen=True, kw_only=True):
    """One event of a stream."""

    type: str
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: _Delta | _End | None = None
    usage: MessageUsage | None = None


class TokenCount(_Answer, frozen=True, kw_only=True):
    """The answer to `count_tokens`: the length of the prompt, rendered with the policy's chat template."""

    input_tokens: int


def message_of(request: MessagesRequest, completed: ChatCompletion) -> MessageAnswer:
    """Converts a chat completion to the answer to a Messages request."""
    choice = completed.choices[0]
    usage = completed.usage
    return MessageAnswer(
        id=completed.id.replace("chatcmpl-", "msg_"),
        type="message",
        role="assistant",
        model=request.model,
        content=_content(choice),
        stop_reason=_stop_reason(choice),
        stop_sequence=choice.stop_reason,
        usage=MessageUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=0,
        ),
    )


def _stop_reason(choice: Choice) -> _StopReason:
    if choice.finish_reason == "length":
        return "max_tokens"
    if choice.finish_reason == "tool_calls":
        return "tool_use"
    return "end_turn" if choice.stop_reason is None else "stop_sequence"


def _content(choice: Choice) -> tuple[ContentBlock, ...]:
    """Converts a completion to blocks: its text (unless it is empty and there are calls), and its calls."""
    assert choice.message is not None
    text = choice.message.content or ""
    calls = tuple(
        ContentBlock(
            type="tool_use",
            id=call.id.replace("call_", "toolu_"),
            name=call.function.name,
            # Not decoded: a string in it may have half a surrogate pair, which only an escape can express.
            input=msgspec.Raw(call.function.arguments.encode()),
        )
        for call in choice.message.tool_calls
    )
    return calls if calls and not text else (ContentBlock(type="text", text=text), *calls)


def events_of(answer: MessageAnswer) -> Iterator[MessageEvent]:
    """Converts an answer to a stream: its start, each block in one piece, and its end."""
    nothing = msgspec.structs.replace(answer.usage, output_tokens=0)
    begun = msgspec.structs.replace(answer, content=(), stop_reason=None, stop_sequence=None, usage=nothing)
    yield MessageEvent(type="message_start", message=begun)
    for index, block in enumerate(answer.content):
        if block.input is None:
            empty = ContentBlock(type="text", text="")
            delta = _Delta(type="text_delta", text=block.text)
        else:
            empty = msgspec.structs.replace(block, input=msgspec.Raw(b"{}"))
            delta = _Delta(type="input_json_delta", partial_json=bytes(block.input).decode())
        yield MessageEvent(type="content_block_start", index=index, content_block=empty)
        yield MessageEvent(type="content_block_delta", index=index, delta=delta)
        yield MessageEvent(type="content_block_stop", index=index)
    end = _End(stop_reason=answer.stop_reason, stop_sequence=answer.stop_sequence)
    yield MessageEvent(type="message_delta", delta=end, usage=answer.usage)
    yield MessageEvent(type="message_stop")


# --- models and errors ----------------------------------------------------------------------------


class MessageModel(_Answer, frozen=True, kw_only=True):
    """A policy in the list of models."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]


class MessageModels(_Answer, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    data: tuple[MessageModel, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None


def models_of(models: tuple[Model, ...]) -> MessageModels:
    """The list of policies in Anthropic's format, all on one page."""
    data = tuple(
        MessageModel(
            type="model",
            id=model.id,
            display_name=model.id,
            created_at="1970-01-01T00:00:00Z",
            lifecycle="active",
        )
        for model in models
    )
    names = [model.id for model in models]
    return MessageModels(
        data=data,
        has_more=False,
        first_id=names[0] if names else None,
        last_id=names[-1] if names else None,
    )


class _Problem(_Answer, frozen=True, kw_only=True):
    type: str
    message: str


_PROBLEM_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
"""Types by status. Any other status below 500 is an `invalid_request_error`, and one above an `api_error`."""


class MessageError(_Answer, frozen=True, kw_only=True):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: _Problem

    @classmethod
    def of(cls, message: str, code: str, status: int) -> "MessageError":
        """Makes the error; its type follows from the HTTP status."""
        # Clients recognize by these words that a history is too long, and shorten it.
        text = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
        kind = _PROBLEM_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return cls(type="error", error=_Problem(type=kind, message=text))
