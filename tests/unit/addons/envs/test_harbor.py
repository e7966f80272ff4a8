"""Task folders of Harbor: what is read from them, what is refused by name, and which rewards count."""

import os
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from recipes.terminal.terminal_folders import folder_of, make_errand, write_folder

from astraflow.addons.envs.harbor import Harbor
from astraflow.addons.envs.harbor_folder import harbor_task, read_folder
from astraflow.addons.sandbox.shell import BoxFile
from astraflow.errors import ConfigError, RolloutError
from astraflow.types import Task

TOML = 'schema_version = "1.4"\n[task]\nname = "me/task"\n[environment]\nnetwork_mode = "no-network"\n'
PAYS = "echo 1 > /logs/verifier/reward.txt"


def folder(toml: str = TOML, dockerfile: str = "FROM ubuntu:24.04\n", **more: str) -> dict[str, BoxFile]:
    """The files of a task folder; `more`: further ones, with `__` for slashes."""
    texts = {
        "instruction.md": "Do it.",
        "task.toml": toml,
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": PAYS,
        **{name.replace("__", "/"): text for name, text in more.items()},
    }
    return {name: BoxFile(text.encode()) for name, text in texts.items()}


def task(name: str = "task") -> Task:
    return Task(id=name, source="train", prompt="Do it.", spec=name)


@asynccontextmanager
async def opened(path: Path, files: dict[str, BoxFile], **args: Any) -> AsyncGenerator[Harbor]:
    write_folder(files, path / "task")
    environment = Harbor(path=str(path), num_boxes=1, **args)
    await environment.open()
    try:
        yield environment
    finally:
        await environment.close()


# --- folders --------------------------------------------------------------------------------------


def test_a_folder_says_what_is_played() -> None:
    toml = TOML + 'memory_mb = 300\nenv = {A = "1"}\n[agent]\ntimeout_sec = 7\n[verifier]\nenv = {B = "2"}\n'
    dockerfile = "# a comment\nFROM python:3.12-slim\nWORKDIR /app\nENV C=3\nCOPY a \\\n  sub/ data/\n"
    dockerfile += "WORKDIR in\nCOPY . /work\n"
    made = harbor_task(folder(toml, dockerfile, environment__a="x", environment__sub__b="y"), "task")
    assert (made.name, made.instruction, made.folder) == ("me/task", "Do it.", "/app/in")
    assert (made.agent_s, made.verifier_s, made.memory_mb) == (7.0, 600.0, 300)
    assert {path: file.content for path, file in made.files.items()} == {
        "/app/data/a": b"x",
        "/app/data/b": b"y",
        "/work/a": b"x",
        "/work/sub/b": b"y",
    }
    assert (made.env, made.verifier_env) == ({"A": "1", "C": "3"}, {"B": "2"})
    assert set(made.tests) == {"/tests/test.sh"}


def test_a_container_gets_the_image_and_the_limits_of_a_task_of_terminal_bench() -> None:
    toml = 'version = "1.0"\n[environment]\ndocker_image = "me/task:1"\ncpus = 2\nmemory = "4G"\n'
    toml += 'storage = "10G"\n[agent]\ntimeout_sec = 12000.0\n[verifier]\ntimeout_sec = 3600.0\n'
    made = harbor_task(folder(toml, "FROM ubuntu\nWORKDIR /work\n"), "task", in_container=True)
    assert (made.image, made.folder, made.cpus) == ("me/task:1", "/work", 2.0)
    assert (made.memory_mb, made.storage_mb) == (4096, 10_240)
    assert (made.agent_s, made.verifier_s) == (12_000.0, 3600.0)


def test_an_image_without_a_dockerfile_gets_the_files_of_the_environment() -> None:
    files = folder(TOML + 'docker_image = "ubuntu:24.04"\nworkdir = "/work/a"\n', environment__b__c="x")
    del files["environment/Dockerfile"]
    made = harbor_task(files, "task")
    assert (made.folder, made.files) == ("/work/a", {"/work/a/b/c": BoxFile(b"x")})


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (folder(dockerfile="FROM ubuntu\nRUN apt-get install -y git\n"), "'RUN apt-get install -y git' in"),
        (folder(dockerfile="FROM ghcr.io/me/image:1\n"), "the image 'ghcr.io/me/image:1'"),
        (folder(dockerfile="FROM ubuntu\nCOPY --from=x a b\n"), "'COPY --from=x a b' in"),
        (
            folder(environment__compose_yaml="x", **{"environment/compose.yaml": "x"}),
            "environment/compose.yaml",
        ),
        (folder(TOML + "gpus = 1\n"), "environment.gpus"),
        (folder(TOML + 'mcp_servers = [{name = "x"}]\n'), "environment.mcp_servers"),
        (folder(TOML + 'docker_image = "me/image"\n'), "the image 'me/image'"),
        (folder(TOML + 'env = {KEY = "${KEY}"}\n'), "the variable KEY"),
        (folder(TOML + '[agent]\nuser = "me"\n'), "agent.user"),
        (folder(TOML + '[verifier]\nenvironment_mode = "separate"\n'), "environment_mode = 'separate'"),
        (folder(TOML + "[[steps]]\nx = 1\n"), r"\[\[steps\]\]"),
        (folder('[task]\nname = "a/b"\n'), "the network .environment: public; .* without_network: true"),
        (folder(TOML + '[agent]\nallowed_hosts = ["x.org"]\n'), "the network .allowed_hosts: allowlist"),
    ],
)
def test_what_the_sandbox_does_not_have_is_refused_with_a_remedy(
    files: dict[str, BoxFile], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{said}.* is not supported here: .* in a container"):
        harbor_task(files, "task")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no task.toml"),
        ({"task.toml": BoxFile(TOML.encode())}, "has no instruction.md"),
        (folder("schema_version = 2"), "task.toml: .*str.*int|2"),
        (folder('schema_version = "2.0"'), "expected 1.x"),
        (folder("x ="), "task.toml"),
        (folder(TOML + "cpu = 1\n"), "cpu"),
        (folder(TOML + 'workdir = "/usr/src"\n'), "cannot write at '/usr/src'"),
        (folder(TOML + 'workdir = "/app/../etc"\n'), "or a zero byte"),
        (folder(TOML + "memory_mb = 0\n"), "more than 0"),
        (folder(TOML + 'memory = "much"\n'), "memory = 'much'; expected a size like 2G"),
        (folder(TOML + "[agent]\ntimeout_sec = 1e9\n"), "expected 0 to 3,000 s"),
        (folder(dockerfile="FROM ubuntu\nCOPY ../../x /app/\n"), "leads out of the folder"),
        (folder(dockerfile="FROM ubuntu\nCOPY x /app/\n"), "cannot copy 'x'"),
        (folder(dockerfile="FROM ubuntu\nCOPY a /app/../../etc/\n", environment__a="x"), "or a zero byte"),
        (folder(dockerfile="FROM 'ubuntu\n"), "No closing quotation"),
    ],
)
def test_a_folder_that_is_wrong_is_told(files: dict[str, BoxFile], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        harbor_task(files, "task")


def test_links_and_odd_files_are_not_followed(tmp_path: Path) -> None:
    write_folder(folder(), tmp_path)
    assert set(read_folder(tmp_path)) == set(folder())
    link = tmp_path / "tests" / "link"
    for target in ("/etc/passwd", "../instruction.md", "/etc"):
        link.symlink_to(target)
        with pytest.raises(ConfigError, match=r"link is a link to"):
            read_folder(tmp_path)
        link.unlink()
    os.mkfifo(link)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_folder(tmp_path)


def test_the_splits_share_no_folder(tmp_path: Path) -> None:
    for idx in range(12):
        write_folder(folder(), tmp_path / f"task-{idx}")
    environment = Harbor(path=str(tmp_path))
    ids = [{task.id for task in environment.tasks(split)} for split in ("train", "heldout")]
    assert not ids[0] & ids[1]
    assert len(ids[0] | ids[1]) == 12
    with pytest.raises(ConfigError, match="not the name of a folder"):
        environment.harbor_task(task("../task-1"))
    with pytest.raises(ConfigError, match="has no Harbor task folders"):
        Harbor(path=str(tmp_path / "task-1")).tasks("train")


# --- episodes -------------------------------------------------------------------------------------


async def test_solutions_are_worth_1_and_doing_nothing_0(tmp_path: Path) -> None:
    for idx in range(10):
        errand = make_errand(random.Random(idx))
        write_folder(folder_of(errand, f"terminal-{idx}"), tmp_path / f"terminal-{idx}")
    async with opened(tmp_path, folder()) as environment:
        for idx in range(10):
            played = task(f"terminal-{idx}")
            assert await environment.solve(played) == 1.0
            assert await environment.solve(played, is_solved=False) == 0.0


async def test_an_episode_of_several_commands(tmp_path: Path) -> None:
    files = folder(
        TOML,
        "FROM ubuntu\nWORKDIR /app\nCOPY a .\n",
        environment__a="one\n",
        tests__test_sh="",
        **{
            "tests/test.sh": "cmp a /tests/a && " + PAYS + " || echo 0 > /logs/verifier/reward.txt",
            "tests/a": "two\n",
        },
    )
    async with opened(tmp_path, files) as environment:
        state, seen = await environment.reset(task(), 0)
        assert "They are run in /app" in str(seen.messages)
        assert str(seen.messages).endswith("Do it.")
        told = await environment.step(state, "I look.\n```bash\ncat a; ls /tests; echo 1 > /logs/x\n```")
        assert str(told.messages) == "one\n"
        told = await environment.step(state, "```\nprintf 'two\\n\\033[31m\\0' | tee a; exit 3\n```\n")
        assert (str(told.messages), told.is_done) == ("two\n\n[exit code 3]", False)
        told = await environment.step(state, "```\nsed -i 1q a\n```")
        ended = await environment.step(state, "I am done.")
        assert (ended.is_done, ended.reward) == (True, 1.0)


async def test_tests_without_a_reward_fail_the_episode(tmp_path: Path) -> None:
    cases = [
        ("exit 3", r"exit code 3\) wrote neither .*reward.txt nor .*reward.json"),
        ("touch /logs/verifier/reward.txt", "an invalid reward: b''"),
        ("echo nan > /logs/verifier/reward.txt", r"an invalid reward: b'nan\\n'"),
        ("echo 1 0 > /logs/verifier/reward.txt", "an invalid reward"),
        ("ln -s /app/a /logs/verifier/reward.txt", "wrote neither"),
        ("echo '{}' > /logs/verifier/reward.json", "expected an object with numbers"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', "no 'reward' .it has: a, b.; set .reward"),
        ('echo \'{"a": "1"}\' > /logs/verifier/reward.json', "an invalid reward"),
        ("echo '{\"a\": Infinity}' > /logs/verifier/reward.json", "an invalid reward"),
        ("sleep 60", "did not end within 0.2 s"),
    ]
    for idx, (test, _) in enumerate(cases):
        toml = TOML + "[verifier]\ntimeout_sec = 0.2\n" if "sleep" in test else TOML
        write_folder(folder(toml, **{"tests/test.sh": test}), tmp_path / f"task-{idx}")
    async with opened(tmp_path, folder(), max_commands=1) as environment:
        for idx, (_, said) in enumerate(cases):
            state, _ = await environment.reset(task(f"task-{idx}"), 0)
            with pytest.raises(RolloutError, match=said):
                await environment.step(state, "```\necho 1 > /logs/verifier/reward.txt\n```")


async def test_a_reward_may_be_one_of_several(tmp_path: Path) -> None:
    writes = 'echo \'{"a": 0.25, "b": 2}\' > /logs/verifier/reward.json'
    async with opened(tmp_path, folder(**{"tests/test.sh": writes}), reward="a") as environment:
        assert await environment.solve(task(), is_solved=False) == 0.25
        with pytest.raises(ConfigError, match=r"no solution/solve\.sh"):
            await environment.solve(task())


@pytest.mark.parametrize("reward", [-2.5, 0.0, 0.125, 1.0, 40.0])
async def test_any_reward_that_the_tests_write_counts_as_it_is(tmp_path: Path, reward: float) -> None:
    writes = f"echo {reward} > /logs/verifier/reward.txt"
    async with opened(tmp_path, folder(**{"tests/test.sh": writes}), max_commands=1) as environment:
        assert await environment.solve(task(), is_solved=False) == reward


async def test_a_task_that_is_wrong_when_it_is_played_fails_its_episode(tmp_path: Path) -> None:
    async with opened(tmp_path, folder("x =")) as environment:
        with pytest.raises(RolloutError, match=r"task\.toml") as failed:
            await environment.reset(task(), 0)
        assert not failed.value.is_retryable


@pytest.mark.parametrize(
    "wrong", [{"max_commands": 0}, {"command_s": 0.0}, {"disk_mb": 0}, {"heldout_frac": 0.0}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Harbor(path=".", **wrong)
