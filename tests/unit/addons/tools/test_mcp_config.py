"""MCP servers among the tools of a recipe."""

import sys
from typing import Any

import pytest

from astraflow.addons.tools.config import McpServerConfig, ToolConfig, ToolUseConfig
from astraflow.config import Config, dump_yaml, parse_config
from astraflow.errors import ConfigError


class Section(Config):
    """A recipe with nothing but a workflow."""

    workflow: ToolUseConfig


def parsed(*tools: Any) -> Section:
    return parse_config({"workflow": {"name": "tool_use", "tools": list(tools)}}, Section)


def test_a_server_is_named_by_its_command_or_its_url_alone() -> None:
    section = parsed(
        {"mcp": "mcp-server-time --local-timezone UTC"}, {"mcp": "https://tools/mcp"}, {"use": "m:f"}
    )
    program, remote, function = section.workflow.tools
    assert isinstance(program, McpServerConfig)
    assert isinstance(remote, McpServerConfig)
    assert isinstance(function, ToolConfig)
    assert (program.is_remote, remote.is_remote) == (False, True)
    assert parse_config(section.model_dump(mode="json"), Section) == section
    assert "mcp: https://tools/mcp" in dump_yaml(section)


def test_who_joins_a_run_allows_a_server_with_the_variable_of_its_key() -> None:
    remote = {"mcp": "https://tools/mcp", "key_variable": "TOOLS_KEY"}
    workflow = parsed({"mcp": "mcp-server-time"}, remote).workflow
    assert workflow.commands == ("mcp-server-time", "https://tools/mcp TOOLS_KEY")
    assert workflow.needs_sandbox
    assert not parsed(remote).workflow.needs_sandbox
    assert parsed({"use": "m:f"}).workflow.commands == ()


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"mcp": "https://tools/mcp", "visible": ["data"]}, "visible is for a command, but mcp is a URL"),
        (
            {"mcp": "mcp-server-time", "key_variable": "KEY"},
            "key_variable is for a URL, but mcp is a command",
        ),
        ({"mcp": "server 'open"}, "is neither a command nor a URL: No closing quotation"),
        ({"mcp": "   "}, "is neither a command nor a URL: it names no program"),
        ({"mcp": "server", "per": "call"}, r"workflow\.tools\.0\.per = 'call' is not valid"),
        ({"mpc": "server"}, r"workflow\.tools\.0"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(server: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(server)


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcp" or "tools.mcp_" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'astraflow\[mcp\]'"):
        parsed({"mcp": "mcp-server-time"}).workflow.make()
