"""Tools of MCP servers: programs in the sandbox, and servers at a URL, that work or misbehave."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from astraflow.addons.sandbox.backends import chosen_maker
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.tools.config import ToolUseConfig
from astraflow.addons.tools.mcp_tools import McpConnection, McpToolUse
from astraflow.addons.tools.tool import Tool, ToolContext, ToolFailedError, ToolResult, run_call
from astraflow.errors import ConfigError, RolloutError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, ToolSpec
from astraflow.workflows.calls import ToolCall
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.workflow_driver import letter_renderer

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("sandbox")]

DRIVERS = Path(__file__).parents[1] / "drivers"


@pytest.fixture(autouse=True)
async def sandbox() -> None:
    """Some sandbox that works here."""
    try:
        await chosen_maker(SandboxConfig(), for_agents=True)
    except ConfigError as err:
        pytest.skip(str(err))


def config(kind: str = "", **settings: Any) -> ToolUseConfig:
    server = {"mcp": f"{sys.executable} {DRIVERS}/mcp_server.py {kind}", **settings}
    return ToolUseConfig.model_validate_json(json.dumps({"tools": [{"name": "mcp", **server}]}))


@asynccontextmanager
async def connection(kind: str = "", **settings: Any) -> AsyncIterator[McpConnection]:
    (server,) = config(kind, **settings).servers
    connected = McpConnection(server)
    try:
        yield connected
    finally:
        await connected.close()


async def specs(kind: str = "", **settings: Any) -> list[str]:
    """The tools as a workflow lists them: name, description, and schema."""
    workflow = McpToolUse(config(kind, **settings), (), ())
    try:
        await workflow.open()
        return [f"{spec.name} {spec.description} {spec.parameters}" for spec in workflow.specs]
    finally:
        await workflow.close()


async def ran(tool: Tool, *, timeout_s: float = 20.0, **arguments: object) -> ToolResult:
    call = ToolCall("tool", arguments)
    context = ToolContext(make_task(), "e1")
    return await run_call({"tool": tool}, call, context=context, timeout_s=timeout_s, max_chars=40)


def tool_of(connected: McpConnection, name: str) -> Tool:
    spec = ToolSpec(name=name, description="", parameters="{}")
    return Tool(spec, partial(connected.call, name), check=connected.check)


# --- what works -----------------------------------------------------------------------------------


async def test_results_are_text_and_errors_are_told_to_the_model() -> None:
    async with connection("image") as server:
        assert await server.call("add", a=2, b=3) == "5"
        assert await server.call("count") == '{"calls":2}'
        assert await server.call("misbehave") == "(image left out)\na cat"
        assert await ran(tool_of(server, "add"), a=2) == ToolResult("error: KeyError: 'b'", is_error=True)
        assert server.num_starts == 1


async def test_a_model_sees_the_tools_with_the_schemas_of_the_server() -> None:
    add, count, *_, misbehave = await specs()
    assert add.startswith('add The tool add. {"type":"object","properties":{"a":{"type":"integer"}')
    assert count == 'count The tool count. {"type":"object","properties":{}}'
    assert (
        '"properties":{"tree":{"$ref":"#/$defs/Node"}}' in misbehave
    )  # a reference that loops is only shown


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


async def play(settings: ToolUseConfig, *replies: str, times: int = 1) -> list[Episode]:
    engine = ScriptedEngine(
        lambda request: replies[sum(id_ == 4 for id_ in request.token_ids) - 1], max_context=99_999
    )
    hosted = HostedPolicy(make_policy("actor", max_tokens=999), engine, letter_renderer())
    async with EpisodeRunner({"actor": hosted}, settings.make(), exact) as runner:
        return [await runner.episode(make_task(), seed=seed) for seed in range(times)]


def told(episode: Episode) -> list[str]:
    return [message.content for message in episode.messages if message.role == "tool"]


@pytest.mark.parametrize(("per", "counts"), [("service", [1, 2]), ("episode", [1, 1])])
async def test_episodes_share_a_server_or_each_has_its_own(per: str, counts: list[int]) -> None:
    episodes = await play(config(per=per), call("count"), "5", times=2)
    assert [told(episode) for episode in episodes] == [[f'{{"calls":{num}}}'] for num in counts]
    assert [episode.score for episode in episodes] == [1.0, 1.0]


async def test_a_schema_that_contains_itself_is_shown_and_its_tool_is_called() -> None:
    (episode,) = await play(config("self"), call("misbehave", '{"all": {"all": {}}}'), "5")
    assert told(episode) == ["as told"]


async def test_a_server_sees_neither_the_network_nor_other_files_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shown").write_text("shown")
    before = set(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with connection(visible=[f"{tmp_path}/data"]) as server:
            assert await server.call("read", path=f"{tmp_path}/data/shown") == "shown"
            with pytest.raises(ToolFailedError, match="FileNotFoundError"):
                await server.call("read", path=f"{tmp_path}/secret")
            with pytest.raises(ToolFailedError, match="refused"):
                await server.call("reach", port=listener.getsockname()[1])
    assert not [
        each for each in psutil.Process().children(recursive=True) if "mcp_server" in str(each.cmdline())
    ]
    assert set(os.listdir("/proc/self/fd")) == before


# --- what does not --------------------------------------------------------------------------------


async def test_lines_that_are_no_messages_are_skipped() -> None:
    async with connection("garbage") as server:
        assert await server.call("add", a=2, b=3) == "5"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ends", r"workflow\.tools: .*exit code 1: no database"),
        ("prints", r"it printed b'I am no server"),
    ],
)
async def test_a_server_that_does_not_start_is_named_with_its_words(
    kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.addons.tools.mcp_tools._STARTING_S", 5.0)
    with pytest.raises(ConfigError, match=message):
        await specs(kind)


async def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mcp-server-nowhere' cannot be started: no such program"):
        await specs(mcp="mcp-server-nowhere")


async def test_of_500_tools_a_recipe_names_those_to_show() -> None:
    with pytest.raises(ConfigError, match=r"has 500 tools, .* name those to show in `only`"):
        await specs("many")
    shown = await specs("many", only=["tool_494", "add"])
    assert [text.split()[0] for text in shown] == ["tool_494", "add"]
    with pytest.raises(ConfigError, match=r"has no tool 'tool_495'; did you mean"):
        await specs("many", only=["tool_495"])


@pytest.mark.parametrize("kind", ["large", "large-last"])
async def test_a_result_of_50_mb_is_told_to_the_model_and_never_held(kind: str) -> None:
    async with connection(kind) as server:
        await server.call("add", a=2, b=3)
        before = psutil.Process().memory_info().rss
        result = await ran(tool_of(server, "misbehave"))
        assert result == ToolResult("error: the result has more than 8,388,60 (cut off)", is_error=True)
        assert psutil.Process().memory_info().rss - before < 30 << 20
        assert await server.call("add", a=2, b=3) == "5"
        assert server.num_starts == 1


async def test_a_server_that_dies_fails_the_episode_and_is_started_again() -> None:
    async with connection("dies") as server:
        with pytest.raises(RolloutError, match=r"no longer answers: .*exit code 3: out of memory") as caught:
            await server.call("misbehave")
        assert caught.value.is_retryable
        assert await server.call("count") == '{"calls":1}'
        assert server.num_starts == 2


async def test_a_server_that_hangs_fails_the_episode_and_is_started_again() -> None:
    async with connection("hangs") as server:
        await server.open()
        with pytest.raises(RolloutError, match="no longer answers"):
            await ran(tool_of(server, "misbehave"), timeout_s=0.5)
        assert await server.call("count") == '{"calls":1}'


async def test_a_result_of_another_form_fails_the_episode_but_not_the_server() -> None:
    async with connection("nonsense") as server:
        with pytest.raises(RolloutError, match="the call of misbehave failed"):
            await server.call("misbehave")
        assert await server.call("count") == '{"calls":2}'


async def test_all_calls_in_flight_fail_with_the_server_and_the_next_work() -> None:
    async with connection("dies") as server:
        await server.open()
        calls = [
            server.call("add", a=1, b=1),
            server.call("misbehave"),
            *[server.call("count") for _ in range(8)],
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = [result for result in results if isinstance(result, RolloutError)]
        assert results[0] == "2"
        assert len(failed) == 9
        assert await server.call("add", a=2, b=2) == "4"
        assert server.num_starts == 2


# --- over HTTP ------------------------------------------------------------------------------------


class HttpServer:
    """A server of the official SDK."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._command = [sys.executable, f"{DRIVERS}/mcp_http_server.py", str(self.port), *options]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)
        deadline_s = time.monotonic() + 60
        while True:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["", "json"])
def http(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setenv("TOOLS_KEY", "s3cret")
    server = HttpServer(request.param)
    try:
        yield server
    finally:
        server.end()


async def test_a_server_at_a_url_is_called_with_its_key_and_may_be_restarted(http: HttpServer) -> None:
    url = f"http://127.0.0.1:{http.port}/mcp"
    async with connection(mcp=url, key_variable="TOOLS_KEY") as server:
        assert [tool.name for tool in await server.tools()] == ["add", "large"]
        assert await server.call("add", a=2, b=3) == "5"
        with pytest.raises(ToolFailedError):
            await server.call("add", a="two", b=3)
        with pytest.raises(RolloutError, match="the call of large failed"):
            await server.call("large")
        assert await server.call("add", a=2, b=3) == "5"
        await asyncio.to_thread(http.end)
        with pytest.raises(RolloutError):
            await server.call("add", a=2, b=3)
        await asyncio.to_thread(http.start)
        assert await server.call("add", a=2, b=4) == "6"
    async with connection(mcp=url) as server:
        with pytest.raises(RolloutError):
            await server.call("add", a=2, b=3)
