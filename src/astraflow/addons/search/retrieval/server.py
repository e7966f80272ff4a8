"""A search index behind HTTP: the server, and the client that searches like an index in the same process.

    POST /v1/search   SearchRequest -> SearchReply; 422 `query` if the query can't be searched for
    GET  /v1/health   IndexSize

An index of a large corpus needs memory and, if it is dense, a fast machine. Services of any number can then
share one, and need neither the index nor its libraries. A server that dies fails the episodes that search; as
an infrastructure error, this is never a reward of 0.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.addons.search.retrieval.config import FolderIndexConfig, ServerIndexConfig
from astraflow.addons.search.retrieval.documents import Document
from astraflow.addons.search.retrieval.index import MAX_QUERY_CHARS, SearchIndex, open_index
from astraflow.errors import ConfigError, Error, QueryError, RefusedError, RolloutError, UnavailableError
from astraflow.service.client import ServiceClient
from astraflow.service.loopback import is_loopback
from astraflow.service.messages import error_response, item_response, read_item
from astraflow.service.server import HttpServer, TokenAuth
from astraflow.types import Item
from astraflow.user_input.user_files import read_token

__all__ = [
    "FoundDocument",
    "IndexSize",
    "RemoteIndex",
    "SearchReply",
    "SearchRequest",
    "index_app",
    "serve_index",
]

_log = logging.getLogger(__name__)

_MAX_BYTES = 64 * 1024
"""Largest body of a request: a query of `MAX_QUERY_CHARS`, however it is encoded."""
_PATIENCE_S = 10.0
"""How long a search tries to reach its server, which may be restarting."""
_QUERY_CODE = "query"

_T = TypeVar("_T")


class SearchRequest(Item, frozen=True, kw_only=True):
    """Example: `SearchRequest(query="capital of France", num=3)`."""

    query: Annotated[str, Meta(max_length=MAX_QUERY_CHARS)]
    num: Annotated[int, Meta(ge=1, le=100)]


class FoundDocument(Item, frozen=True, kw_only=True):
    """A document that was found."""

    title: str
    text: str


class SearchReply(Item, frozen=True, kw_only=True):
    """The documents, the best first."""

    documents: tuple[FoundDocument, ...] = ()


class IndexSize(Item, frozen=True, kw_only=True):
    """What a server searches."""

    num_documents: Annotated[int, Meta(ge=0)]


# --- the server -----------------------------------------------------------------------------------


def index_app(index: SearchIndex) -> Starlette:
    """Returns the ASGI app that searches an index."""

    async def search(request: Request) -> Response:
        asked = await read_item(request, SearchRequest, limit=_MAX_BYTES)
        try:
            found = await asyncio.to_thread(index.search, asked.query, num=asked.num)
        except QueryError as err:
            raise RefusedError(str(err), code=_QUERY_CODE, status=422) from err
        documents = tuple(FoundDocument(title=each.title, text=each.text) for each in found)
        return item_response(SearchReply(documents=documents), request)

    async def health(request: Request) -> Response:
        return item_response(IndexSize(num_documents=len(index)), request)

    return Starlette(
        routes=[
            Route("/v1/search", _refusing(search), methods=["POST"]),
            Route("/v1/health", _refusing(health), methods=["GET"]),
        ]
    )


def _refusing(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Turns our errors into replies."""

    async def guarded(request: Request) -> Response:
        try:
            return await answer(request)
        except Error as err:
            return error_response(err, request)

    return guarded


async def serve_index(
    stop: asyncio.Event, *, folder: Path, host: str, port: int, token: str, tls: tuple[str, str] | None = None
) -> int:
    """Serves the index in a folder until `stop`. Returns the exit code.

    Raises: ConfigError if it would listen beyond loopback without a token, or can't listen; DataError if
    there is no index.
    """
    if not token and not is_loopback(host):
        raise ConfigError(f"--host {host}: others can reach this address; pass --token-file, too")
    index = await asyncio.to_thread(open_index, FolderIndexConfig(path=str(folder)))
    app = TokenAuth(index_app(index), {token: "reader"} if token else {}, open_paths=frozenset())
    server = HttpServer(app, host=host, port=port, name="search", tls=tls)
    url = await server.start()
    _log.info("%s: %d documents at %s", folder, len(index), url)
    try:
        await stop.wait()
    finally:
        await server.stop()
    return 0


# --- the client -----------------------------------------------------------------------------------


class RemoteIndex:
    """The index of a server. Example: `RemoteIndex(config).search("capital of France", num=3)[0].title`.

    Its methods block, so call them in a thread. Threads may share it.
    """

    def __init__(self, config: ServerIndexConfig) -> None:
        """Raises: ConfigError if the token's file can't be read."""
        self._config = config
        self._token = read_token(Path(config.token_file).expanduser() if config.token_file else None)

    def check(self) -> int:
        """Returns the number of documents. Raises: ConfigError if the server can't be searched."""
        try:
            # In a thread of its own, because the caller may be in an event loop.
            with ThreadPoolExecutor(1) as thread:
                size = thread.submit(asyncio.run, self._ask(self._size, patience_s=1.0)).result()
        except (UnavailableError, RefusedError) as err:
            raise ConfigError(f"index.url = {self._config.url!r}: {err}; {_HOW_TO_START}") from err
        return size.num_documents

    def search(self, query: str, *, num: int) -> list[Document]:
        """At most `num` documents, the best first.

        Raises: QueryError if the query can't be searched for; RolloutError if the server doesn't answer.
        """
        request = SearchRequest(query=" ".join(query.split())[:MAX_QUERY_CHARS], num=num)

        async def search(client: ServiceClient) -> SearchReply:
            return await client.call("POST", "/v1/search", SearchReply, body=request)

        try:
            found = asyncio.run(self._ask(search, patience_s=_PATIENCE_S))
        except RefusedError as err:
            if err.code == _QUERY_CODE:
                raise QueryError(str(err)) from err
            raise RolloutError(f"the search server {self._config.url} refuses a search: {err}") from err
        except UnavailableError as err:
            raise RolloutError(f"the search server is gone: {err}; {_HOW_TO_START}") from err
        return [Document(each.title, each.text) for each in found.documents]

    async def _ask(self, ask: Callable[[ServiceClient], Awaitable[_T]], *, patience_s: float) -> _T:
        client = ServiceClient(
            self._config.url, token=self._token, patience_s=patience_s, ca_file=self._config.ca_file
        )
        try:
            return await ask(client)
        finally:
            await client.close()

    async def _size(self, client: ServiceClient) -> IndexSize:
        return await client.call("GET", "/v1/health", IndexSize)


_HOW_TO_START = "start it with `astraflow data serve INDEX --port PORT`"
