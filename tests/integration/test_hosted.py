"""Environments in hosts: real processes, a real socket, the real gateway; only the models are scripted."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pydantic import ValidationError

from astraflow.addons.agents.hosted import check_roles
from astraflow.addons.agents.hosts.config import HostedSourceConfig
from astraflow.addons.agents.hosts.host import Host, HostedEpisodeError
from astraflow.addons.agents.hosts.process import HostLostError
from astraflow.addons.one_process.in_process import run_in_process
from astraflow.dataflow.audit import audit
from astraflow.errors import ConfigError, DataError, RolloutError
from astraflow.recipe.recipe import load_recipe
from astraflow.run.preflight import check_recipe
from astraflow.tasks.sources import make_source
from astraflow.trainer.backend_factory import make_learner
from astraflow.types import Episode
from drivers.hosted_driver import config, hosted
from drivers.recipe_builders import make_digit_model
from drivers.rollout_fakes import ScriptedEngine, make_task
from drivers.workflow_driver import DiceEngine, replayed

pytestmark = pytest.mark.timeout(60)

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "policies.actor.sampling.max_tokens=8",
    "policies.actor.table.group_size=2",
    "policies.actor.table.groups_per_batch=2",
    "policies.actor.train.steps=1",
    "rollout.services=1",
    "rollout.max_episodes=8",
    "rollout.engine.num_slots=8",
    "eval.sets.heldout.num_tasks=4",
)


def metric(episode: Episode, name: str) -> float:
    return next(item.value for item in episode.metrics if item.name == name)


# --- episodes -------------------------------------------------------------------------------------


async def test_what_a_host_samples_is_recorded_exactly_and_rewarded_as_it_says() -> None:
    engines = {"solver": DiceEngine("solver"), "critic": DiceEngine("critic")}
    settings = config(args={"roles": ["proposer", "solver", "critic"]})
    async with hosted(settings, engines) as play:
        episode = await play()
    by_role = {t.role: t.policy for t in episode.trajectories}
    assert by_role == {"proposer": "solver", "solver": "critic", "critic": "critic"}
    for name, engine in engines.items():
        own = [replayed(t) for t in episode.trajectories if t.policy == name]
        assert sum(own, Counter()) == engine.sampled
    assert metric(episode, "host/length") == 3


async def test_runs_of_one_role_have_rewards_of_their_own_and_the_untrained_are_left_out() -> None:
    settings = config(args={"roles": ["agent", "judge"]}, roles={"agent": "actor", "judge": "actor"})
    async with hosted(settings) as play:
        episode = await play("rivals")
    assert [(t.role, t.reward, len(t.turns)) for t in episode.trajectories] == [
        ("agent", 1.0, 2),
        ("agent", -1.0, 2),
    ]
    assert episode.score == 0.25


async def test_an_episode_that_fails_says_why_and_is_no_reward() -> None:
    failures = {
        "nan": ("not JSON", False),
        "infinite": ("not a result: .*score", False),
        "huge": ("at most 16777216", False),
        "more": ("not a result: .*note", False),
        "list": ("returned list", False),
        "doubles": ("rewarded the role 'agent' twice", False),
        "silent": ("no completion of a policy", False),
        "strays": ("HTTPError: .*404", True),
        "raises": ("ValueError: a bug of the game", False),
        "down": ("ConnectionError: the world is down", True),
        "exits": ("SystemExit: 3", False),
    }
    async with hosted() as play:
        for does, (message, is_retryable) in failures.items():
            with pytest.raises(RolloutError, match=message) as failed:
                await play(does)
            assert failed.value.is_retryable == is_retryable, does
        assert (await play()).score == 1.0
        assert play.host.num_restarts == 0


async def test_a_folder_whose_name_begins_like_that_of_python_is_on_the_path_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python", "python-games"):
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(tmp_path / name)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "python"))
    code = "from drivers.hosted_games import Games\n"
    (tmp_path / "python-games" / "my_own_games.py").write_text(code)
    async with hosted(config(serve="my_own_games:Games")) as play:
        assert (await play()).score == 1.0


async def test_a_task_of_another_source_is_refused() -> None:
    async with hosted() as play:
        with pytest.raises(RolloutError, match="not from a hosted source"):
            await play.runner.episode(make_task(), seed=3)


@pytest.mark.parametrize("serve", ["drivers.hosted_games:Games", "drivers.hosted_games:Blocking"])
async def test_a_fork_in_an_episode_answers_nothing_and_costs_nothing(serve: str) -> None:
    async with hosted(config(serve)) as play:
        for _ in range(4):
            assert (await play("forks")).score == 1.0
            assert (await play()).score == 1.0
        assert play.host.num_restarts == 0


# --- lost hosts -----------------------------------------------------------------------------------


async def test_a_host_that_dies_costs_its_episodes_and_is_started_again() -> None:
    engine = ScriptedEngine("5")
    async with hosted(engines={"actor": engine}) as play:
        waiting = asyncio.create_task(play("waits"))
        await engine.asked.wait()
        with pytest.raises(HostLostError, match="my last words") as lost:
            await play("dies")
        with pytest.raises(HostLostError):
            await waiting
        assert lost.value.is_retryable
        episode = await play()
    assert (episode.score, metric(episode, "host_restarts")) == (1.0, 1.0)


@pytest.mark.parametrize("serve", ["drivers.hosted_games:Games", "drivers.hosted_games:Blocking"])
async def test_a_host_that_hangs_beyond_the_deadline_is_started_again(serve: str) -> None:
    async with hosted(config(serve, timeout_s=0.5)) as play:
        with pytest.raises(HostedEpisodeError, match=r"longer than workflow.timeout_s = 0.5"):
            await play("hangs")
        async with asyncio.timeout(10):
            while play.host.num_restarts == 0:
                with contextlib.suppress(RolloutError):
                    assert (await play()).score == 1.0


async def test_an_episode_that_is_given_up_in_time_costs_nothing_else() -> None:
    async with hosted(config(timeout_s=0.5)) as play:
        with pytest.raises(HostedEpisodeError, match="took longer"):
            await play("waits")
        assert (await play()).score == 1.0
        assert play.host.num_restarts == 0


async def test_a_host_that_is_lost_too_often_is_given_up() -> None:
    async with hosted(config(max_restarts=1)) as play:
        for _ in range(2):
            with pytest.raises(HostLostError):
                await play("dies")
        given_up_text = r"2 times in a row and is given up(?s:.*)my last words"
        with pytest.raises(HostLostError, match=given_up_text) as given_up:
            await play()
        assert not given_up.value.is_retryable


def dead(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_nothing_of_a_host_outlives_a_service_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    code = (
        "import asyncio\nfrom drivers.hosted_driver import *\n"
        "async def main():\n    async with hosted() as play:\n"
        f"        await play('leaves', path={str(path)!r})\n"
        "asyncio.run(main())\n"
    )
    folders = sys.path
    service = subprocess.Popen([sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}\n{code}"])
    try:
        deadline_s = time.monotonic() + 30
        while not path.exists() or len(path.read_text().split()) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    finally:
        service.kill()
        service.wait()
    pids = [int(pid) for pid in path.read_text().split()]
    while not all(dead(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


# --- hosts that cannot be used --------------------------------------------------------------------

SPEAKER = """#!{python}
import os, socket, sys
connection = socket.socket(fileno=int(sys.argv[-1]))
connection.recv(1 << 16)
connection.sendall({said!r})
"""
HELLO = b'{"protocol": 99, "library": "odd", "roles": ["agent"]}'
LARGE = b'{"kind": "opened", "number": 1, "sizes": [%d]}' % (1 << 26)
HEAD = b'{"kind": "opened", "number": 1, "sizes": [%d]}' % len(HELLO)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "an invalid answer: the head of a frame has"),
        (b"\x00\x00\x00\x02[]", "the head of a frame cannot be read"),
        (len(LARGE).to_bytes(4) + LARGE, "at most 1677"),
        (len(HEAD).to_bytes(4) + HEAD + HELLO, "speaks protocol 99"),
        (b"", "it ended"),
    ],
    ids=["html", "list", "oversized", "version", "silence"],
)
async def test_a_host_that_says_what_is_no_handshake_is_refused(
    said: bytes, message: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(SPEAKER.format(python=sys.executable, said=said))
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=message):
        await Host(config(python=str(python))).open()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"serve": "no_such_module:Games"}, "ModuleNotFoundError: No module named 'no_such_module'"),
        ({"serve": "verifiers"}, "PackageNotFoundError: .*verifiers"),
        ({"args": {"sice": 3}}, "TypeError: .*'sice'"),
        ({"args": {"roles": ["agent", "judge"]}, "roles": {"agent": "actor"}}, "policy for the role 'judge'"),
        ({"python": str(EXAMPLES / "hosted_sums.py")}, "cannot|did not start .*Permission denied"),
    ],
    ids=["module", "package", "argument", "role-without-policy", "no-program"],
)
async def test_a_host_that_cannot_be_opened_is_refused_before_any_episode(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        async with hosted(config(**{"serve": "drivers.hosted_games:Games", **settings})):
            pass


def test_a_role_that_the_host_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r'workflow.roles.agnet: .*did you mean "agent"'):
        check_roles({"agnet": "actor"}, ["agent"])


# --- tasks ----------------------------------------------------------------------------------------


def test_the_tasks_of_a_host_are_a_source() -> None:
    source = make_source(
        HostedSourceConfig(split="train", skip=1, limit=2), name="games", workflow=config(args={"size": 9})
    )
    assert [(source.task(idx).id, source.task(idx).prompt) for idx in range(len(source))] == [
        ("games/train1", "1+3"),
        ("games/train2", "2+3"),
    ]


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ("Endless", "infinitely many; set `limit` to 1 to 100,000"),
        ("Twins", "two tasks with the id 'same'"),
        ("Torn", "cannot list its tasks: ValueError: the returned value is not JSON"),
    ],
)
def test_tasks_that_cannot_be_trained_on_are_refused(serve: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_source(HostedSourceConfig(), name="games", workflow=config(f"drivers.hosted_games:{serve}"))


def test_a_source_has_no_larger_limit_than_it_can_keep() -> None:
    assert HostedSourceConfig(limit=100_000).limit == 100_000
    with pytest.raises(ValidationError, match="less than or equal to 100000"):
        HostedSourceConfig(limit=100_001)


def test_a_source_that_skips_all_tasks_says_which_split_it_skipped() -> None:
    message = "has no tasks for split 'train' after skipping 9; choose another split or a smaller skip"
    with pytest.raises(ConfigError, match=message):
        make_source(
            HostedSourceConfig(split="train", skip=9), name="games", workflow=config(args={"size": 9})
        )


def test_a_hosted_source_needs_a_hosted_workflow() -> None:
    with pytest.raises(ConfigError, match="the workflow is not `hosted`"):
        make_source(HostedSourceConfig(), name="games")


# --- a run ----------------------------------------------------------------------------------------


async def test_a_policy_trains_on_a_hosted_environment_and_the_audit_is_exact(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = make_digit_model(tmp_path / "digits")
    recipe = load_recipe(EXAMPLES / "hosted_sums.yaml", [f"policies.actor.model={model}", *SMALL])
    actor = recipe.policies["actor"]
    backend = make_learner(actor.train, model_dir=actor.model_dir, seed=recipe.seed)
    await run_in_process(
        recipe, check_recipe(recipe).sources, {"actor": backend}, folder=tmp_path, stop=asyncio.Event()
    )
    report = audit(tmp_path / "journal")
    assert report.ok
    (policy,) = report.policies
    assert policy.fates.trained == 2
