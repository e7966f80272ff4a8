"""The agent gateway: an OpenAI-compatible server on loopback, with an address and a key for each episode.

    agent program --HTTP--> Gateway --> EpisodeEndpoint --> Dialogue --> engine
                                                                |
                                                                +--> recorder

One server per process, opened when the first episode asks for it. An endpoint lives inside its workflow's
`async with`; afterwards its address is unknown. It knows nothing of tasks and answers: an agent cannot read
what it is scored with.
"""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from astraflow import wire
from astraflow.errors import Error, RefusedError, RolloutError
from astraflow.rollout.dialogue import Dialogue
from astraflow.rollout.gateway_episode import EpisodeEndpoint
from astraflow.rollout.gateway_wire import ChatRequest, Completed, ErrorBody, ModelList
from astraflow.service.messages import media_type_of, unsupported_media_type
from astraflow.service.server import HttpServer
from astraflow.service.web_guard import WebRules
from astraflow.workflows.calls import CallParser
from astraflow.workflows.conversation import AgentReport

__all__ = ["Gateway"]

_MAX_BODY_BYTES = 16 * 2**20
_ItemT = TypeVar("_ItemT", bound=msgspec.Struct)
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
    status, code = 503, "unavailable"
    if isinstance(error, RefusedError):
        status, code = error.status, error.code
    elif isinstance(error, RolloutError) and not error.is_retryable:
        status, code = 400, "invalid_request"
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
    work, gone = endpoint.start(asked), asyncio.create_task(_hung_up(request))
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
