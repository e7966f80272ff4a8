"""An MCP server of the official SDK over HTTP, on the port that is its argument, with the key `s3cret`."""

import sys
from typing import Any

import uvicorn
from mcp.server import MCPServer
from starlette.responses import PlainTextResponse

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def large() -> str:
    """Returns a large text."""
    return "x" * (50 << 20)


async def with_key(scope: Any, receive: Any, send: Any) -> None:
    """Refuses requests without the key."""
    if scope["type"] == "http" and (b"authorization", b"Bearer s3cret") not in scope["headers"]:
        await PlainTextResponse("no key", status_code=401)(scope, receive, send)
    else:
        await app(scope, receive, send)


if __name__ == "__main__":
    app = server.streamable_http_app(json_response="json" in sys.argv)
    uvicorn.run(with_key, port=int(sys.argv[1]), log_level="warning")
