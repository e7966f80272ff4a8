"""Requests and answers of the agent gateway: OpenAI's chat completions, as far as policies support them.

Requests are checked strictly. An argument that matters, but that a policy cannot follow, is refused.
Arguments that do not change what is sampled (`user`, `metadata`, `store`, ...) are accepted and have no
effect. `seed` has no effect either, because the episodes of a task must differ. `tool_choice` and
`response_format` are taken as hints (`hints.py`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from astraflow.errors import ImageError, RefusedError
from astraflow.models.images import IMAGE, check_image
from astraflow.types import MediaRef, Message, ToolSpec
from astraflow.types.bounds import (
    JsonText,
    Label,
    LongText,
    OpaqueId,
    Position,
    StopText,
    Temperature,
    TopP,
    UncheckedLabel,
)
from astraflow.workflows.calls import ToolCall

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatMessage",
    "ChatRequest",
    "ChatTool",
    "Choice",
    "ContentPart",
    "ErrorBody",
    "JsonSchema",
    "Model",
    "ModelList",
    "Reply",
    "ReplyCall",
    "ReplyFormat",
    "TokenLogprob",
    "Usage",
    "assistant_message",
    "bad_request",
    "image_part",
    "logprobs_of",
    "messages_of",
    "parts_of",
    "reply_calls",
    "text_of",
    "tool_specs",
]


def bad_request(message: str, code: str = "invalid_value") -> RefusedError:
    """Makes a refusal of a request that the caller must correct."""
    return RefusedError(message, code=code, status=400)


# --- requests -------------------------------------------------------------------------------------

_MAX_MESSAGES = 16_384
_MAX_PARTS = 1024
"""Largest number of parts or calls in a message, and of tools in a request."""
_Penalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
_TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""As in vLLM and SGLang, 0 and -1 mean the whole vocabulary."""
_Biases = Annotated[dict[Label, _Penalty], Meta(max_length=1024)]
_Schema = Annotated[dict[str, object], Meta(max_length=_MAX_PARTS)]
_Stops = Annotated[tuple[StopText, ...], Meta(max_length=32)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _ImageUrl(msgspec.Struct, frozen=True):
    url: LongText
    detail: object = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message: a text, or an image as a `data:` URI."""

    type: Label
    text: LongText = ""
    image_url: LongText | _ImageUrl | None = None
    """An object in chat completions, and the URI itself in the Responses API."""
    detail: object = None

    @property
    def uri(self) -> str:
        """The image's URI; empty if there is none."""
        image = self.image_url
        return image.url if isinstance(image, _ImageUrl) else image or ""


def image_part(uri: str) -> ContentPart:
    """Makes a message part that is an image."""
    return ContentPart(type=_IMAGE_KINDS[0], image_url=uri)


_IMAGE_KINDS = ("image_url", "input_image")
"""Types of image parts in chat completions and in the Responses API."""


def parts_of(
    content: str | Sequence[ContentPart] | None, kinds: Collection[str] = ("text",)
) -> str | tuple[ContentPart, ...]:
    """The content of a user's message: a text, or parts with at least one image.

    Raises: RefusedError for other parts, and for images that cannot be shown to a model.
    """
    if content is None or isinstance(content, str) or all(part.type not in _IMAGE_KINDS for part in content):
        return text_of(content, kinds)
    parts: list[ContentPart] = []
    for part in content:
        if part.type in _IMAGE_KINDS:
            _check_image(part)
            parts.append(image_part(part.uri))
        else:
            parts.append(ContentPart(type="text", text=text_of((part,), kinds)))
    return tuple(parts)


def _check_image(part: ContentPart) -> None:
    if not part.uri:
        raise bad_request(
            f"a part of type {part.type!r} has no image_url; uploaded files are not supported: send the "
            "image itself as data:image/png;base64,..."
        )
    try:
        check_image(part.uri)
    except ImageError as err:
        raise bad_request(f"a part of type {part.type!r}: {err}", "invalid_image") from err


def text_of(content: str | Sequence[ContentPart] | None, kinds: Collection[str] = ("text",)) -> str:
    """The content of a message as one text. `kinds`: the types of text parts.

    Raises: RefusedError for images and other parts that are not text.
    """
    if isinstance(content, str) or content is None:
        return content or ""
    other = [part.type for part in content if part.type not in kinds]
    if other:
        raise bad_request(
            f"a message has a part of type {other[0]!r}; policies read text, and with a vision model also "
            "images in user messages"
        )
    return "".join(part.text for part in content)


class _FunctionCall(msgspec.Struct, frozen=True):
    name: Label
    arguments: JsonText = "{}"


class _Call(msgspec.Struct, frozen=True):
    function: _FunctionCall
    id: OpaqueId = ""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Unknown fields are ignored, because clients add fields when they send replies back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: LongText | Annotated[tuple[ContentPart, ...], Meta(max_length=_MAX_PARTS)] | None = None
    name: Label | None = None
    tool_calls: Annotated[tuple[_Call, ...], Meta(max_length=_MAX_PARTS)] | None = None
    tool_call_id: OpaqueId | None = None

    @property
    def text(self) -> str:
        """The content without its images, as one text.

        Raises: RefusedError for parts that are neither text nor an image of the user's.
        """
        return self._text_and_media[0]

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """The images in the content. Raises: RefusedError as `text`."""
        return self._text_and_media[1]

    @property
    def _text_and_media(self) -> tuple[str, tuple[MediaRef, ...]]:
        parts = parts_of(self.content) if self.role == "user" else text_of(self.content)
        if isinstance(parts, str):
            return parts, ()
        text = ""
        media: list[MediaRef] = []
        for part in parts:
            text += part.text
            if part.uri:
                media.append(MediaRef(kind=IMAGE, uri=part.uri, start=len(text)))
        return text, tuple(media)

    @property
    def key(self) -> tuple[str, str, object, tuple[MediaRef, ...]]:
        """A value that is equal for two messages with the same meaning.

        It ignores ids, the white space around a reply, and the order of a call's arguments, because clients
        may change these when they send a reply back.
        """
        calls = tuple(
            (call.function.name, _normalize(call.function.arguments)) for call in self.tool_calls or ()
        )
        role = "system" if self.role == "developer" else self.role
        text, media = self._text_and_media
        return role, text.strip() if role == "assistant" else text, calls, media


def assistant_message(text: str, calls: Sequence[tuple[str, str, str]]) -> ChatMessage:
    """Makes an assistant message. Each call is an id, a name, and the arguments as JSON."""
    return ChatMessage(
        role="assistant",
        content=text,
        tool_calls=tuple(
            _Call(_FunctionCall(name, arguments), id=call_id) for call_id, name, arguments in calls
        ),
    )


def _normalize(arguments: str) -> str:
    """Normalizes a call's arguments. Returns them unchanged if they are not JSON."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


class _Function(msgspec.Struct, frozen=True):
    name: Label
    description: LongText | None = None
    parameters: _Schema | None = None


class ChatTool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class JsonSchema(msgspec.Struct, frozen=True):
    """The schema that a reply should match."""

    name: Label = ""
    schema: _Schema | None = None


class ReplyFormat(msgspec.Struct, frozen=True):
    """The form that a reply should have."""

    type: Label
    json_schema: JsonSchema | None = None


class ChatRequest(_Strict, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    model: Label
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=_MAX_MESSAGES)]
    max_tokens: Position | None = None
    max_completion_tokens: Position | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Position | None = None
    stop: StopText | _Stops | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: Annotated[tuple[ChatTool, ...], Meta(max_length=_MAX_PARTS)] | None = None
    tool_choice: UncheckedLabel | _Schema | None = None
    """The string has no pattern: msgspec 0.22 corrupts memory for a union of such a string with a
    collection."""
    logprobs: bool | None = None
    top_logprobs: Position | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _Biases | None = None
    top_k: _TopK | None = None
    min_p: TopP | None = None
    repetition_penalty: _Penalty | None = None
    response_format: ReplyFormat | None = None
    chat_template_kwargs: _Schema | None = None
    seed: object = None
    user: object = None
    metadata: object = None
    store: object = None
    parallel_tool_calls: object = None
    reasoning_effort: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None

    def check(self) -> None:
        """Checks that a policy can do what the request asks for. `hint_of` checks the format of the reply.

        Raises: RefusedError if it can't.
        """
        if not self.messages:
            raise bad_request("messages is empty")
        if self.n is not None and not 1 <= self.n <= 128:
            raise bad_request(f"n = {self.n}; it must be 1 to 128")
        limit = self.limit
        if limit is not None and limit < 1:
            raise bad_request(f"max_tokens = {limit}; it must be at least 1")
        if self.top_logprobs:
            raise bad_request(
                "top_logprobs: only the logprobs of sampled tokens are available; use 0", "unsupported_value"
            )

    @property
    def changed_logits(self) -> tuple[str, ...]:
        """The parameters that would change a policy's distribution in ways that no engine here supports."""
        neutral: dict[str, object] = {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        return tuple(name for name, value in neutral.items() if getattr(self, name) not in (None, value))

    @property
    def limit(self) -> int | None:
        """The largest number of tokens in a completion; None if the caller sets none."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a completion."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()


def tool_specs(request: ChatRequest) -> tuple[ToolSpec, ...]:
    """The tools that the model is shown."""
    if request.tool_choice == "none":
        return ()
    return tuple(
        ToolSpec(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=json.dumps(tool.function.parameters or {"type": "object", "properties": {}}),
        )
        for tool in request.tools or ()
    )


def messages_of(messages: Sequence[ChatMessage], earlier: Sequence[ChatMessage] = ()) -> tuple[Message, ...]:
    """Converts messages for the chat template.

    The result of a tool gets the tool's name, which is found by the id of the call in `earlier` or
    `messages`. Calls that no policy of this episode made are shown in `<tool_call>` tags.
    """
    called_by: dict[str, str] = {
        call.id: call.function.name for message in (*earlier, *messages) for call in message.tool_calls or ()
    }
    return tuple(_message(message, called_by) for message in messages)


def _message(message: ChatMessage, called_by: Mapping[str, str]) -> Message:
    calls = "".join(
        f'<tool_call>{{"name": {json.dumps(call.function.name)}, '
        f'"arguments": {call.function.arguments.strip() or "{}"}}}</tool_call>'
        for call in message.tool_calls or ()
    )
    role = "system" if message.role == "developer" else message.role
    name = message.name or called_by.get(message.tool_call_id or "", "")
    return Message(role=role, content=message.text + calls, name=name, media=message.media or msgspec.UNSET)


# --- answers --------------------------------------------------------------------------------------


class _Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class Usage(_Answer, frozen=True, kw_only=True):
    """The token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ReplyCall(_Answer, frozen=True, kw_only=True):
    """A call in a reply. Only streams have an `index`."""

    id: str
    type: str
    function: _FunctionCall
    index: int | None = None


class Reply(_Answer, frozen=True, kw_only=True):
    """A policy's reply."""

    role: str
    content: str | None
    tool_calls: tuple[ReplyCall, ...] = ()


class TokenLogprob(_Answer, frozen=True, kw_only=True):
    """One sampled token with its recorded logprob."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[int, ...]


class _Logprobs(_Answer, frozen=True, kw_only=True):
    content: tuple[TokenLogprob, ...]
    refusal: None


class Choice(_Answer, frozen=True, kw_only=True):
    """One completion: in `message` as a whole, or in `delta` in a stream."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    logprobs: _Logprobs | None
    message: Reply | None = None
    delta: Reply | dict[str, str] | None = None
    stop_reason: str | None = None
    """The text from `stop` that ended the completion, under vLLM's name for it; None if none did."""


class ChatCompletion(_Answer, frozen=True, kw_only=True):
    """The answer to a chat request."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage

    def chunks(self, *, with_usage: bool) -> "list[ChatCompletionChunk]":
        """The same as a stream: for each choice its text and then its finish reason, at the end the usage."""
        chunks: list[ChatCompletionChunk] = []
        for choice in self.choices:
            end = msgspec.structs.replace(choice, logprobs=None, message=None, delta={})
            chunks += [self._chunk((_to_delta(choice),)), self._chunk((end,))]
        if with_usage:
            chunks.append(self._chunk((), self.usage))
        return chunks

    def _chunk(self, choices: tuple[Choice, ...], usage: Usage | None = None) -> "ChatCompletionChunk":
        return ChatCompletionChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )


def _to_delta(choice: Choice) -> Choice:
    """Converts a completion to the `delta` of a stream, without its finish reason."""
    assert choice.message is not None
    calls = tuple(
        msgspec.structs.replace(call, index=place) for place, call in enumerate(choice.message.tool_calls)
    )
    delta = msgspec.structs.replace(choice.message, tool_calls=calls)
    return Choice(index=choice.index, finish_reason=None, logprobs=choice.logprobs, delta=delta)


class ChatCompletionChunk(_Answer, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | None = None


class Model(_Answer, frozen=True, kw_only=True):
    """A policy in the list of models."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelList(_Answer, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    object: str
    data: tuple[Model, ...]


class _Problem(_Answer, frozen=True, kw_only=True):
    message: str
    type: str
    code: str
    param: None


class ErrorBody(_Answer, frozen=True, kw_only=True):
    """An error in OpenAI's format."""

    error: _Problem

    @classmethod
    def of(cls, message: str, code: str, status: int) -> "ErrorBody":
        """Makes the error; its type follows from the HTTP status."""
        if status == 401:
            kind = "authentication_error"
        else:
            kind = "invalid_request_error" if status < 500 else "server_error"
        return cls(error=_Problem(message=message, type=kind, code=code, param=None))


def reply_calls(calls: Sequence[ToolCall], prefix: str) -> tuple[ReplyCall, ...]:
    """Converts calls to the reply's format. Their ids begin with `prefix`."""
    return tuple(
        ReplyCall(
            id=f"{prefix}_{place}",
            type="function",
            function=_FunctionCall(call.name, json.dumps(call.arguments)),
        )
        for place, call in enumerate(calls)
    )


def logprobs_of(tokens: Sequence[str], values: Sequence[float]) -> _Logprobs:
    """Converts sampled tokens and their logprobs to the reply's format."""
    content = tuple(
        TokenLogprob(token=token, logprob=value, bytes=tuple(token.encode()), top_logprobs=())
        for token, value in zip(tokens, values, strict=True)
    )
    return _Logprobs(content=content, refusal=None)
