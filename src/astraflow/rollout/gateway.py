"""The agent gateway: an OpenAI-compatible server on loopback, with an address and a key for each episode.

    agent program --HTTP--> Gateway --> EpisodeEndpoint --> Dialogue --> engine
                                                                |
                                                                +--> recorder

Each process has one server, which starts when the first episode asks for it. An endpoint lives inside its
workflow's `async with`; afterwards its address is unknown. It knows nothing of tasks and answers: an agent
cannot read what it is scored with.

A request carries the whole history, so it is a point of a tree. The longest recorded history that it begins
with, compared as clients see it, gives the exact tokens to go on from; the recorder then extends or forks. A
history that nobody knows is rendered. If its tokens go on from known ones, it is the same conversation (the
client only changed white space); otherwise it is a new one.
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
_TEMPERATURE_TOLERANCE = 1e-6
_MAX_BODY_BYTES = 16 * 2**20
_ItemT = TypeVar("_ItemT", bound=msgspec.Struct)


# --- one episode ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Point:
    """A recorded history: who speaks, what the client saw of it, and what it is."""

    hosted: HostedPolicy
    keys: tuple[object, ...]
    said: Said
    chat: RecordedConversation


class EpisodeEndpoint:
    """What one agent program may do: chat with the policies of its episode. Implements `Endpoint`.

    A request whose client leaves is cancelled; one after the episode's end is refused. `close` ends what
    still runs.
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
        """As `Endpoint.base_url`."""
        return f"{self._url}/v1"

    @property
    def api_key(self) -> str:
        """As `Endpoint.api_key`."""
        return self._key

    @property
    def result_url(self) -> str:
        """As `Endpoint.result_url`."""
        return f"{self._url}/result"

    def models(self) -> tuple[Model, ...]:
        """The episode's policies."""
        return tuple(
            Model(id=name, object="model", created=0, owned_by="astraflow") for name in self._dialogue.hosted
        )

    def start(self, request: ChatRequest) -> "asyncio.Task[Completed]":
        """Begins to answer a chat request; `close` cancels it."""
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
        """Answers a chat request. Raises: RefusedError; RolloutError if the engine fails."""
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
        start = start or self._going_on(hosted, prompt)
        messages = (*said.messages, *new)
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
        hosted = self._dialogue.hosted.get(request.model)
        if hosted is None:
            names = ", ".join(self._dialogue.hosted)
            raise RefusedError(
                f"model {request.model!r} is no policy of this run (policies: {names})",
                code="model_not_found",
                status=404,
            )
        return with_tools(hosted, tool_specs(request)), self._sampling(hosted, request)

    def _sampling(self, hosted: HostedPolicy, request: ChatRequest) -> Sampling:
        """The episode's sampling, cut shorter where the caller wants it; a trained policy keeps the recipe's
        temperature and full support, or its logprobs would not be those that it is trained with."""
        own = hosted.info.sampling
        sampling = self._dialogue.sampling(hosted)
        for name, asked, trained in (
            ("temperature", request.temperature, own.temperature),
            ("top_p", request.top_p, own.top_p),
        ):
            if asked is None or abs(asked - trained) <= _TEMPERATURE_TOLERANCE:
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
        """Raises: RefusedError if the prompt fills the context; its conversation then ends there."""
        size = hosted.max_context
        if len(prompt) < size:
            return
        if self._dialogue.recorder.num_completions:
            self.is_full = True
            await chat.answer(chat.messages, prompt)
        raise bad_request(
            f"the prompt has {len(prompt)} tokens, the context of policy {hosted.info.name} {size}; "
            "shorten it, or raise rollout.engine.max_context",
            "context_length_exceeded",
        )

    # --- where in the tree ---

    def _start(self, hosted: HostedPolicy, messages: tuple[ChatMessage, ...]) -> _Point | None:
        """The longest recorded history that the messages begin with."""
        keys = tuple(message.key for message in messages)
        known = [p for p in self._points if p.hosted == hosted and p.keys == keys[: len(p.keys)]]
        return max(known, key=lambda point: len(point.keys), default=None)

    def _going_on(self, hosted: HostedPolicy, prompt: tuple[int, ...]) -> _Point | None:
        """The longest recorded history whose very tokens the prompt begins with."""
        known = [
            p for p in self._points if p.hosted.info == hosted.info and _begins_with(prompt, p.said.token_ids)
        ]
        return max(known, key=lambda point: len(point.said.token_ids), default=None)

    @staticmethod
    def _keys(messages: tuple[ChatMessage, ...], choice: Choice) -> tuple[object, ...]:
        assert choice.message is not None
        reply = msgspec.convert(msgspec.to_builtins(choice.message), ChatMessage)
        return tuple(message.key for message in (*messages, reply))

    # --- what the client sees ---

    def _choice(
        self, hosted: HostedPolicy, request: ChatRequest, answer: Answer, sampling: Sampling, call_id: str
    ) -> Choice:
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
        ended = "length" if completion.is_truncated else "tool_calls" if calls else "stop"
        return Choice(index=0, finish_reason=ended, logprobs=logprobs, message=reply)

    def _calls(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a text; none if one of them cannot be read, for then the text is shown as it is."""
        calls = tuple(self._parser(text))
        return () if any(call.problem for call in calls) else calls


def _begins_with(prompt: tuple[int, ...], known: tuple[int, ...]) -> bool:
    """Looks at the last token first: histories are long, and most of them differ there."""
    if not known:
        return True
    return len(known) <= len(prompt) and prompt[len(known) - 1] == known[-1] and prompt[: len(known)] == known


async def _all(parts: list[Coroutine[Any, Any, _ResultT]]) -> list[_ResultT]:
    """The results in order; the first error ends the other parts."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


# --- the server -------------------------------------------------------------------------------------

_Handler = Callable[[EpisodeEndpoint, Request], Awaitable[Response]]


class Gateway:
    """Serves the endpoints of all episodes of this process. `close` it.

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
        """An episode's endpoint, open until the block ends; what still runs then is cancelled."""
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
        async with self._starting:
            if self._server is None:
                rules = WebRules(needs_token=True)  # each episode has its key
                server = HttpServer(self._app, host="127.0.0.1", port=0, name="gateway", rules=rules)
                self._url = await server.start()
                self._server = server
        return self._url

    def _guarded(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        """Finds the endpoint, checks its key, and turns errors into OpenAI's format."""

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
                return _told(endpoint, err)
            except Error as err:
                return _told(endpoint, err)

        return answer


def _told(endpoint: EpisodeEndpoint | None, error: Error) -> Response:
    """The refusal, which the episode's failure will name too."""
    if endpoint is not None:
        endpoint.problem = str(error)
    return _refusal(error)


def _refusal(error: Error) -> Response:
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
    """The answer, or None if the client left first: then nothing is sampled any more."""
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
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _models(endpoint: EpisodeEndpoint, request: Request) -> Response:
    return _json(ModelList(object="list", data=endpoint.models()))


async def _model(endpoint: EpisodeEndpoint, request: Request) -> Response:
    name = str(request.path_params["model"])
    found = [model for model in endpoint.models() if model.id == name]
    if not found:
        raise RefusedError(f"model {name!r} is no policy of this run", code="model_not_found", status=404)
    return _json(found[0])


async def _result(endpoint: EpisodeEndpoint, request: Request) -> Response:
    endpoint.report = await _read(request, AgentReport)
    return Response(status_code=204)


async def _read(request: Request, kind: type[_ItemT]) -> _ItemT:
    if (media_type := media_type_of(request)) != wire.JSON:
        raise unsupported_media_type(media_type, wire.JSON)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise RefusedError(f"the body is over {_MAX_BODY_BYTES} bytes", code="too_large", status=413)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as err:
        raise RefusedError(str(err), code="invalid_request", status=400) from err
