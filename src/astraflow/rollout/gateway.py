"""The agent gateway: an OpenAI-compatible server on loopback, with an address and a key for each episode.

    agent program --HTTP--> Gateway --> EpisodeEndpoint --> Dialogue --> engine
                                                                |
                                                                +--> recorder

Each process has one server, which starts when the first episode asks for an endpoint. An endpoint is open
inside its workflow's `async with`; afterwards its address is unknown. The gateway knows nothing of tasks and
answers, so an agent cannot read what it is scored with.

A request carries the whole history of a conversation, so the recorded histories of an episode form a tree.
The gateway looks for the longest recorded history that the request begins with, compared as clients see it.
The new prompt continues the exact tokens of that history, and the recorder then extends its trajectory or
forks it. If there is no such history, the request is rendered anew. Its tokens may still begin with those of
a recorded history: then it is the same conversation, in which the client only changed white space. Otherwise
it is a new conversation.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from astraflow import wire
from astraflow.errors import Error, RefusedError, RolloutError
from astraflow.rollout.dialogue import (
    Answer,
    Dialogue,
    HostedPolicy,
    RecordedConversation,
    Said,
    prompt_of,
    with_tools,
)
from astraflow.rollout.gateway_wire import (
    ChatMessage,
    ChatRequest,
    Choice,
    Completed,
    ErrorBody,
    Model,
    ModelList,
    Reply,
    Usage,
    bad_request,
    called,
    logprobs_of,
    messages_of,
    tool_specs,
)
from astraflow.service.messages import media_type_of, unsupported_media_type
from astraflow.service.server import HttpServer
from astraflow.service.web_guard import WebRules
from astraflow.types import Sampling
from astraflow.workflows.calls import CallParser, ToolCall
from astraflow.workflows.conversation import AgentReport

__all__ = [
    "EpisodeEndpoint",
    "Gateway",
]

_ResultT = TypeVar("_ResultT")
_ItemT = TypeVar("_ItemT", bound=msgspec.Struct)

_SAMPLING_TOLERANCE = 1e-6
"""Largest difference at which a request's temperature or `top_p` still equals the recipe's."""
_MAX_BODY_BYTES = 16 * 2**20
"""Largest body of a request; it carries a whole history as text."""


# --- one episode ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Point:
    """A recorded history, up to and including one completion."""

    hosted: HostedPolicy
    """The policy that speaks, with the tools that it was shown."""
    keys: tuple[object, ...]
    """The messages as the client sees them, in a form that can be compared."""
    said: Said
    """The messages and their exact tokens."""
    chat: RecordedConversation


class EpisodeEndpoint:
    """The endpoint of one episode, through which an agent program chats with policies. Implements `Endpoint`.

    A request whose client disconnects is cancelled, and a request after the episode's end is refused. `close`
    cancels the requests that still run.
    """

    def __init__(self, dialogue: Dialogue, parser: CallParser, gateway_url: str) -> None:
        self.id = secrets.token_urlsafe(12)
        self._key = secrets.token_urlsafe(24)
        self.report: AgentReport | None = None
        self.last_text = ""
        self.problem = ""
        self.is_full = False
        self.num_completions = 0
        self._url = f"{gateway_url}/episodes/{self.id}"
        self._dialogue = dialogue
        self._parser = parser
        self._points: list[_Point] = []
        self._running: set[asyncio.Task[Completed]] = set()
        self._num_requests = 0

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

    def models(self) -> tuple[Model, ...]:
        """The episode's policies, as `GET /models` lists them."""
        return tuple(
            Model(id=name, object="model", created=0, owned_by="astraflow") for name in self._dialogue.hosted
        )

    def start(self, request: ChatRequest) -> "asyncio.Task[Completed]":
        """Begins to answer a chat request, in a task that `close` cancels."""
        task = asyncio.create_task(self.chat(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Cancels the requests that still run."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def chat(self, request: ChatRequest) -> Completed:
        """Answers a chat request, and records its completions.

        Raises: RefusedError if the request asks for what no policy can do; RolloutError if the engine fails.
        """
        request.check()
        self._num_requests += 1
        name = f"chatcmpl-{self.id}-{self._num_requests}"
        hosted, sampling = self._policy(request)
        start = self._start(hosted, request.messages)
        if start is None:
            said = Said()
            new = messages_of(request.messages)
        else:
            num_known = len(start.keys)
            said = start.said
            new = messages_of(request.messages[num_known:], request.messages[:num_known])
        prompt = await prompt_of(hosted.renderer, said, new)
        start = start or self._start_by_tokens(hosted, prompt)
        messages = (*said.messages, *new)
        # For `n` completions, a recorded conversation answers `n` times, and the recorder forks it.
        chats = [start.chat if start else self._dialogue.open(hosted, (), "") for _ in range(request.n or 1)]
        await self._check_room(hosted, chats[0], prompt)
        answers = await _all([chat.answer(messages, prompt, sampling) for chat in chats])
        choices: list[Choice] = []
        for place, (chat, answer) in enumerate(zip(chats, answers, strict=True)):
            choice = self._choice(hosted, request, answer, sampling, f"call_{self._num_requests}_{place}")
            choices.append(msgspec.structs.replace(choice, index=place))
            self._points.append(_Point(hosted, self._keys(request.messages, choice), answer.said, chat))
        self.problem = ""
        self.num_completions += len(answers)
        num_sampled = sum(answer.completion.num_tokens for answer in answers)
        return Completed(
            id=name,
            object="chat.completion",
            created=int(time.time()),
            model=request.model,
            choices=tuple(choices),
            usage=Usage(
                prompt_tokens=len(prompt),
                completion_tokens=num_sampled,
                total_tokens=len(prompt) + num_sampled,
            ),
        )

    # --- who answers, and how ---

    def _policy(self, request: ChatRequest) -> tuple[HostedPolicy, Sampling]:
        """The policy that the request names, with the request's tools, and how it samples."""
        hosted = self._dialogue.hosted.get(request.model)
        if hosted is None:
            names = ", ".join(self._dialogue.hosted)
            raise RefusedError(
                f"model {request.model!r} is not a policy of this run (policies: {names})",
                code="model_not_found",
                status=404,
            )
        return with_tools(hosted, tool_specs(request)), self._sampling(hosted, request)

    def _sampling(self, hosted: HostedPolicy, request: ChatRequest) -> Sampling:
        """The episode's sampling, with the caller's limit of tokens and stop texts.

        A trained policy keeps the recipe's temperature and `top_p`: with others, the recorded logprobs would
        not be those of the distribution that it is trained on.

        Raises: RefusedError if the caller asks for others.
        """
        own = hosted.info.sampling
        sampling = self._dialogue.sampling(hosted)
        for name, asked, trained in (
            ("temperature", request.temperature, own.temperature),
            ("top_p", request.top_p, own.top_p),
        ):
            if asked is None or abs(asked - trained) <= _SAMPLING_TOLERANCE:
                continue
            if hosted.info.is_trained:
                policy = hosted.info.name
                raise bad_request(
                    f"{name} = {asked:g}, but policy {policy} is trained with {trained:g}; leave it out of "
                    f"the agent's settings, or set policies.{policy}.sampling.{name} in the recipe",
                    "unsupported_value",
                )
            sampling = msgspec.structs.replace(sampling, **{name: asked})
        limit = min(sampling.max_tokens, request.limit or sampling.max_tokens)
        return msgspec.structs.replace(sampling, max_tokens=limit, stop=(*sampling.stop, *request.stops))

    async def _check_room(
        self, hosted: HostedPolicy, chat: RecordedConversation, prompt: tuple[int, ...]
    ) -> None:
        """Checks that a prompt leaves room for a completion.

        If it does not, and the episode has completions already, the conversation is recorded as one that
        ended because the context was full.

        Raises: RefusedError if there is no room.
        """
        size = hosted.max_context
        if len(prompt) < size:
            return
        if self._dialogue.recorder.num_completions:
            self.is_full = True
            await chat.answer(chat.messages, prompt)  # records an empty completion, since there is no room
        raise bad_request(
            f"the prompt has {len(prompt)} tokens, which leaves no room in the context of policy "
            f"{hosted.info.name} ({size} tokens); shorten it, or raise rollout.engine.max_context",
            "context_length_exceeded",
        )

    # --- where a request continues ---

    def _start(self, hosted: HostedPolicy, messages: tuple[ChatMessage, ...]) -> _Point | None:
        """The longest recorded history that the messages begin with; None if there is none."""
        keys = tuple(message.key for message in messages)
        known = [p for p in self._points if p.hosted == hosted and p.keys == keys[: len(p.keys)]]
        return max(known, key=lambda point: len(point.keys), default=None)

    def _start_by_tokens(self, hosted: HostedPolicy, prompt: tuple[int, ...]) -> _Point | None:
        """The longest recorded history with whose exact tokens the prompt begins; None if there is none."""
        known = [
            p for p in self._points if p.hosted.info == hosted.info and _begins_with(prompt, p.said.token_ids)
        ]
        return max(known, key=lambda point: len(point.said.token_ids), default=None)

    @staticmethod
    def _keys(messages: tuple[ChatMessage, ...], choice: Choice) -> tuple[object, ...]:
        """The keys of a history and its reply, computed from the reply as the client will send it back."""
        assert choice.message is not None
        reply = msgspec.convert(msgspec.to_builtins(choice.message), ChatMessage)
        return tuple(message.key for message in (*messages, reply))

    # --- what the client sees ---

    def _choice(
        self, hosted: HostedPolicy, request: ChatRequest, answer: Answer, sampling: Sampling, call_id: str
    ) -> Choice:
        """A completion as the client gets it: without its stop text, and with its tool calls taken out."""
        completion = answer.completion
        generation = answer.generation
        text = next(
            (completion.text.removesuffix(s) for s in sampling.stop if completion.text.endswith(s)),
            completion.text,
        )
        self.last_text = text
        calls = self._calls(completion.reply) if request.tools and request.tool_choice != "none" else ()
        reply = Reply(
            role="assistant",
            content=(text.partition("<tool_call>")[0].strip() or None) if calls else text,
            tool_calls=called(calls, call_id),
        )
        logprobs = None
        if request.logprobs:
            tokens = [hosted.renderer.parse((token,)).content for token in generation.token_ids]
            logprobs = logprobs_of(tokens, generation.logprobs)
        finish_reason = "tool_calls" if calls else "stop"
        if completion.is_truncated:
            finish_reason = "length"
        return Choice(index=0, finish_reason=finish_reason, logprobs=logprobs, message=reply)

    def _calls(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a text; none if one of them cannot be read, so that the text is shown as it is."""
        calls = tuple(self._parser(text))
        return () if any(call.problem for call in calls) else calls


def _begins_with(prompt: tuple[int, ...], known: tuple[int, ...]) -> bool:
    """Whether a prompt begins with known tokens."""
    # The last known token is compared first: histories are long, and most of them differ there.
    if not known:
        return True
    return len(known) <= len(prompt) and prompt[len(known) - 1] == known[-1] and prompt[: len(known)] == known


async def _all(parts: list[Coroutine[Any, Any, _ResultT]]) -> list[_ResultT]:
    """Runs all parts at once and returns their results in order; the first error cancels the other parts."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


# --- the server -------------------------------------------------------------------------------------

_Handler = Callable[[EpisodeEndpoint, Request], Awaitable[Response]]


class Gateway:
    """Serves the endpoints of all episodes of this process, until `close`.

    Example: `async with gateway.endpoint(dialogue, tagged_calls) as endpoint: ...`.
    """

    def __init__(self) -> None:
        self._endpoints: dict[str, EpisodeEndpoint] = {}
        self._server: HttpServer | None = None
        self._url = ""
        self._starting = asyncio.Lock()
        routes = [
            Route("/episodes/{episode}/v1/chat/completions", self._guarded(_chat), methods=["POST"]),
            Route("/episodes/{episode}/v1/models", self._guarded(_models)),
            Route("/episodes/{episode}/v1/models/{model}", self._guarded(_model)),
            Route("/episodes/{episode}/result", self._guarded(_result), methods=["POST"]),
        ]
        self._app = Starlette(routes=routes)

    @asynccontextmanager
    async def endpoint(self, dialogue: Dialogue, parser: CallParser) -> AsyncGenerator[EpisodeEndpoint]:
        """Opens an episode's endpoint until the block ends; requests that still run then are cancelled."""
        endpoint = EpisodeEndpoint(dialogue, parser, await self._started())
        self._endpoints[endpoint.id] = endpoint
        try:
            yield endpoint
        finally:
            del self._endpoints[endpoint.id]
            await endpoint.close()

    async def close(self) -> None:
        """Stops the server, if it was ever started."""
        if self._server is not None:
            await self._server.stop(grace_s=0.2)

    async def _started(self) -> str:
        """Starts the server unless it runs already, and returns its URL."""
        async with self._starting:
            if self._server is None:
                rules = WebRules(needs_token=True)  # each episode has its key
                server = HttpServer(self._app, host="127.0.0.1", port=0, name="gateway", rules=rules)
                self._url = await server.start()
                self._server = server
        return self._url

    def _guarded(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wraps a handler: finds the endpoint, checks the key, and turns errors into OpenAI's format."""

        async def answer(request: Request) -> Response:
            endpoint = self._endpoints.get(str(request.path_params["episode"]))
            try:
                if endpoint is None:
                    message = "no such episode; it is over, or the address is wrong"
                    raise RefusedError(message, code="episode_not_found", status=404)
                given = request.headers.get("authorization", "").removeprefix("Bearer ")
                if not hmac.compare_digest(given.encode(), endpoint.api_key.encode()):
                    raise RefusedError("wrong API key", code="invalid_api_key", status=401)
                return await handler(endpoint, request)
            except RecursionError:
                err = RefusedError("JSON nested too deeply", code="invalid_request", status=400)
                return _refused(endpoint, err)
            except Error as err:
                return _refused(endpoint, err)

        return answer


def _refused(endpoint: EpisodeEndpoint | None, error: Error) -> Response:
    """The response for an error. The endpoint keeps it, so that a failure of the episode can name it."""
    if endpoint is not None:
        endpoint.problem = str(error)
    return _error_response(error)


def _error_response(error: Error) -> Response:
    """An error in OpenAI's format; one that is not the caller's fault is 503, which clients retry."""
    status = 503
    code = "unavailable"
    if isinstance(error, RefusedError):
        status = error.status
        code = error.code
    elif isinstance(error, RolloutError) and not error.is_retryable:
        status = 400
        code = "invalid_request"
    return _json(ErrorBody.of(str(error), code, status), status)


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


async def _chat(endpoint: EpisodeEndpoint, request: Request) -> Response:
    asked = await _read(request, ChatRequest)
    completed = await _while_connected(request, endpoint, asked)
    if completed is None:
        return Response(status_code=499)
    if not asked.stream:
        return _json(completed)
    with_usage = asked.stream_options is not None and asked.stream_options.include_usage
    return StreamingResponse(_events(completed, with_usage=with_usage), media_type="text/event-stream")


def _events(completed: Completed, *, with_usage: bool) -> Iterator[bytes]:
    for chunk in completed.chunks(with_usage=with_usage):
        yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _while_connected(
    request: Request, endpoint: EpisodeEndpoint, asked: ChatRequest
) -> Completed | None:
    """The answer, or None if the client disconnects first; its request is then cancelled."""
    work = endpoint.start(asked)
    gone = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.cancelled():
            raise RefusedError("the episode is over", code="episode_over", status=410)
        return work.result() if work.done() else None
    finally:
        for task in (work, gone):
            task.cancel()


async def _hung_up(request: Request) -> None:
    """Returns when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _models(endpoint: EpisodeEndpoint, request: Request) -> Response:
    return _json(ModelList(object="list", data=endpoint.models()))


async def _model(endpoint: EpisodeEndpoint, request: Request) -> Response:
    name = str(request.path_params["model"])
    found = [model for model in endpoint.models() if model.id == name]
    if not found:
        raise RefusedError(f"model {name!r} is not a policy of this run", code="model_not_found", status=404)
    return _json(found[0])


async def _result(endpoint: EpisodeEndpoint, request: Request) -> Response:
    endpoint.report = await _read(request, AgentReport)
    return Response(status_code=204)


async def _read(request: Request, kind: type[_ItemT]) -> _ItemT:
    """Decodes a request's body.

    Raises: RefusedError if it is not JSON of this kind, or is too large.
    """
    media_type = media_type_of(request)
    if media_type != wire.JSON:
        raise unsupported_media_type(media_type, wire.JSON)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise RefusedError(
                f"the body has more than {_MAX_BODY_BYTES} bytes", code="too_large", status=413
            )
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as err:
        raise RefusedError(str(err), code="invalid_request", status=400) from err
