"""Tools in processes of their own: calls are killed at their deadline, with all that they started."""

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.tools.config import ToolUseConfig
from astraflow.addons.tools.tool import Tool, ToolContext, ToolResult, run_call
from astraflow.config import parse_config
from astraflow.errors import ConfigError, RolloutError
from astraflow.types import Task
from astraflow.workflows.calls import ToolCall
from astraflow.workflows.factory import make_workflow
from drivers.system_driver import wait_gone

pytestmark = pytest.mark.timeout(120)


def whose() -> int:
    """Its process."""
    return os.getpid()


def hang(note: str) -> str:
    """Never returns, and starts a program that never ends; without a note, it returns at once."""
    if not note:
        return "ready"
    program = subprocess.Popen(["sleep", "1000"])
    Path(note).write_text(f"{os.getpid()} {program.pid}")
    while True:
        time.sleep(10)


def broken() -> None:
    """Divides by zero."""
    raise ZeroDivisionError("by zero")


def gone() -> None:
    """Ends its process."""
    os._exit(3)


def closed() -> None:
    """Has lost its database."""
    raise RolloutError("no database", is_retryable=False)


def asked(place: str, context: ToolContext) -> str:
    """Looks at a place."""
    return f"{context.task.prompt} {context.episode} {len(context.state)} {place}"


async def soon() -> None:
    """Waits."""


def tool(name: str, **fields: Any) -> Tool:
    config = {"tools": [{"use": f"{__name__}:{name}", "processes": 1, **fields}]}
    workflow: Any = make_workflow(parse_config(config, ToolUseConfig))
    return workflow.keywords["tools"][0]


async def run(made: Tool, timeout_s: float = 60.0, **arguments: object) -> ToolResult:
    context = ToolContext(Task(id="t", source="s", prompt="Where?"), "e1", {"kept": object()})
    call = ToolCall(made.spec.name, arguments)
    return await run_call({made.spec.name: made}, call, context=context, timeout_s=timeout_s, max_chars=99)


async def test_calls_run_elsewhere_one_after_the_other_in_one_process() -> None:
    made = tool("whose")
    results = await asyncio.gather(*[run(made) for _ in range(3)])
    assert {result.text for result in results} != {str(os.getpid())}
    assert len({result.text for result in results}) == 1


async def test_a_call_over_its_deadline_is_killed_with_what_it_started_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    made = tool("hang")
    note = tmp_path / "pids"
    assert (await run(made, note="")).text == "ready"
    result = await run(made, timeout_s=3.0, note=str(note))
    assert result == ToolResult("error: the call took longer than 3 s", is_error=True, is_late=True)
    pids = [int(word) for word in note.read_text().split()]
    assert len(pids) == 2
    assert wait_gone(pids, timeout_s=10.0) == []
    assert (await run(made, note="")).text == "ready"


async def test_what_goes_wrong_in_a_process_is_told_as_it_is_in_a_thread() -> None:
    assert await run(tool("broken")) == ToolResult("error: ZeroDivisionError: by zero", is_error=True)
    with pytest.raises(RolloutError, match="no database") as caught:
        await run(tool("closed"))
    assert not caught.value.is_retryable
    with pytest.raises(RolloutError, match=r"ended its process \(exit code 3\)"):
        await run(tool("gone"))


async def test_a_tool_in_a_process_knows_its_task_and_episode() -> None:
    assert (await run(tool("asked"), place="here")).text == "Where? e1 0 here"


def test_an_async_tool_needs_no_process() -> None:
    with pytest.raises(ConfigError, match=r"workflow\.tools\.0: .*soon is async"):
        tool("soon")
