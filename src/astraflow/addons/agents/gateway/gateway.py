"""The agent gateway: a server on the loopback interface, with an address and a key for each episode.

    agent program --HTTP--> Gateway --> EpisodeEndpoint --> Dialogue --> engine
                                                                |
                                                                +--> recorder

It speaks three dialects: OpenAI's chat completions and Responses, and Anthropic's Messages. Each dialect is a
pair of pure functions: one from its request to a chat request, and one from the chat's answer to its own
format. Errors have the dialect's format too.

Each process has one server, which starts when the first episode opens an endpoint. An endpoint is open inside
the workflow's `async with`. After that, its address is unknown. The gateway has no access to tasks and
answers, so an agent cannot read what it is scored with.
"""

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from astraflow import wire
from astraflow.addons.agents.gateway import anthropic_messages, openai_responses
from astraflow.addons.agents.gateway.anthropic_messages import (
    MessageError,
    MessageEvent,
    MessagesRequest,
    TokenCount,
    models_of,
)
from astraflow.addons.agents.gateway.chat_wire import ChatCompletion, ChatRequest, ErrorBody, ModelList
from astraflow.addons.agents.gateway.endpoint import EpisodeEndpoint
from astraflow.addons.agents.gateway.openai_responses import ResponsesRequest
from astraflow.dataflow.service.long_poll import wait_for_disconnect
from astraflow.errors import Error, RefusedError, RolloutError
from astraflow.rollout.dialogue import Dialogue
from astraflow.service.loopback import proxy_exemptions
from astraflow.service.messages import media_type_of, unsupported_media_type
from astraflow.service.server import HttpServer
from astraflow.service.web_guard import WebRules
from astraflow.types.bounds import as_label
from astraflow.workflows.calls import ParserOrName
from astraflow.workflows.conversation import AgentReport

__all__ = ["Gateway"]

_log = logging.getLogger(__name__)

_ItemT = TypeVar("_ItemT", bound=msgspec.Struct)
_ResultT = TypeVar("_ResultT")

_MAX_BODY_BYTES = 16 * 2**20
"""Largest size of a request's body, which has a whole history as text."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SERVED = (
    "POST /v1/chat/completions, POST /v1/responses, POST /v1/messages, POST /v1/messages/count_tokens, "
    "GET /v1/models and GET /v1/models/MODEL below the episode's address, which OPENAI_BASE_URL holds (it "
    "ends in /v1) and ANTHROPIC_BASE_URL too (it ends before /v1)"
)
_ADVICE = {
    "completions": "policies are chat models: send messages to /v1/chat/completions",
    "embeddings": "policies are chat models without embeddings: use another server for these",
    "messages": "only these routes of Anthropic's API exist: batches are not supported",
    "responses": "answers are not stored: use the reply to the request",
    "v1": "the address already ends in /v1: use it unchanged (Anthropic's clients take it without /v1)",
}
"""What to do instead, by a part of the unknown address."""


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
            Route("/episodes/{episode}/v1/chat/completions", self._guard(_answer_chat), methods=["POST"]),
            Route("/episodes/{episode}/v1/models", self._guard(_list_models)),
            Route("/episodes/{episode}/v1/models/{model}", self._guard(_show_model)),
            Route("/episodes/{episode}/v1/responses", self._guard(_answer_response), methods=["POST"]),
            Route("/episodes/{episode}/v1/messages", self._guard(_answer_message), methods=["POST"]),
            Route(
                "/episodes/{episode}/v1/messages/count_tokens", self._guard(_count_tokens), methods=["POST"]
            ),
            Route("/episodes/{episode}/result", self._guard(_take_result), methods=["POST"]),
            Route("/episodes/{episode}/{path:path}", self._guard(_refuse_path), methods=_METHODS),
            Route("/{path:path}", _refuse_outside_path, methods=_METHODS),
        ]
        self._app = Starlette(routes=routes)

    @asynccontextmanager
    async def endpoint(
        self, dialogue: Dialogue, parser: ParserOrName, roles: Mapping[str, str] | None = None
    ) -> AsyncGenerator[EpisodeEndpoint]:
        """Opens an episode's endpoint until the block ends, and then cancels the requests that still run.

        `roles`: see `Policies.endpoint`.
        """
        endpoint = EpisodeEndpoint(dialogue, parser, await self._start_server(), roles)
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

    async def _start_server(self) -> str:
        """Starts the server unless it is running, and returns its URL."""
        async with self._starting:
            if self._server is None:
                rules = WebRules(needs_token=True)  # each episode has its key
                server = HttpServer(self._app, host="127.0.0.1", port=0, name="gateway", rules=rules)
                self._url = await server.start()
                self._server = server
                # Agents that are functions in this process call the server too, and must bypass any proxy.
                os.environ.update(proxy_exemptions(os.environ))
        return self._url

    def _guard(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wraps a handler: finds the endpoint, checks the key, and converts errors to the dialect's
        format."""

        async def answer(request: Request) -> Response:
            endpoint = self._endpoints.get(str(request.path_params["episode"]))
            try:
                if endpoint is None:
                    message = "no such episode; it is over, or the address is wrong"
                    raise RefusedError(message, code="episode_not_found", status=404)
                if not _has_key(request, endpoint.api_key):
                    raise RefusedError("wrong API key", code="invalid_api_key", status=401)
                return await handler(endpoint, request)
            except RecursionError:
                err = RefusedError("JSON nested too deeply", code="invalid_request", status=400)
                return _refuse(request, endpoint, err)
            except Error as err:
                return _refuse(request, endpoint, err)
            except Exception as err:  # noqa: BLE001 - the user's own engine, renderer, or parser
                _log.exception("an agent's request failed")
                return _refuse(request, endpoint, RolloutError(f"{type(err).__name__}: {err}"))

        return answer


def _has_key(request: Request, key: str) -> bool:
    """Whether a request has the episode's key, in the header of OpenAI's or of Anthropic's clients."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    own = request.headers.get("x-api-key", "")
    # Both are always compared, in constant time, so that the time reveals nothing about the key.
    return hmac.compare_digest(bearer.encode(), key.encode()) | hmac.compare_digest(
        own.encode(), key.encode()
    )


def _is_anthropic(request: Request) -> bool:
    """Whether a request is in Anthropic's dialect. All its clients send the version of the API."""
    return "anthropic-version" in request.headers or "/v1/messages" in request.url.path


def _refuse(request: Request, endpoint: EpisodeEndpoint | None, error: Error) -> Response:
    """Makes the response for an error. The endpoint stores its text, so that a failed episode can show it."""
    if endpoint is not None:
        endpoint.problem = str(error)
    return _error_response(request, error)


def _error_response(request: Request, error: Error) -> Response:
    """An error in the dialect's format. If the caller isn't at fault, its status is 503, which clients
    retry."""
    status = 503
    code = "unavailable"
    if isinstance(error, RefusedError):
        status = error.status
        code = error.code
    elif isinstance(error, RolloutError) and not error.is_retryable:
        status = 400
        code = "invalid_request"
    form = MessageError if _is_anthropic(request) else ErrorBody
    return _json(form.of(str(error), code, status), status)


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


async def _answer_chat(endpoint: EpisodeEndpoint, request: Request) -> Response:
    body = await _read(request, ChatRequest)
    completion = await _while_connected(endpoint, request, endpoint.chat(body, session=_session(request)))
    if completion is None:
        return Response(status_code=499)
    if not body.stream:
        return _json(completion)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    return StreamingResponse(
        _encode_chunks(completion, with_usage=with_usage), media_type="text/event-stream"
    )


def _encode_chunks(completion: ChatCompletion, *, with_usage: bool) -> Iterator[bytes]:
    for chunk in completion.chunks(with_usage=with_usage):
        yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _answer_response(endpoint: EpisodeEndpoint, request: Request) -> Response:
    body = await _read(request, ResponsesRequest)
    response = await _while_connected(endpoint, request, endpoint.respond(body, session=_session(request)))
    if response is None:
        return Response(status_code=499)
    if not body.stream:
        return _json(response)
    return _stream_events(openai_responses.events_of(response))


async def _answer_message(endpoint: EpisodeEndpoint, request: Request) -> Response:
    body = await _read(request, MessagesRequest)
    answer = await _while_connected(endpoint, request, endpoint.message(body, session=_session(request)))
    if answer is None:
        return Response(status_code=499)
    if not body.stream:
        return _json(answer)
    return _stream_events(anthropic_messages.events_of(answer))


def _stream_events(events: Iterator[openai_responses.Event] | Iterator[MessageEvent]) -> Response:
    """A stream of events with their type twice, as the dialects have it: before the data and in it."""
    lines = (
        f"event: {event.type}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n" for event in events
    )
    return StreamingResponse(lines, media_type="text/event-stream")


async def _count_tokens(endpoint: EpisodeEndpoint, request: Request) -> Response:
    body = anthropic_messages.chat_of(await _read(request, MessagesRequest))
    count = await endpoint.num_prompt_tokens(body, session=_session(request))
    return _json(TokenCount(input_tokens=count))


async def _while_connected(
    endpoint: EpisodeEndpoint, request: Request, answer: Coroutine[Any, Any, _ResultT]
) -> _ResultT | None:
    """Awaits an answer. If the client disconnects first, the answer is cancelled, and the result is None."""
    work = endpoint.start(answer)
    # This task ends with the response. If it were cancelled here, its exception and everything that the
    # frames of its traceback refer to would be left to the garbage collector, which would then stop all
    # episodes for some 20 ms again and again.
    gone = endpoint.start(wait_for_disconnect(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.cancelled() or gone.cancelled():  # closing the endpoint cancels both, in any order
            raise RefusedError("the episode is over", code="episode_over", status=410)
        return work.result() if work.done() else None
    finally:
        work.cancel()


async def _list_models(endpoint: EpisodeEndpoint, request: Request) -> Response:
    models = endpoint.models()
    return _json(models_of(models) if _is_anthropic(request) else ModelList(object="list", data=models))


async def _show_model(endpoint: EpisodeEndpoint, request: Request) -> Response:
    name = str(request.path_params["model"])
    models = tuple(model for model in endpoint.models() if model.id == name)
    if not models:
        raise RefusedError(f"model {name!r} is not a policy of this run", code="model_not_found", status=404)
    return _json(models_of(models).data[0] if _is_anthropic(request) else models[0])


async def _take_result(endpoint: EpisodeEndpoint, request: Request) -> Response:
    endpoint.report = await _read(request, AgentReport)
    return Response(status_code=204)


async def _refuse_path(endpoint: EpisodeEndpoint, request: Request) -> Response:
    raise _unknown_url(request, str(request.path_params["path"]))


async def _refuse_outside_path(request: Request) -> Response:
    return _error_response(request, _unknown_url(request, request.url.path))


def _unknown_url(request: Request, path: str) -> RefusedError:
    """The refusal of an unknown address or method, with those that exist and a hint."""
    advice = ""
    parts = path.strip("/").removeprefix("v1/").split("/")
    if parts[0] in _ADVICE:
        advice = f". {_ADVICE[parts[0]]}"
    return RefusedError(
        f"{request.method} {as_label(path)} is not served here; there are {_SERVED}{advice}",
        code="unknown_url",
        status=404,
    )


def _session(request: Request) -> str:
    """The client's name for the conversation of a request; empty if it gives none."""
    return as_label(request.headers.get("x-session-id", ""))


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
        return wire.decode_foreign_json(body, kind)
    except msgspec.DecodeError as err:
        raise RefusedError(str(err), code="invalid_request", status=400) from err
