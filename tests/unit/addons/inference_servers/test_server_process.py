"""What a server said last."""

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from astraflow.addons.inference_servers.server_process import EngineServerProcess, server_environment
from astraflow.errors import ConfigError

WARNING = "WARNING 11-22 [system_utils.py:255] this can cause errors like `OSError: [Errno 24] Too many open`"


async def last_words(folder: Path, *lines: str) -> str:
    argv = [sys.executable, "-c", "import sys; print(*sys.argv[1:], sep='\\n')", *lines]
    server = await EngineServerProcess.start("server", argv, env={}, folder=folder)
    async with asyncio.timeout(30):
        await server.ended.wait()
    await server.stop()
    return server.tail()


async def test_an_error_that_a_warning_only_speaks_of_is_not_its_last_one(tmp_path: Path) -> None:
    assert await last_words(tmp_path, WARNING, "ready") == f"its last lines:\n{WARNING}\nready"
    said = await last_words(tmp_path, "ERROR x: ValueError: no such head", WARNING)
    assert said.startswith("its last error: ERROR x: ValueError: no such head\nits last lines:\n")


async def test_endless_lines_are_cut_and_searched_in_no_time(tmp_path: Path) -> None:
    program = "import sys; sys.stdout.write('A' * 3_000_000 + '\\nlast'); sys.exit(3)"
    server = await EngineServerProcess.start(
        "server", [sys.executable, "-c", program], env={}, folder=tmp_path
    )
    async with asyncio.timeout(15):
        await server.ended.wait()
        await server.stop()
        lines = server.tail().split("\n")
    assert [len(line) for line in lines] == [len("its last lines:"), 4096, len("last")]


def test_a_reference_is_the_launchers_value_or_else_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "of the machine")
    assert server_environment({"HF_TOKEN": "${HF_TOKEN}", "X": "1"})["HF_TOKEN"] == "of the machine"
    monkeypatch.setenv("ASTRAFLOW_ENV_HF_TOKEN", "of the recipe")
    found = server_environment({"HF_TOKEN": "${HF_TOKEN}", "X": "1"})
    assert (found["HF_TOKEN"], found["X"]) == ("of the recipe", "1")
    assert not [name for name in found if name.startswith("ASTRAFLOW_")]
    with pytest.raises(ConfigError, match=r"engine\.env\.KEY = .*: NOT_SET is not set"):
        server_environment({"KEY": "${NOT_SET}"})


async def last_number(server: EngineServerProcess) -> int:
    for _ in range(400):
        await asyncio.sleep(0.05)
        if (line := server.tail().rpartition("\n")[2]).isdecimal():
            return int(line)
    raise AssertionError(server.tail())


async def test_a_server_is_stopped_with_the_processes_that_it_started_in_other_sessions(
    tmp_path: Path,
) -> None:
    program = "setsid sh -c 'echo $$; exec sleep 60' & exec sleep 60"
    server = await EngineServerProcess.start("server", ["/bin/sh", "-c", program], env={}, folder=tmp_path)
    number = await last_number(server)
    async with asyncio.timeout(20):
        await server.stop()
    assert server.ended.is_set()
    assert not psutil.pid_exists(number)
