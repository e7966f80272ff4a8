"""The endpoint of one episode. It answers chat requests with policies, and records what they sample.

A request has the whole history of a conversation, so the recorded histories of an episode form a tree. The
endpoint finds the longest recorded history with which the request begins, compared as clients see it. The new
prompt continues the exact tokens of that history, and the recorder then extends or forks its trajectory. If
there is no such history, the request is rendered from scratch. If its tokens still begin with those of a
recorded history, it is the same conversation, in which the client has only changed white space. If the client
has replaced a policy's reply, the request is a fork of that conversation. Otherwise it is a new conversation.

Every dialect converts its requests to a `ChatRequest`, and the answer of `chat` to its own format.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from astraflow.addons.agents.gateway import anthropic_messages
from astraflow.addons.agents.gateway.anthropic_messages import MessageAnswer, MessagesRequest, message_of
from astraflow.addons.agents.gateway.chat_wire import (
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    Choice,
    Model,
    Reply,
    Usage,
    bad_request,
    logprobs_of,
    messages_of,
    reply_calls,
    tool_specs,
)
from astraflow.addons.agents.gateway.hints import Hint, hint_of
from astraflow.addons.agents.gateway.openai_responses import (
    Response,
    ResponsesRequest,
    chat_of,
    input_messages,
    response_of,
)
from astraflow.errors import RefusedError
from astraflow.rollout.dialogue import (
    Answer,
    Dialogue,
    HostedPolicy,
    RecordedConversation,
    Transcript,
    render_prompt,
    with_tools,
)
from astraflow.types import PolicyInfo, Sampling
from astraflow.types.bounds import as_label
from astraflow.types.model_text import channel_messages
from astraflow.workflows.calls import ParserOrName, ToolCall, chosen_parser, looks_like_call, offered_calls
from astraflow.workflows.conversation import AgentReport, Completion, EndpointConversation

__all__ = ["EpisodeEndpoint"]

_ResultT = TypeVar("_ResultT")

_SAMPLING_TOLERANCE = 1e-6
"""Largest difference at which a request's temperature or `top_p` still counts as equal to the recipe's."""


@dataclass(frozen=True, slots=True)
class _Point:
    """A recorded history, up to and including one completion."""

    hosted: HostedPolicy
    """The policy that answered, with the tools that it was shown."""
    keys: tuple[object, ...]
    """The messages as the client sees them, in a comparable form."""
    transcript: Transcript
    """The messages and their exact tokens."""
    origin: EndpointConversation
    """The conversation, with the role and the session in which it was held."""
    chat: RecordedConversation

    def is_open_to(self, parsed: "_ParsedRequest") -> bool:
        """Whether a request may continue from here. It needs the same role and session."""
        return (self.origin.role, self.origin.session) == (parsed.role, parsed.session)


@dataclass(frozen=True, slots=True)
class _ParsedRequest:
    """A checked request, with its policy and sampling parameters."""

    number: int
    """Position among the requests of the episode."""
    request: ChatRequest
    hosted: HostedPolicy
    """The policy with the request's tools."""
    role: str
    session: str
    sampling: Sampling
    hint: Hint


@dataclass(frozen=True, slots=True)
class _RenderedRequest:
    """The prompt of a request."""

    prompt: Transcript
    """The messages and their tokens."""
    chat: RecordedConversation | None
    """The conversation that the request continues or edits; None for a new one."""


class EpisodeEndpoint:
    """The endpoint through which an agent program chats with policies in one episode. Implements `Endpoint`.

    A request is cancelled if its client disconnects, and refused after the end of the episode. `close`
    cancels the requests that still run.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        parser: ParserOrName,
        gateway_url: str,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        """`parser`, `roles`: see `Policies.endpoint`."""
        self.id = secrets.token_urlsafe(12)
        self._key = secrets.token_urlsafe(24)
        self.report: AgentReport | None = None
        self.last_text = ""
        self.problem = ""
        self.is_full = False
        self.num_completions = 0
        self.num_unread_calls: int | None = None
        self._url = f"{gateway_url}/episodes/{self.id}"
        self._dialogue = dialogue
        self._parser = parser
        self._roles = roles or {}
        self._points: list[_Point] = []
        self._keys: dict[object, object] = {}
        """The keys of all messages, each stored once, because longer histories repeat the shorter ones."""
        self._running: set[asyncio.Task[Any]] = set()
        self._responses: dict[str, tuple[ChatMessage, ...]] = {}
        """Id of a response -> its conversation, without instructions."""
        self._num_requests = 0
        self._num_hinted = 0
        self._num_unmet = 0
        self._num_overrides = 0

    @property
    def base_url(self) -> str:
        """See `Endpoint.base_url`."""
        return f"{self._url}/v1"

    @property
    def api_key(self) -> str:
        """See `Endpoint.api_key`."""
        return self._key

    @property
    def result_url(self) -> str:
        """See `Endpoint.result_url`."""
        return f"{self._url}/result"

    @property
    def conversations(self) -> tuple[EndpointConversation, ...]:
        """See `Endpoint.conversations`."""
        return tuple(dict.fromkeys(point.origin for point in self._points))

    @property
    def unmet_frac(self) -> float | None:
        """See `Endpoint.unmet_frac`."""
        return self._num_unmet / self._num_hinted if self._num_hinted else None

    @property
    def ignored_overrides_frac(self) -> float | None:
        """See `Endpoint.ignored_overrides_frac`."""
        ignores = any(hosted.info.agent_overrides == "ignore" for hosted in self._dialogue.hosted.values())
        return self._num_overrides / self._num_requests if ignores and self._num_requests else None

    @property
    def anthropic_url(self) -> str:
        """See `Endpoint.anthropic_url`."""
        return self._url

    def models(self) -> tuple[Model, ...]:
        """The models that requests may name, as `GET /models` lists them."""
        return tuple(
            Model(id=name, object="model", created=0, owned_by="astraflow") for name in self._names()
        )

    def _names(self) -> tuple[str, ...]:
        return tuple(self._roles or self._dialogue.hosted)

    def start(self, answer: Coroutine[Any, Any, _ResultT]) -> asyncio.Task[_ResultT]:
        """Starts to answer a request (`chat`, `respond`, or `message`) in a task that `close` cancels."""
        task = asyncio.create_task(answer)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Cancels the requests that still run."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def respond(self, request: ResponsesRequest, *, session: str = "") -> Response:
        """Answers a request of the Responses API.

        Raises: like `chat`; RefusedError if the response that it continues is not of this episode.
        """
        before = request.previous_response_id
        earlier = self._responses.get(before, ()) if before else ()
        if before and not earlier:
            raise bad_request(
                f"previous_response_id {as_label(before)!r} is not a response of this episode",
                "previous_response_not_found",
            )
        messages = (*earlier, *input_messages(request))
        completed = await self.chat(chat_of(request, messages), session=session)
        response = response_of(request, completed)
        self._responses[response.id] = (*messages, _to_request_message(completed.choices[0]))
        return response

    async def chat(self, request: ChatRequest, *, session: str = "") -> ChatCompletion:
        """Answers a chat request, and records its completions.

        `session`: the client's name for the conversation. Requests of another session never continue it.

        Raises: RefusedError if a policy can't do what the request asks for; RolloutError if the engine fails.
        """
        parsed = self._parse(request, session)
        hosted = parsed.hosted
        rendered = await self._render(parsed)
        known = rendered.chat
        # For `n` completions, a known conversation answers `n` times, and the recorder forks it.
        chats = [
            known or self._dialogue.open(hosted, (), parsed.role, parsed.session)
            for _ in range(request.n or 1)
        ]
        await self._check_room(hosted, chats[0], rendered.prompt)
        answers = await _gather([chat.answer(rendered.prompt, parsed.sampling) for chat in chats])
        choices: list[Choice] = []
        for place, (chat, answer) in enumerate(zip(chats, answers, strict=True)):
            choice = self._make_choice(parsed, answer, place)
            choices.append(choice)
            messages = (*request.messages, _to_request_message(choice))
            own_keys = (message.key for message in messages)
            keys = tuple(self._keys.setdefault(key, key) for key in own_keys)
            origin = EndpointConversation(parsed.role, session, chat)
            self._points.append(_Point(hosted, keys, answer.transcript, origin, chat))
        self.problem = ""
        self.num_completions += len(answers)
        num_sampled = sum(answer.completion.num_tokens for answer in answers)
        return ChatCompletion(
            id=f"chatcmpl-{self.id}-{parsed.number}",
            object="chat.completion",
            created=int(time.time()),
            model=request.model,
            choices=tuple(choices),
            usage=Usage(
                prompt_tokens=len(rendered.prompt.token_ids),
                completion_tokens=num_sampled,
                total_tokens=len(rendered.prompt.token_ids) + num_sampled,
            ),
        )

    async def message(self, request: MessagesRequest, *, session: str = "") -> MessageAnswer:
        """Answers a request in Anthropic's format.

        Raises: RefusedError and RolloutError, like `chat`.
        """
        if request.max_tokens is None:
            raise bad_request("max_tokens is missing; name the largest number of tokens of the reply")
        return message_of(request, await self.chat(anthropic_messages.chat_of(request), session=session))

    async def num_prompt_tokens(self, request: ChatRequest, *, session: str = "") -> int:
        """Number of tokens in the prompt of a request. Samples nothing.

        Raises: RefusedError, like `chat`.
        """
        return len((await self._render(self._parse(request, session))).prompt.token_ids)

    async def _render(self, parsed: _ParsedRequest) -> _RenderedRequest:
        """Renders the prompt of a request. It continues the exact tokens of a recorded history if it can."""
        messages = parsed.request.messages
        start = self._find_start(parsed, messages)
        num_known = len(start.keys) if start else 0
        earlier = start.transcript if start else Transcript()
        new = messages_of(messages[num_known:], messages[:num_known])
        if any(message.images for message in new) and not parsed.hosted.sees_images:
            raise bad_request(
                f"model {parsed.request.model!r} reads text only, but a message has an image; use a policy "
                "with a vision model",
                "unsupported_value",
            )
        new = parsed.hint.add_to(new, earlier.messages)
        prompt = await render_prompt(parsed.hosted, earlier, new)
        start = start or self._find_start_by_tokens(parsed, prompt) or self._find_edited(parsed)
        return _RenderedRequest(prompt, start.chat if start else None)

    # --- who answers, and how ---

    def _parse(self, request: ChatRequest, session: str) -> _ParsedRequest:
        """Checks a request, and finds its policy and sampling parameters. Raises: RefusedError."""
        request.check()
        role = request.model if self._roles else ""
        policy = self._roles.get(role, "") if self._roles else request.model
        hosted = self._dialogue.hosted.get(policy)
        if hosted is None:
            kind, listed = ("role", "roles") if self._roles else ("policy", "policies")
            raise RefusedError(
                f"model {request.model!r} is not a {kind} of this run ({listed}: {', '.join(self._names())})",
                code="model_not_found",
                status=404,
            )
        self._num_requests += 1
        return _ParsedRequest(
            self._num_requests,
            request,
            with_tools(hosted, tool_specs(request)),
            role,
            session,
            self._choose_sampling(hosted, request),
            hint_of(request),
        )

    def _choose_sampling(self, hosted: HostedPolicy, request: ChatRequest) -> Sampling:
        """The episode's sampling parameters, with the caller's token limit and stop texts.

        A trained policy keeps the recipe's distribution. With another one, the recorded logprobs would not be
        those that training expects. A frozen policy takes the caller's temperature, `top_p`, and `top_k`.

        Raises: RefusedError if the policy can't follow a parameter, and the recipe has
        `agent_overrides: refuse`.
        """
        info = hosted.info
        changed = _changed_sampling(request, info.sampling)
        followed = {} if info.is_trained else changed
        unsupported = [*request.changed_logits, *(changed.keys() - followed.keys())]
        if _has_other_template_args(request, info):
            unsupported.append("chat_template_kwargs")
        if unsupported and info.agent_overrides == "refuse":
            raise _sampling_refusal(info, request, unsupported[0])
        self._num_overrides += bool(unsupported)
        sampling = msgspec.structs.replace(self._dialogue.sampling(hosted), **followed)
        limit = min(sampling.max_tokens, request.limit or sampling.max_tokens)
        return msgspec.structs.replace(sampling, max_tokens=limit, stop=(*sampling.stop, *request.stops))

    async def _check_room(self, hosted: HostedPolicy, chat: RecordedConversation, prompt: Transcript) -> None:
        """Checks that a prompt leaves room for a completion.

        If it doesn't, and the episode already has completions, the conversation is recorded as truncated.

        Raises: RefusedError if there is no room.
        """
        size = hosted.max_context
        num_tokens = len(prompt.token_ids)
        if num_tokens < size:
            return
        if self._dialogue.recorder.num_completions:
            self.is_full = True
            # Because there is no room, this records an empty, truncated completion.
            await chat.answer(msgspec.structs.replace(prompt, messages=chat.messages))
        raise bad_request(
            f"the prompt has {num_tokens} tokens, which leaves no room in the context of policy "
            f"{hosted.info.name} ({size} tokens); shorten it, or raise rollout.engine.max_context",
            "context_length_exceeded",
        )

    # --- where a request continues ---

    def _find_start(self, parsed: _ParsedRequest, messages: tuple[ChatMessage, ...]) -> _Point | None:
        """Finds the longest recorded history with which the messages begin; None if there is none."""
        keys = tuple(message.key for message in messages)
        known = [
            p
            for p in self._points
            if p.hosted == parsed.hosted and p.is_open_to(parsed) and p.keys == keys[: len(p.keys)]
        ]
        return max(known, key=lambda point: len(point.keys), default=None)

    def _find_start_by_tokens(self, parsed: _ParsedRequest, prompt: Transcript) -> _Point | None:
        """Finds the longest recorded history with whose exact tokens and images the prompt begins."""
        known = [
            p
            for p in self._points
            if p.hosted.info == parsed.hosted.info
            and p.is_open_to(parsed)
            and _begins_with(prompt.token_ids, p.transcript.token_ids)
            and _begins_with(prompt.media, p.transcript.media)
        ]
        return max(known, key=lambda point: len(point.transcript.token_ids), default=None)

    def _find_edited(self, parsed: _ParsedRequest) -> _Point | None:
        """Finds the longest recorded history whose last reply the request replaces with another one."""
        messages = parsed.request.messages
        keys = tuple(message.key for message in messages)
        known = [
            point
            for point in self._points
            if point.hosted.info == parsed.hosted.info
            and point.is_open_to(parsed)
            and len(point.keys) <= len(keys)
            and messages[len(point.keys) - 1].role == "assistant"
            and point.keys[:-1] == keys[: len(point.keys) - 1]
        ]
        return max(known, key=lambda point: len(point.keys), default=None)

    # --- what the client sees ---

    def _make_choice(self, parsed: _ParsedRequest, answer: Answer, place: int) -> Choice:
        """A completion as the client gets it: without its stop text, and with its tool calls extracted."""
        request = parsed.request
        completion = answer.completion
        generation = answer.generation
        stop = next((stop for stop in parsed.sampling.stop if completion.text.endswith(stop)), "")
        text = completion.text.removesuffix(stop)
        self.last_text = text
        calls = self._parse_calls(completion, {tool.name: tool.parameters for tool in tool_specs(request)})
        if parsed.hint.lines:
            self._num_hinted += 1
            self._num_unmet += not parsed.hint.is_met_by(calls, completion.reply)
        content: str | None = text
        if calls:
            content = _text_before(calls[0], completion) or None
        elif completion.reply and (parsed.hint.json_kind or channel_messages(text)):
            # A client parses the JSON that it asked for, and doesn't know the headers of channels.
            content = completion.reply
        reply = Reply(
            role="assistant",
            content=content,
            tool_calls=reply_calls(calls, f"call_{parsed.number}_{place}"),
        )
        logprobs = None
        if request.logprobs:
            tokens = [parsed.hosted.renderer.parse((token,)).content for token in generation.token_ids]
            logprobs = logprobs_of(tokens, generation.logprobs)
        finish_reason = "tool_calls" if calls else "stop"
        if completion.is_truncated:
            finish_reason = "length"
        return Choice(
            index=place,
            finish_reason=finish_reason,
            logprobs=logprobs,
            message=reply,
            stop_reason=stop if stop in request.stops else None,
        )

    def _parse_calls(self, completion: Completion, offered: Mapping[str, str]) -> tuple[ToolCall, ...]:
        """Parses the calls in a completion. If one of them can't be made, there are none, and the text is
        unchanged."""
        if not offered:
            return ()
        text = completion.reply
        calls = offered_calls(chosen_parser(self._parser, completion.call_format), text, offered)
        if any(call.problem for call in calls):
            calls = ()
        self.num_unread_calls = (self.num_unread_calls or 0) + (not calls and looks_like_call(text, offered))
        return calls


def _changed_sampling(request: ChatRequest, own: Sampling) -> dict[str, float]:
    """The sampling parameters of a request that differ from the recipe's, by name."""
    values: dict[str, tuple[float | None, float]] = {
        "temperature": (request.temperature, own.temperature),
        "top_p": (request.top_p, own.top_p),
        "top_k": (None if request.top_k is None else max(0, request.top_k), own.top_k),
    }
    return {
        name: value
        for name, (value, recipes) in values.items()
        if value is not None and abs(value - recipes) > _SAMPLING_TOLERANCE
    }


def _has_other_template_args(request: ChatRequest, info: PolicyInfo) -> bool:
    """Whether a request has chat template arguments that differ from the recipe's."""
    own = json.loads(info.template_args)
    return any(
        name not in own or own[name] != value for name, value in (request.chat_template_kwargs or {}).items()
    )


def _sampling_refusal(info: PolicyInfo, request: ChatRequest, name: str) -> RefusedError:
    ignore = f"set policies.{info.name}.sampling.agent_overrides: ignore in the recipe to sample without it"
    if name == "chat_template_kwargs":
        return bad_request(
            f"chat_template_kwargs = {json.dumps(request.chat_template_kwargs)}, but the prompts of policy "
            f"{info.name} are rendered with {info.template_args}; leave it out of the agent's settings, set "
            f"policies.{info.name}.template_args in the recipe, or {ignore}",
            "unsupported_value",
        )
    if name in request.changed_logits:
        return bad_request(
            f"{name} would change what policy {info.name} samples, and its logprobs would not be those that "
            f"it is trained with; leave it out of the agent's settings, or {ignore}",
            "unsupported_parameter",
        )
    settings = f", set policies.{info.name}.sampling.temperature" if name == "temperature" else ""
    return bad_request(
        f"{name} = {getattr(request, name):g}, but policy {info.name} is trained with "
        f"{getattr(info.sampling, name):g}; leave it out of the agent's settings{settings}, or {ignore}",
        "unsupported_value",
    )


def _text_before(call: ToolCall, completion: Completion) -> str:
    """The text before the first call, with its reasoning unless that is in a channel."""
    before = completion.reply[: call.start]
    rest = completion.reply[call.start :]
    is_last = completion.text.rstrip().endswith(rest) and not channel_messages(completion.text)
    return (completion.text.rstrip().removesuffix(rest) if is_last else before).strip()


def _to_request_message(choice: Choice) -> ChatMessage:
    """Converts a reply to the message that the client will send back."""
    assert choice.message is not None
    return msgspec.convert(msgspec.to_builtins(choice.message), ChatMessage)


def _begins_with(prompt: tuple[object, ...], known: tuple[object, ...]) -> bool:
    """Whether a prompt begins with known tokens, or its images with known images."""
    # The last known token is compared first: histories are long, and most differ there.
    if not known:
        return True
    return len(known) <= len(prompt) and prompt[len(known) - 1] == known[-1] and prompt[: len(known)] == known


async def _gather(parts: list[Coroutine[Any, Any, _ResultT]]) -> list[_ResultT]:
    """Runs all parts at once and returns their results in order. The first error cancels the other parts, and
    is raised once they have ended."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
