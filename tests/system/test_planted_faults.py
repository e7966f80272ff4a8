"""Twelve faults, each planted in a real run: the watchdog names the right one within 15 s, and nothing else
before; and healthy runs raise no alarm."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import run as call

import pytest

from drivers.slow_network import SlowNetwork, in_a_thread
from drivers.small_disks import mounted
from drivers.system_driver import ROOT, Runs, Started, Terminals, astraflow, url_of
from drivers.watch_driver import Scene, healthy_tasks

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("timed"), pytest.mark.timeout(600)]
LONG = pytest.mark.long


@pytest.fixture
def scene(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # where services that join find the planted parts
    terminals = Terminals(tmp_path)
    yield Scene(runs, terminals, tmp_path / "fault")
    terminals.close()


# --- faults in parts of the recipe: the flag file begins them ---------------------------------------


def flagged(scene: Scene, fault: str) -> dict[str, object]:
    return {"tasks": healthy_tasks(flag=str(scene.flag), fault=fault)}


def nan_reward(scene: Scene) -> dict[str, object]:
    return flagged(scene, "nan")


def zero_reward(scene: Scene) -> dict[str, object]:
    return flagged(scene, "zero")


def hanging_scorer(scene: Scene) -> dict[str, object]:
    return flagged(scene, "hang")


def all_filtered(scene: Scene) -> dict[str, object]:
    filters = [{"name": "zero_variance"}]
    return flagged(scene, "zero") | {"policies": scene.policies(table={"filters": filters})}


def starved(scene: Scene) -> dict[str, object]:
    return {"workflow": {"use": "planted_faults:tardy", "args": {"flag": str(scene.flag)}}}


def wrong_logprobs(scene: Scene) -> dict[str, object]:
    engine = {"use": "planted_faults:SkewedEngine", "args": {"flag": str(scene.flag)}}
    return {"rollout": {"services": 1, "max_episodes": 16, "engine": engine}}


@pytest.mark.parametrize(
    ("sections_of", "rule", "said"),
    [
        pytest.param(nan_reward, "failing_episodes", "nan", id="the reward is NaN"),
        pytest.param(
            all_filtered,
            "nothing_to_train",
            "filtered by zero_variance",
            id="all groups filtered",
            marks=LONG,
        ),
        pytest.param(zero_reward, "reward_constant", "always 0", id="the reward is always 0", marks=LONG),
        pytest.param(
            hanging_scorer,
            "scoring_hangs",
            "wait for their score",
            id="a scorer hangs",
            marks=LONG,
        ),
        pytest.param(starved, "starved_table", "is starved", id="a table is starved", marks=LONG),
        pytest.param(wrong_logprobs, "logprob_gap", "logprobs of engine", id="wrong logprobs", marks=LONG),
    ],
)
def test_a_part_that_fails_is_named(
    scene: Scene, sections_of: Callable[[Scene], dict[str, object]], rule: str, said: str
) -> None:
    run = scene.start(**sections_of(scene))
    scene.until_healthy(run)
    scene.flag.touch()
    assert said in scene.check_named(run, rule, time.monotonic())


# --- faults of processes, machines and links --------------------------------------------------------


@LONG
def test_a_stopped_rollout_service_is_named(scene: Scene) -> None:
    run = scene.start()
    scene.until_healthy(run)
    os.kill(run.pid_of("rollout-0"), signal.SIGSTOP)
    line = scene.check_named(run, "stopped_process", time.monotonic())
    assert "rollout-0 has shown no sign of life" in line
    os.kill(run.pid_of("rollout-0"), signal.SIGCONT)


@LONG
def test_a_pool_whose_last_service_died_is_named(scene: Scene) -> None:
    run = scene.start(
        rollout={"services": 0, "max_episodes": 16, "engine": {"name": "torch", "max_context": 48}}
    )
    joined = scene.terminals.start("join", url_of(run), "--name", "only", "--allow", "planted_faults")
    scene.until_healthy(run)
    joined.kill()
    line = scene.check_named(run, "no_rollout_service", time.monotonic())
    assert "no rollout service is left" in line


@LONG
@pytest.mark.parametrize(
    ("bytes_per_s", "rule", "said"),
    [
        pytest.param(6000.0, "slow_link", "MB/s), so it takes about", id="a slow link"),
        pytest.param(0.0, "weights_missing", "no byte has arrived for", id="weights that never arrive"),
    ],
)
def test_a_bad_way_to_the_weights_is_named(scene: Scene, bytes_per_s: float, rule: str, said: str) -> None:
    run = scene.start()
    scene.until_healthy(run)
    with in_a_thread(SlowNetwork(url_of(run), seed=0, bytes_per_s=bytes_per_s)) as url:
        scene.terminals.start("join", url, "--name", "far", "--allow", "planted_faults")
        _until_joined(run, "far")
        line = scene.check_named(run, rule, time.monotonic())
        assert said in line
        assert "far " in line


def _until_joined(run: Started, name: str) -> None:
    deadline_s = time.monotonic() + 60
    while name not in astraflow("status", str(run.run_dir), "--json").stdout:
        assert time.monotonic() < deadline_s, run.report()


@LONG
def test_a_trainer_ten_times_slower_than_the_pool_is_named(scene: Scene) -> None:
    loss = {"use": "planted_faults:slow_loss", "args": {"seconds": 3.0}}
    run = scene.start(policies=scene.policies(train={"loss": loss}))
    run.read_until("actor step ")
    line = scene.check_named(run, "slow_trainer", time.monotonic())
    assert "is slower than the pool" in line


@LONG
def test_a_disk_that_is_nearly_full_is_named(scene: Scene, tmp_path: Path) -> None:
    with mounted(tmp_path / "run", "1300m") as disk:
        run = scene.start()
        scene.until_healthy(run)
        call(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        line = scene.check_named(run, "disk_low", time.monotonic())
        assert "MB left" in line
        run.process.send_signal(signal.SIGINT)
        run.finish()


# --- healthy runs -----------------------------------------------------------------------------------


@LONG
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("recipe", ["quickstart", "pair"])
def test_a_healthy_run_raises_no_alarm(runs: Runs, recipe: str, seed: int) -> None:
    overrides = [f"seed={seed}"]
    for name in ("actor", "verifier") if recipe == "pair" else ("actor",):
        model = runs.folder / name
        spec = "quickstart" if name == "actor" else name
        made = astraflow("model", "init", f"recipes/models/{spec}.yaml", "--out", str(model))
        assert made.returncode == 0, made.stderr
        overrides.append(f"policies.{name}.model={model}")
    run = runs.start(ROOT / "recipes" / f"{recipe}.yaml", *overrides)
    assert run.finish() == 0, run.report()
    assert not [line for line in run.lines if "warning (" in line], run.report()
    assert not json.loads((run.run_dir / "run.json").read_text())["alarms"]
