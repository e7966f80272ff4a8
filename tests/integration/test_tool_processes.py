"""Tools in processes of their own: calls are killed at their deadline, with all that they started."""

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.tools.config import ToolUseConfig
from astraflow.addons.tools.tool import Tool, ToolContext, ToolResult, run_call
from astraflow.addons.tools.tool_process import ToolReply
from astraflow.config import parse_config
from astraflow.errors import ConfigError, RolloutError
from astraflow.service.frames import Frame, pack
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


def forks(word: str) -> str:
    """Forks, and so does what returns."""
    os.fork()
    return word


def forks_and_answers_first(word: str) -> str:
    """Forks, and waits for the fork."""
    pid = os.fork()
    if pid == 0:
        return "of the fork"
    os.waitpid(pid, 0)
    return word


def leaves_a_process(word: str) -> str:
    """Ends, and leaves a process of another session that holds its socket."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(20)
        os._exit(0)
    if word == "end":
        os._exit(4)
    return word


def writes_to_its_sockets(word: str, data: bytes) -> str:
    """Writes to each socket that it has."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), data)
    return word


def stops_as_it_answers(word: str) -> str:
    """Sends the beginning of an answer, and stops."""
    writes_to_its_sockets("", (1000).to_bytes(4, "big") + b"x")
    os.kill(os.getpid(), signal.SIGSTOP)
    return word


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
    with pytest.raises(RolloutError, match="ended with exit code 3"):
        await run(tool("gone"))


async def test_a_tool_in_a_process_knows_its_task_and_episode() -> None:
    assert (await run(tool("asked"), place="here")).text == "Where? e1 0 here"


@pytest.mark.parametrize("name", ["forks", "forks_and_answers_first"])
async def test_each_call_gets_its_own_answer_though_the_tool_forks(name: str) -> None:
    made = tool(name)
    results = [(await run(made, word=f"{number}")).text for number in range(8)]
    assert results == [f"{number}" for number in range(8)]


async def test_the_end_of_a_process_is_noticed_though_another_one_holds_its_socket() -> None:
    made = tool("leaves_a_process")
    assert (await run(made, word="still here")).text == "still here"
    began_s = time.monotonic()
    with pytest.raises(RolloutError, match="ended with exit code 4"):
        await run(made, word="end")
    assert time.monotonic() - began_s < 10
    assert (await run(made, word="again")).text == "again"


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\0" * 7 + b"\5hello", b"\0" * 16])
async def test_an_invalid_answer_costs_its_call_alone(data: bytes) -> None:
    made = tool("writes_to_its_sockets")
    with pytest.raises(RolloutError, match=r"writes_to_its_sockets sent an invalid answer"):
        await run(made, word="lost", data=data)
    assert (await run(made, word="next", data=b"")).text == "next"


async def test_an_answer_to_another_call_is_dropped() -> None:
    answer = Frame("answer", 99, pickle.dumps(ToolReply("of another call")))
    made = tool("writes_to_its_sockets")
    assert (await run(made, word="own", data=pack(answer))).text == "own"


async def test_a_process_that_stops_in_the_middle_of_an_answer_stops_only_its_call() -> None:
    made = tool("stops_as_it_answers")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.05)
            ticks += 1

    ticking = asyncio.create_task(tick())
    result = await run(made, timeout_s=8.0, word="x")
    ticking.cancel()
    assert result.is_late
    assert ticks > 40  # the service goes on meanwhile


def test_an_async_tool_needs_no_process() -> None:
    with pytest.raises(ConfigError, match=r"workflow\.tools\.0: .*soon is async"):
        tool("soon")
