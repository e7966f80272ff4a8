"""Commands of a shell in boxes: what they leave to each other, and what they cannot do or break."""

import io
import shutil
import tarfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.addons.sandbox.shell import (
    BoxFile,
    ShellCommand,
    ShellLimits,
    ShellRun,
    archive,
    files_at,
    run_commands,
    shell_sandbox,
)
from astraflow.errors import ConfigError

LIMITS = ShellLimits(memory_bytes=512 << 20, disk_bytes=8 << 20, output_bytes=4096)


@asynccontextmanager
async def opened(
    backend: Literal["auto", "bubblewrap", "namespaces"] = "auto",
) -> AsyncGenerator[Sandbox]:
    async with shell_sandbox(SandboxConfig(num_boxes=1, backend=backend)) as sandbox:
        yield sandbox


async def run(sandbox: Sandbox, state: bytes, *commands: ShellCommand | str) -> ShellRun:
    steps = [each if isinstance(each, ShellCommand) else ShellCommand(each) for each in commands]
    return await run_commands(sandbox, state, steps, limits=LIMITS)


START = archive(
    {"/app/words": BoxFile(b"b\na\n"), "/app/say": BoxFile(b"#!/bin/sh\necho hi\n", is_executable=True)}
)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            "bubblewrap",
            marks=pytest.mark.skipif(
                shutil.which("bwrap") is None, reason="the program bwrap is not installed"
            ),
        ),
        "namespaces",
    ],
)
async def test_commands_find_the_files_that_the_last_one_left(
    backend: Literal["bubblewrap", "namespaces"],
) -> None:
    async with opened(backend) as sandbox:
        first = await run(
            sandbox, START, "sort words > sorted; ln -s sorted link; mkdir -p sub/er; pwd; ./say"
        )
        assert (first.results[0].code, first.results[0].stdout, first.problem) == (0, b"/app\nhi\n", "")
        later = await run(sandbox, first.state, "cat link; ls -l / | grep -c app; test -d sub/er", "false")
        assert [each.code for each in later.results] == [0, 1]
        assert later.results[0].stdout == b"a\nb\n1\n"
        # The first state is as it was: nothing is left in the box.
        assert (await run(sandbox, START, "ls /app")).results[0].stdout == b"say\nwords\n"


async def test_a_command_reaches_nothing_outside_and_leaves_no_process() -> None:
    async with opened() as sandbox:
        ran = await run(
            sandbox,
            START,
            "touch /usr/x; echo x > /dev/tcp/1.1.1.1/80; kill -9 1; (sleep 60; echo late > words) & echo x",
            ShellCommand("cat words; ls /tests; cat gone", reads=["/app/words", "/app/gone", "/app"]),
        )
        first, second = ran.results
        assert b"Read-only file system" in first.stderr
        assert first.stdout == b"x\n"
        assert second.stdout == b"b\na\n"
        assert second.found == {"/app/words": b"b\na\n", "/app/gone": None, "/app": None}


async def test_a_command_that_does_not_end_is_ended_and_one_that_prints_much_is_cut() -> None:
    async with opened() as sandbox:
        ran = await run(
            sandbox,
            START,
            ShellCommand("echo begun; sleep 60", timeout_s=0.3),
            ShellCommand("yes | head -c 999999", timeout_s=8.0),
        )
        late, long = ran.results
        assert (late.is_late, late.code, late.stdout) == (True, 124, b"begun\n")
        assert (long.is_late, long.code, len(long.stdout)) == (False, 0, LIMITS.output_bytes)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("for i in 1 2 3; do truncate -s 5M hole$i; done", "the files have more than"),
        ("chmod 000 words", "Permission denied"),
        ("mkfifo pipe; rm -rf /tmp/* /tmp/.*; chmod 000 /tmp", ""),
    ],
)
async def test_files_that_cannot_be_kept_are_named(command: str, problem: str) -> None:
    async with opened() as sandbox:
        ran = await run(sandbox, START, command)
        assert ran.problem.startswith(problem)
        assert bool(ran.state) is (problem == "")
        state = ran.state or START
        # The next one runs in any case, or says why it cannot.
        assert (await run(sandbox, state, "echo x")).results[0].stdout == b"x\n"


async def test_folders_are_cleared_whatever_a_command_made_of_them() -> None:
    tests = archive({"/tests/test.sh": BoxFile(b"echo ours > /logs/verifier/reward\n")})
    spoils = [
        "rm -rf /tmp/logs /tmp/tests; ln -s /usr /tmp/logs; ln -s /app /tmp/tests",
        "mkdir -p /logs/verifier /tests/test.sh; touch /logs/verifier/reward; chmod 0 /logs/verifier /tests",
        "rm -rf /tmp/logs; echo > /tmp/logs; (while :; do echo theirs > /logs/verifier/reward; done) &",
    ]
    check = ShellCommand(
        "bash /tests/test.sh",
        files=tests,
        cleared=["/tests", "/logs/verifier"],
        reads=["/logs/verifier/reward"],
    )
    async with opened() as sandbox:
        for spoil in spoils:
            ran = await run(sandbox, START, spoil, check)
            assert ran.results[1].found == {"/logs/verifier/reward": b"ours\n"}


async def test_a_folder_that_is_gone_and_a_command_that_is_none_are_told() -> None:
    async with opened() as sandbox:
        ran = await run(sandbox, START, "rm -rf /tmp/app", "echo x", "echo \x00", "(((")
        assert [each.code for each in ran.results] == [0, 126, 126, 126]
        assert b"No such file" in ran.results[1].stderr


@pytest.mark.parametrize("path", ["/etc/passwd", "app/x", "/app/../etc/x", "/", "/app\0"])
def test_a_file_that_leads_out_of_the_box_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"contains '..' or a zero byte|cannot write at"):
        archive({path: BoxFile(b"")})


async def test_files_that_commands_left_are_read_outside_of_the_box() -> None:
    async with opened() as sandbox:
        ran = await run(sandbox, START, "mkdir sub; echo 1 > sub/a; ln -s /etc/passwd sub/link; mkfifo sub/f")
    assert files_at(ran.state, "/app/sub") == {"a": BoxFile(b"1\n")}
    assert files_at(ran.state, "/app/say")["."].is_executable
    assert files_at(ran.state, "/tmp/app/words") == {".": BoxFile(b"b\na\n")}
    assert files_at(ran.state, "/app/wor") == {}
    with pytest.raises(ConfigError):
        files_at(ran.state, "/etc")


def test_names_that_lead_out_of_a_folder_are_left_out() -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for name in ("./logs/../../x", "/logs/y", "../z", "./logs/kept"):
            tar.addfile(tarfile.TarInfo(name))
    assert set(files_at(sink.getvalue(), "/logs")) == {"kept"}
    assert set(files_at(sink.getvalue(), "/tmp")) == {"logs/kept"}
