"""A service whose HTTP server or other vital task is gone ends with the reason, and in order."""

import subprocess
import sys

import pytest

_SERVICE = """
import asyncio, sys
from starlette.applications import Starlette
from astraflow.service.process import run_service
from astraflow.service.server import HttpServer

async def main(stop):
    server = HttpServer(Starlette(), host="127.0.0.1", port=0, name="echo")
    await server.start()
    try:
        if len(sys.argv) > 1:
            await asyncio.sleep(0)
            next(task for task in asyncio.all_tasks() if task.get_name() == sys.argv[1]).cancel()
            await stop.wait()
    finally:
        await server.stop()
        print("in order")

sys.exit(run_service(main, name="test"))
"""


def _ended(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SERVICE, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)


@pytest.mark.parametrize(
    ("task", "what"),
    [("http:echo", "the HTTP server of echo"), ("connections", "the watch over connections")],
)
def test_a_service_ends_in_order_when_a_task_that_it_needs_is_gone(task: str, what: str) -> None:
    ended = _ended(task)
    assert ended.returncode == 1
    assert f"test stopped: {what} was cancelled" in ended.stderr
    assert ended.stdout == "in order\n"


def test_a_service_that_stops_its_server_itself_ends_well() -> None:
    ended = _ended()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "in order\n", "")
