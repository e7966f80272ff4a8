"""Harbor task folders in containers. A program with podman's commands stands in for it."""

import asyncio
import os
import random
import resource
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from recipes.terminal.terminal_folders import folder_of, make_errand, write_folder

from astraflow.addons.envs.harbor import Harbor
from astraflow.addons.sandbox.shell import BoxFile
from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import Observation
from drivers.system_driver import ROOT

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task folder whose image needs a container, with the stand-in in the path."""
    (tmp_path / "engine").mkdir()
    monkeypatch.setenv("PODMAN_STAND_IN", str(tmp_path / "engine"))
    monkeypatch.setenv("PATH", f"{ROOT / 'tests/stand_ins/podman'}:{os.environ['PATH']}")
    files = folder_of(make_errand(random.Random(3)), "errand")
    files["environment/Dockerfile"] = BoxFile(
        b"FROM rare/image:1\nRUN make world\nWORKDIR /app\nCOPY files .\n"
    )
    toml = files["task.toml"].content.replace(b"no-network", b"public").replace(b"cpus = 1", b"cpus = 2")
    files["task.toml"] = BoxFile(toml)
    write_folder(files, tmp_path / "tasks" / "errand")
    return tmp_path / "tasks"


@asynccontextmanager
async def opened(folder: Path, *, command_s: float = 5.0) -> AsyncGenerator[Harbor]:
    bench = Harbor(path=str(folder), where="podman", max_commands=4, command_s=command_s)
    await bench.open()
    try:
        yield bench
    finally:
        await bench.close()


def calls(folder: Path) -> list[str]:
    return (folder.parent / "engine" / "calls").read_text().splitlines()


async def play(bench: Harbor, *replies: str) -> list[Observation]:
    (task,) = [*bench.tasks("train"), *bench.tasks("heldout")]
    episode, seen = await bench.reset(task, 0)
    found = [seen]
    try:
        found += [await bench.step(episode, reply) for reply in replies]
    finally:
        await bench.end(episode)
    return found


async def test_an_episode_runs_in_a_container_of_the_tasks_image_and_leaves_none(folder: Path) -> None:
    command = make_errand(random.Random(3)).command()
    async with opened(folder) as bench:
        first, ran, end = await play(bench, f"```bash\n{command}\nls\n```", "done")
        again = await play(bench, "done")
    assert "They are run in /app" in str(first.messages)
    assert make_errand(random.Random(3)).target in str(ran.messages)
    assert (end.reward, end.is_done) == (1.0, True)
    assert again[-1].reward == 0.0
    made = calls(folder)
    assert len([call for call in made if call.startswith("build ")]) == 1
    (start, _) = [call for call in made if call.startswith("run ")]
    assert "--memory=512m --cpus=2" in start
    assert "--network=none" not in start
    assert len([call for call in made if call.startswith("rm ")]) == 2


async def test_an_episode_that_is_cancelled_while_its_container_starts_or_ends_leaves_none(
    folder: Path,
) -> None:
    engine = folder.parent / "engine"
    (engine / "slow").touch()
    async with opened(folder) as bench:
        (task, *_) = [*bench.tasks("train"), *bench.tasks("heldout")]
        beginning = asyncio.create_task(bench.reset(task, 0))
        while not (engine / "started").exists():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.01)
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        assert beginning.cancelled()
        (engine / "slow").unlink()
        episode, _ = await bench.reset(task, 0)
        ending = asyncio.create_task(bench.end(episode))
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
    made = [call.split() for call in calls(folder)]
    started = {word.removeprefix("--name=") for call in made for word in call if word.startswith("--name=")}
    assert len(started) == 2
    assert {call[-1] for call in made if call[0] == "rm"} == started
    assert not [path for path in engine.iterdir() if path.name in started]


async def test_a_command_that_takes_too_long_is_ended_and_told(folder: Path) -> None:
    async with opened(folder, command_s=0.5) as bench:
        _, ran = await play(bench, "```bash\nsleep 30\n```")
    assert "its time was over" in str(ran.messages)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("trap '' TERM; for i in {1..30}; do sleep 1; done", "its time was over"),
        ("exit 124", "[exit code 124]"),
    ],
)
async def test_a_command_is_late_if_its_time_is_over_however_it_ended(
    folder: Path, command: str, told: str
) -> None:
    async with opened(folder, command_s=4.0) as bench:
        _, ran = await play(bench, f"```bash\n{command}\n```")
    assert told in str(ran.messages)


async def test_output_beyond_the_limit_takes_no_memory(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with opened(folder) as bench:
        _, ran = await play(bench, "```bash\nhead -c 500M /dev/zero | tr '\\0' x\n```")
    assert "characters left out" in str(ran.messages)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


async def test_an_image_that_could_not_be_built_is_built_again(folder: Path) -> None:
    async with opened(folder) as bench:
        (folder.parent / "engine" / "images").write_text("in the way")
        with pytest.raises(RolloutError, match="build` failed"):
            await play(bench, "done")
        (folder.parent / "engine" / "images").unlink()
        assert (await play(bench, "done"))[-1].is_done


async def test_tests_without_a_reward_fail_the_episode(folder: Path) -> None:
    (folder / "errand" / "tests" / "test.sh").write_text("true\n")
    async with opened(folder) as bench:
        with pytest.raises(RolloutError, match=r"wrote neither .*reward\.txt"):
            await play(bench, "done")


def test_a_task_that_needs_more_than_a_container_is_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder / "errand", folder / "composed")
    (folder / "composed" / "environment" / "compose.yaml").write_text("services: {}\n")
    (folder / "errand" / "environment" / "link").symlink_to("/etc")  # of the image, which podman builds
    bench = Harbor(path=str(folder), where="podman")
    assert [task.id for split in ("train", "heldout") for task in bench.tasks(split) or ()] == ["errand"]
    assert "the task composed is left out" in caplog.text
    assert "environment/compose.yaml is not supported here" in caplog.text


def test_where_no_container_can_run_the_tasks_are_refused_by_name(folder: Path) -> None:
    bench = Harbor(path=str(folder), where="podman-of-nobody")
    with pytest.raises(
        ConfigError, match="run in containers, but the program 'podman-of-nobody' is not installed"
    ):
        bench.tasks("train")


async def test_an_engine_that_cannot_run_containers_is_refused_before_the_first_episode(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no container can run here: `false info` failed with code 1"):
        await Harbor(path=str(folder), where="false").open()
