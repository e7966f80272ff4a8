"""The OpenAPI 3.1 document, generated from the route table and the typed items."""

import re
import sys
from typing import Any

import msgspec

from astraflow import wire
from astraflow.dataflow.api import ROUTES, Param, Route
from astraflow.types import PROTOCOL_VERSION, ErrorReply, Item

__all__ = ["openapi_document", "openapi_json"]

_JsonMap = dict[str, Any]
_PATH_PARAM = re.compile(r"\{(\w+)(?::(\w+))?\}")
_REF = "#/components/schemas/{name}"


def openapi_document() -> _JsonMap:
    """The document as plain JSON data."""
    items = {item for route in ROUTES for item in (route.body, route.reply) if item is not None}
    ordered = sorted({*items, ErrorReply}, key=lambda item: item.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    paths: _JsonMap = {}
    for route in ROUTES:
        path = _PATH_PARAM.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "AstraFlow dataflow",
            "version": str(PROTOCOL_VERSION),
            "description": "Token columns (`format: binary`) are base64 text in JSON. See docs/protocol.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def openapi_json() -> bytes:
    """The document as indented JSON text. The same code gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(openapi_document()), indent=2) + b"\n"


def _operation(route: Route) -> _JsonMap:
    operation: _JsonMap = {
        "operationId": route.name,
        "summary": route.text,
        "x-roles": list(route.roles),
        "parameters": [*_path_params(route), *(_query_param(*item) for item in route.params.items())],
        "responses": {
            "200" if route.reply or route.media_type else "204": _answer(route),
            "default": {"description": "A refusal or an error.", "content": _content(ErrorReply)},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body)}
    return operation


def _answer(route: Route) -> _JsonMap:
    if route.reply is not None:
        return {"description": route.reply.__name__, "content": _content(route.reply)}
    if route.media_type:
        return {"description": route.text, "content": {route.media_type.split(";")[0]: {}}}
    return {"description": "Done; no body."}


def _content(item: type[Item]) -> _JsonMap:
    schema = {"$ref": _REF.format(name=item.__name__)}
    return {media_type: {"schema": schema} for media_type in (wire.JSON, wire.MSGPACK)}


def _path_params(route: Route) -> list[_JsonMap]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer" if kind == "int" else "string"},
        }
        for name, kind in _PATH_PARAM.findall(route.path)
    ]


def _query_param(name: str, param: Param) -> _JsonMap:
    schema: _JsonMap = {"type": param.kind}
    if param.default is not None:
        schema["default"] = param.default
    return {
        "name": name,
        "in": "query",
        "required": param.default is None,
        "description": param.text,
        "schema": schema,
    }


if __name__ == "__main__":
    sys.stdout.buffer.write(openapi_json())
