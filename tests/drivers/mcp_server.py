"""An MCP server of the standard library alone, which misbehaves in the way that its argument names.

Its tools: `add(a, b)`, `count()`, which counts its calls, `read(path)`, `reach(port)`, and `misbehave()`. It
speaks the protocol version 2025-06-18 over standard input and output.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

KIND = sys.argv[1] if len(sys.argv) > 1 else ""
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "count": {"type": "object"},  # templates expect `properties`
    "read": {"type": "object", "properties": {"path": {"type": "string"}}},
    "reach": {"type": "object", "properties": {"port": {"type": "integer"}}},
    "misbehave": {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": NODE},
    },
}
if KIND == "self":
    SCHEMAS["misbehave"] = {"type": "object", "$ref": "#", "properties": {"all": {"$ref": "#"}}}
if KIND == "many":
    SCHEMAS |= {f"tool_{number}": {"type": "object", "properties": {}} for number in range(495)}
num_calls = 0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def send(message: dict[str, Any], *, id_first: bool = True) -> None:
    head = {"jsonrpc": "2.0", "id": message.pop("id")}
    say(json.dumps({**head, **message} if id_first else {**message, **head}))


def text(value: object, *, is_error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(value)}], "isError": is_error}


def called(name: str, given: dict[str, Any]) -> dict[str, Any]:
    global num_calls
    num_calls += 1
    match name:
        case "add":
            return text(given["a"] + given["b"])
        case "count":
            return {"content": [], "structuredContent": {"calls": num_calls}, "isError": False}
        case "read":
            return text(Path(given["path"]).read_text())
        case "reach":
            with socket.create_connection(("127.0.0.1", given["port"]), timeout=2):
                return text("reached")
        case _:
            return misbehaved()


def misbehaved() -> dict[str, Any]:
    match KIND:
        case "dies":
            sys.stderr.write("out of memory")
            sys.stderr.flush()
            os._exit(3)
        case "hangs":
            time.sleep(1e6)
        case "large" | "large-last":
            return text("x" * (50 << 20))
        case "image":
            return {
                "content": [
                    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
                    *text("a cat")["content"],
                ]
            }
        case "nonsense":
            return {"content": "no list"}
        case _:
            return text("as told")
    raise AssertionError("unreachable")


def page(cursor: str | None) -> dict[str, Any]:
    """A hundred tools, and where the next ones begin."""
    names = list(SCHEMAS)
    start = int(cursor or 0)
    tools = [
        {"name": n, "description": f"The tool {n}.", "inputSchema": SCHEMAS[n]}
        for n in names[start : start + 100]
    ]
    return {"tools": tools} | ({"nextCursor": str(start + 100)} if start + 100 < len(names) else {})


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            info = {"name": "misbehaving", "version": "1"}
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return page(params.get("cursor"))
        case "tools/call":
            try:
                return called(params["name"], params.get("arguments") or {})
            except (KeyError, TypeError, OSError) as err:
                return text(f"{type(err).__name__}: {err}", is_error=True)
        case _:
            raise LookupError(method)


def main() -> None:
    if KIND == "ends":
        sys.exit("no database")
    if KIND == "prints":
        say("I am no server")
        time.sleep(1e6)
    for line in sys.stdin:
        if KIND == "garbage":
            say("Listening...\n\x00\xff{}\n[1, 2]\n")
            sys.stderr.write("a line of a log\n")
        request = json.loads(line)
        if "id" not in request:
            continue
        try:
            result = answer(request["method"], request.get("params") or {})
        except LookupError:
            send({"id": request["id"], "error": {"code": -32601, "message": "no such method"}})
        else:
            send({"id": request["id"], "result": result}, id_first=KIND != "large-last")


if __name__ == "__main__":
    main()
