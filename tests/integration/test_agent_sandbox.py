"""Agent programs in the sandbox: what they see, what they reach, and how they end."""

import asyncio
import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.addons.sandbox.backends import BACKENDS, chosen_maker
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.errors import ConfigError, RolloutError
from drivers.agent_play import ASKS, play_program, said
from drivers.hostile_agent import AGENT, DISK_BYTES, FOUND, of_marker, outside

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("sandbox")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=BACKENDS)
async def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that works here."""
    try:
        await chosen_maker(SandboxConfig(backend=request.param))
    except ConfigError as err:
        pytest.skip(str(err))
    return request.param


@pytest.fixture
async def sandbox() -> None:
    """Some backend that works here."""
    try:
        await chosen_maker(SandboxConfig())
    except ConfigError as err:
        pytest.skip(str(err))


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file in the home folder."""
    path = Path.home() / f".astraflow-test-{secrets.token_hex(8)}"
    path.write_text("s3cret", encoding="ascii")
    yield path
    path.unlink()


def open_files() -> set[tuple[str, str]]:
    """The descriptors of this process, and what each is."""
    found = set[tuple[str, str]]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


async def test_a_hostile_agent_reaches_the_gateway_and_nothing_else(
    backend: str, secret: Path, tmp_path: Path
) -> None:
    files = open_files()
    settings = {"backend": backend, "disk_mb": DISK_BYTES >> 20}
    with outside(secret, tmp_path) as others:
        episode = await play_program(AGENT, others.argument, box="sandbox", sandbox=settings)
    found = json.loads(said[-1])
    assert {name: value for name, value in found.items() if value != ""} == FOUND
    assert "s3cret" not in said[-1]
    # Its request was answered and recorded, and no metric says that it ran without a box.
    assert len(episode.trajectories) == 1
    assert "unboxed" not in {metric.name for metric in episode.metrics}
    assert of_marker(others.marker) == []
    assert open_files() <= files  # an earlier test's may be closed meanwhile


LATE = """
import subprocess
subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)", sys.argv[1]],
                 start_new_session=True)
print("it began", flush=True)
os.read(os.pipe()[0], 1)
"""


@pytest.mark.usefixtures("sandbox")
async def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started() -> None:
    marker = f"left-{secrets.token_hex(8)}"
    with pytest.raises(RolloutError, match=r"took longer than 2 s; it said last: it began"):
        await play_program(ASKS + LATE, marker, box="sandbox", timeout_s=2.0)
    assert of_marker(marker) == []


@pytest.mark.usefixtures("sandbox")
async def test_a_cancelled_episode_ends_its_program() -> None:
    marker = f"left-{secrets.token_hex(8)}"
    playing = asyncio.create_task(play_program(ASKS + LATE, marker, box="sandbox"))
    async with asyncio.timeout(60):
        while not of_marker(marker):  # noqa: ASYNC110 - other processes have no event
            await asyncio.sleep(0.05)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert of_marker(marker) == []


@pytest.mark.usefixtures("sandbox")
async def test_a_program_is_rewarded_for_the_file_that_it_leaves() -> None:
    leaves = "open(os.environ['ASTRAFLOW_RESULT_FILE'], 'w').write('{\"reward\": 0.25}')\n"
    same = "assert json.load(open(os.environ['ASTRAFLOW_TASK_FILE'])) == task\n"
    episode = await play_program(ASKS + same + leaves, box="sandbox")
    assert episode.score == 0.25
    assert (await play_program(ASKS + "print(5)", box="sandbox")).score == 1.0
    assert (await play_program(ASKS + "print(6)", box="sandbox")).score == 0.0


@pytest.mark.usefixtures("sandbox")
async def test_what_went_wrong_is_named() -> None:
    settings = {"memory_mb": 512, "output_mb": 1}
    for code, message in (
        ("sys.exit('my last words')", r"ended with 1; it said last: my last words"),
        ("os.abort()", r"ended with -6"),
        ("bytearray(1 << 30)", r"ended with 1; it said last: .*MemoryError"),
        ("sys.stdout.write('x' * (2 << 20))", r"printed more than 1 MiB; it said last: xxx"),
        ("os.symlink('/etc/hosts', os.environ['ASTRAFLOW_RESULT_FILE']); sys.exit(3)", r"ended with 3"),
    ):
        with pytest.raises(RolloutError, match=f"(?s){message}"):
            await play_program(ASKS + code, box="sandbox", sandbox=settings)
    with pytest.raises(ConfigError, match=r"'no-such-agent' .*: no such program"):
        await play_program("", box="sandbox", command=["no-such-agent"])


@pytest.mark.usefixtures("sandbox")
async def test_the_example_runs_in_the_sandbox_with_an_unmodified_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As `astraflow try examples/07_agent_unmodified.yaml workflow.run.box=sandbox` starts it.
    monkeypatch.chdir(ROOT)
    episode = await play_program(
        "", box="sandbox", command=[sys.executable, "examples/07_agent_unmodified.py"]
    )
    assert said[-1] == "5"
    assert [message.content for message in episode.messages] == ["2+3", "5"]


@pytest.fixture
def locked_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A program that only its owner may use, in a folder that everybody may see."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.chdir(folder)
        Path("agent").write_text("#!/bin/sh\n")
        Path("agent").chmod(0o700)
        yield "./agent"
        monkeypatch.undo()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs lose their permission in the sandbox")
async def test_a_program_that_only_root_may_use_is_refused_with_the_reason(locked_program: str) -> None:
    with pytest.raises(ConfigError, match="Permission denied; in the sandbox, even root's programs"):
        await play_program("", box="sandbox", command=[locked_program])


async def test_without_a_sandbox_no_program_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left = tmp_path / "left"
    command = [sys.executable, "-c", f"open({str(left)!r}, 'w')"]
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ConfigError,
        match=r"workflow\.run\.box = sandbox: .*bwrap is not installed",
    ):
        await play_program("", box="sandbox", command=command, sandbox={"backend": "bubblewrap"})
    assert not left.exists()
