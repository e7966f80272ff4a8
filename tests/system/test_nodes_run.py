"""A trainer of two nodes, here both on this machine: it trains what one node trains, whatever is killed."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from drivers.nodes_runs import ALIKE, ALIKE_STEPS, first_steps
from drivers.system_driver import Runs, astraflow, interrupt, num_steps, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_STEPS = 6


def test_two_nodes_train_to_the_byte_what_one_trains_and_go_on_when_one_is_killed(runs: Runs) -> None:
    recipe = runs.recipe(steps=NUM_STEPS)
    two = runs.start(recipe, *ALIKE, "train.ranks=2", "train.nodes=2", name="two")
    wait_until(two, lambda: num_steps(two) >= ALIKE_STEPS, timeout_s=120)
    agent = two.pid_of("node-actor-1")
    (rank,) = psutil.Process(agent).children()
    os.kill(agent, signal.SIGKILL)
    steps = f"train.steps={ALIKE_STEPS}"
    alone = runs.start(recipe, *ALIKE, "train.ranks=2", "train.shard.replicate=2", steps, name="alone")
    assert two.finish() == 0, two.report()
    assert two.summary()["audit_ok"]
    log = (two.run_dir / "logs" / "trainer-actor.log").read_text()
    assert f"rank 1 of 2 (process {rank.pid} on {os.uname().nodename}) was lost with its machine" in log
    assert alone.finish() == 0, alone.report()
    assert first_steps(two) == first_steps(alone)


def test_a_trainer_goes_on_without_a_lost_machine_and_takes_it_back(runs: Runs) -> None:
    recipe = runs.recipe(steps=500)
    nodes = ("train.ranks=2", "train.nodes=2", "train.checkpoint_every=1", "supervision.node_timeout_s=1")
    run = runs.start(recipe, *nodes)
    log = run.run_dir / "logs" / "trainer-actor.log"

    def wait_for_steps() -> None:
        wanted = num_steps(run) + 3
        wait_until(run, lambda: num_steps(run) >= wanted, timeout_s=120)

    wait_for_steps()
    agent = psutil.Process(run.pid_of("node-actor-1"))
    (rank,) = agent.children()
    agent.suspend()
    rank.kill()
    wait_until(run, lambda: "goes on with 1 of 2 machines (1 ranks)" in log.read_text(), timeout_s=120)
    wait_for_steps()
    agent.resume()
    wait_until(run, lambda: "is back, so the trainer starts again with it" in log.read_text(), timeout_s=120)
    wait_for_steps()
    assert interrupt(run) == 130, run.report()
    assert astraflow("audit", str(run.run_dir)).returncode == 0
    assert log.read_text().count("goes on with") == 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("train.ranks=3", "train.nodes=2"), "on 2 nodes; set ranks to a multiple of 2"),
        (("train.ranks=4", "train.nodes=4", "train.shard.tensor=2"), "set ranks to a multiple of 8"),
    ],
)
def test_nodes_that_cannot_be_are_refused_before_the_run(
    runs: Runs, overrides: tuple[str, ...], said: str
) -> None:
    done = astraflow("run", str(runs.recipe()), *overrides, "--dry-run")
    assert done.returncode == 2
    assert said in done.stderr


def test_an_agent_without_the_shared_folder_says_so(tmp_path: Path) -> None:
    options = ("--policy", "actor", "--url", "http://127.0.0.1:1", "--node", "1")
    done = astraflow("cluster", "node", str(tmp_path), *options)
    assert done.returncode == 2
    assert f"has no run folder {tmp_path}" in done.stderr
