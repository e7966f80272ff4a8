"""The workflow `tool_use` with the tools of MCP servers.

    McpToolUse (one per service) -> McpConnection (one per service or episode) -> mcp.Client, in its own task

A server's tools are listed once per service. The server itself checks the arguments of a call. The model is
told about what it can correct: a result that is an error, wrong arguments, a result that is too long. Any
other failure, such as a server that has ended or no longer answers, fails the episode, and the server is
started again.
"""

import asyncio
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from mcp import Client, MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
)
from mcp_types import Tool as ListedTool
from pydantic import ValidationError

from astraflow import wire
from astraflow.addons.tools.mcp_streams import TOO_LONG, boxed_streams, http_streams
from astraflow.addons.tools.tool import Tool, ToolFailedError
from astraflow.addons.tools.tool_use import tool_use
from astraflow.errors import ConfigError, Error, RolloutError, WireError
from astraflow.types import ToolSpec
from astraflow.user_input.mistakes import hint
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

if TYPE_CHECKING:
    from astraflow.addons.tools.config import McpServerConfig, ToolUseConfig

__all__ = ["McpConnection", "McpToolUse"]

_log = logging.getLogger(__name__)

_MAX_TOOLS = 64
"""Largest number of a server's tools that a prompt shows, unless the recipe names them."""
_MAX_LISTED = 10_000
"""Largest number of tools that are listed, because a server could list forever."""
_MAX_SCHEMA = 1 << 16
"""Largest number of characters of a tool's schema."""
_STARTING_S = 60.0
_ANSWER_S = 5.0
"""Longest time in which a server must list its tools after a call was late or failed. Some servers don't
answer while a tool runs; they are replaced, too."""


class McpConnection:
    """A connection to a server, which `open` opens, and opens again after it was lost.

    Example: `await connection.call("add", a=1, b=2)`, and at the end `await connection.close()`.
    """

    def __init__(self, config: "McpServerConfig", private: tuple[Path, ...] = ()) -> None:
        """`private`: files and folders that a server in the sandbox must not see."""
        self._name = config.mcp
        self._words: list[str] = []
        self._connect = partial(boxed_streams, shlex.split(config.mcp), config.visible, private, self._words)
        if config.is_remote:
            self._connect = partial(http_streams, config.mcp, os.environ.get(config.key_variable, ""))
        self._owner: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Client]
        self.num_starts = 0

    async def open(self) -> Client:
        """Returns the client of the connection. Raises: Error if the server doesn't start."""
        if self._owner is None or self._owner.done():
            self._opened = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._own(self._opened))
            self.num_starts += 1
        return await asyncio.shield(self._opened)

    async def close(self) -> None:
        """Ends the connection, and a server in the sandbox."""
        owner = self._owner
        self._owner = None  # before it has ended, so that the next call starts another one
        if owner is not None:
            owner.cancel()
            await asyncio.wait({owner})

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """Calls a tool. Returns its result as text.

        Raises: ToolFailedError with a text for the model; RolloutError if the server failed.
        """
        client = await self.open()
        params = CallToolRequestParams(name=tool, arguments=arguments)
        try:
            # Not `call_tool`, which also checks results by schemas of the server, whatever they contain.
            result = await client.session.send_request(CallToolRequest(params=params), CallToolResult)
        except (MCPError, ValidationError) as err:
            if isinstance(err, MCPError) and err.code in {INVALID_PARAMS, TOO_LONG}:
                raise ToolFailedError(str(err)) from err
            await self.check()
            raise RolloutError(f"{self._name}: the call of {tool} failed: {self._explain(err)}") from err
        text = "\n".join(_texts_in(result))
        if result.is_error:
            raise ToolFailedError(text)
        return text

    async def check(self) -> None:
        """Checks that the server answers, and else closes the connection. Raises: RolloutError."""
        owner = self._owner
        if owner is None:
            raise RolloutError(f"the connection to {self._name} was lost")
        try:
            async with asyncio.timeout(_ANSWER_S):
                await (await asyncio.shield(self._opened)).list_tools()
        except (MCPError, ValidationError, TimeoutError) as err:
            if owner is self._owner:
                await self.close()
            raise RolloutError(f"{self._name} no longer answers: {self._explain(err)}") from err

    async def tools(self) -> list[ListedTool]:
        """Lists the server's tools. Raises: Error."""
        client = await self.open()
        tools: list[ListedTool] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(_STARTING_S):
                while len(tools) <= _MAX_LISTED:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
        except (MCPError, ValidationError, TimeoutError) as err:
            raise RolloutError(f"{self._name} did not list its tools: {self._explain(err)}") from err
        return tools

    async def _own(self, opened: asyncio.Future[Client]) -> None:
        """Opens a connection and holds it until it is closed: the library wants both in the same task."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(_STARTING_S):
                    client = await stack.enter_async_context(Client(self._connect(), cache=None))
                opened.set_result(client)
                await asyncio.Event().wait()
        except BaseException as err:  # the library raises groups of whatever a transport raises
            is_own = isinstance(err, ConfigError | RolloutError)
            problem = err if is_own else RolloutError(f"{self._name}: {self._explain(err)}")
            if not opened.done():
                opened.set_exception(problem)
            elif isinstance(err, Exception):
                _log.warning("a connection was lost: %s", problem)
            if not isinstance(err, Exception):
                raise

    def _explain(self, error: Any) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = cast("Any", error).exceptions[0]
        return "; ".join([str(error) or type(error).__name__, *self._words])


def _texts_in(result: CallToolResult) -> Iterator[str]:
    """Yields the texts of a result. Other content, such as an image, is only mentioned."""
    for block in result.content:
        if isinstance(block, TextContent):
            yield block.text
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            yield block.resource.text
        else:
            yield f"({block.type} left out)"
    if not result.content and result.structured_content is not None:
        yield msgspec.json.encode(result.structured_content).decode()


class McpToolUse:
    """The workflow of a service. Implements `OpenWorkflow`."""

    def __init__(
        self, config: "ToolUseConfig", own: Sequence[Tool], private: tuple[Path, ...], **made: Any
    ) -> None:
        """`own`: the tools that are functions. `made`: further keyword arguments of `tool_use`."""
        self._config = config
        self._own = tuple(own)
        self._private = private
        self._made = made
        self._shared = [McpConnection(server, private) for server in config.servers]
        self._specs: list[list[ToolSpec]] = []

    async def open(self) -> None:
        """Starts the servers and lists their tools. Raises: ConfigError if a server can't be used."""
        try:
            pairs = zip(self._config.servers, self._shared, strict=True)
            self._specs = [_specs(server, await connection.tools()) for server, connection in pairs]
        except ConfigError:
            raise
        except Error as err:
            raise ConfigError(f"workflow.tools: {err}") from err
        self._config.check_names(self.specs)

    @property
    def specs(self) -> list[ToolSpec]:
        """All tools, once the workflow is open."""
        return [tool.spec for tool in self._own] + [spec for specs in self._specs for spec in specs]

    async def close(self) -> None:
        """Ends the servers."""
        for connection in self._shared:
            await connection.close()

    async def __call__(self, task: ScoredTask, policies: Policies) -> Rewards:
        """Runs one episode of `tool_use`. The metric `tool_server_starts` counts starts in the service."""
        async with AsyncExitStack() as ending:
            tools = list(self._own)
            for server, connection, specs in zip(
                self._config.servers, self._shared, self._specs, strict=True
            ):
                if server.per == "episode":
                    connection = McpConnection(server, self._private)
                    ending.push_async_callback(connection.close)
                await connection.open()  # here, because a call has a deadline
                tools += [Tool(s, partial(connection.call, s.name), check=connection.check) for s in specs]
            rewards = await self._config.bind(tool_use, tools=tools, **self._made)(task, policies)
        rewards.add_metric("tool_server_starts", sum(each.num_starts for each in self._shared), "max")
        return rewards


def _specs(server: "McpServerConfig", listed: Sequence[ListedTool]) -> list[ToolSpec]:
    """Returns a server's tools as a chat template shows them. Raises: ConfigError."""
    found = {tool.name: tool for tool in listed}
    for name in server.only:
        if name not in found:
            raise ConfigError(f"workflow.tools: {server.mcp} has no tool {name!r}{hint(name, list(found))}")
    if not server.only and len(listed) > _MAX_TOOLS:
        raise ConfigError(
            f"workflow.tools: {server.mcp} has {len(listed)} tools, and a prompt would show all of them; "
            f"name those to show in `only` (without it, at most {_MAX_TOOLS} are accepted)"
        )
    return [_spec(server, found[name]) for name in server.only or found]


def _spec(server: "McpServerConfig", tool: ListedTool) -> ToolSpec:
    # Templates expect `properties`, which a schema need not have. References are shown, and never followed.
    schema: dict[str, Any] = {"type": "object", "properties": {}, **tool.input_schema}
    try:
        parameters = msgspec.json.encode(schema).decode()
        if len(parameters) > _MAX_SCHEMA:
            raise WireError(
                f"its schema has {len(parameters):,} characters; at most {_MAX_SCHEMA:,} are accepted"
            )
        return wire.checked(
            ToolSpec(name=tool.name, description=tool.description or "", parameters=parameters)
        )
    except (WireError, RecursionError) as err:
        raise ConfigError(
            f"workflow.tools: the tool {tool.name!r:.200} of {server.mcp} can't be shown to a model: {err}; "
            "leave it out by naming the others in `only`"
        ) from err
