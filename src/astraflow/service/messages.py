"""Items and errors as HTTP messages: how a service reads requests and responds, and how callers read that.

Both directions of an error are here, so that they agree: `error_response` converts an error of ours into a
status and an `ErrorReply`, and `error_from_reply` converts these back into the same class of error.
"""

from typing import TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from astraflow import wire
from astraflow.errors import (
    ConfigError,
    DataError,
    Error,
    FencedError,
    JournalError,
    RefusedError,
    TooLargeError,
    VersionMismatchError,
    WeightsError,
    WireError,
)
from astraflow.types import ErrorReply, Item

__all__ = [
    "error_from_reply",
    "error_response",
    "item_response",
    "media_type_of",
    "read_item",
    "unsupported_media_type",
]

_ItemT = TypeVar("_ItemT", bound=Item)
_MEDIA_TYPES = (wire.MSGPACK, wire.JSON)


async def read_item(request: Request, item_type: type[_ItemT], *, limit: int = wire.MAX_BODY_BYTES) -> _ItemT:
    """Decodes the item in a request's body according to its Content-Type.

    The server limits the time that a body may take (`ConnectionLimits.body_s`).
    Raises: WireError if the body is too large or does not fit the type; RefusedError if its Content-Type is
    neither msgpack nor JSON.
    """
    media_type = media_type_of(request)
    if media_type not in _MEDIA_TYPES:
        raise unsupported_media_type(media_type, *_MEDIA_TYPES)
    body = await _read_body(request, item_type.__name__, limit)
    return wire.decode(body, item_type, media_type)


def media_type_of(request: Request) -> str:
    """Returns the media type in a request's Content-Type, without parameters; empty if there is none."""
    return _header(request, b"content-type").partition(";")[0].strip().lower()


def unsupported_media_type(given: str, *expected: str) -> RefusedError:
    """Makes the error for a body of an unsupported media type.

    A body without a media type is also refused, because browsers let a web page send such bodies to any
    address without asking the service first.
    """
    choices = " or ".join(expected)
    return RefusedError(
        f"Content-Type {given!r}: expected {choices}", code="unsupported_media_type", status=415
    )


async def _read_body(request: Request, name: str, limit: int) -> bytes:
    """Like `request.body()`, with a limit. Most bodies are one message, so `request.stream()` would cost more
    than reading them."""
    chunks: list[bytes] = []
    size = 0
    has_more = True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            from starlette.requests import ClientDisconnect

            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise TooLargeError(f"{name}: body over the limit of {limit} bytes")
        chunks.append(chunk)
        has_more = message.get("more_body", False)
    return b"".join(chunks)


def _header(request: Request, name: bytes) -> str:
    """Returns the first value of a header; empty if it is missing."""
    for key, value in cast("list[tuple[bytes, bytes]]", request.scope["headers"]):
        if key == name:
            return value.decode("latin-1")
    return ""


def item_response(item: Item, request: Request, status: int = 200) -> Response:
    """Makes the response for an item, in the media type that the caller accepts.

    The media type is JSON unless the caller names msgpack.
    """
    media_type = wire.MSGPACK if wire.MSGPACK in _header(request, b"accept") else wire.JSON
    return Response(wire.encode(item, media_type), status, media_type=media_type)


def error_response(error: Error, request: Request) -> Response:
    """Makes the response for one of our errors: its status, code and message."""
    status, code = _status_and_code(error)
    return item_response(ErrorReply(code=code, message=str(error)), request, status)


def _status_and_code(error: Error) -> tuple[int, str]:
    if isinstance(error, RefusedError):
        return error.status, error.code
    if isinstance(error, VersionMismatchError):
        return 400, "protocol_version"
    if isinstance(error, JournalError):
        return 503, "journal"
    if isinstance(error, TooLargeError):
        return 413, "too_large"
    if isinstance(error, WireError):
        return 400, "malformed"
    if isinstance(error, ConfigError | DataError | WeightsError):
        return 400, "invalid"
    return 503, "unavailable"


def error_from_reply(status: int, body: bytes, media_type: str, *, url: str) -> Error:
    """Makes the error that a response with a status of at least 300 represents. `url`: of the request."""
    if status < 400:
        message = f"{url} answered HTTP {status}, a redirect, which is not followed"
        return RefusedError(f"{message}; use the service's own address", code="redirect", status=status)
    try:
        error = wire.decode(body, ErrorReply, media_type)
    except WireError:
        text = body[:200].decode("utf-8", "replace")
        message = f"{url} answered HTTP {status}: {text!r}, which is not a response of an AstraFlow service"
        return RefusedError(f"{message}; is another program at this address?", code="unknown", status=status)
    if error.code == "fenced":
        return FencedError(error.message)
    if error.code == "protocol_version":
        return VersionMismatchError(error.message)
    if status in {400, 413}:
        return WireError(error.message)
    return RefusedError(error.message, code=error.code, status=status)
