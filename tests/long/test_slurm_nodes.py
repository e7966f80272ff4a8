"""A trainer of two nodes, the second a job of a real Slurm: what it trains, and that it goes on."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.dataflow.audit import audit
from drivers.host_network import HostNetwork
from drivers.nodes_runs import ALIKE, ALIKE_STEPS, first_steps, train_through_failures
from drivers.quickstart_elsewhere import as_settings
from drivers.slurm_driver import SlurmCluster, missing_for_slurm
from drivers.system_driver import (
    Runs,
    interrupt,
    num_steps,
    places_of,
    wait_for_nothing,
    wait_until,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.system,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm()),
]

AGENT = "node-actor-1"
CUT_S = 20.0


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    made = HostNetwork(2, name="slurm")
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(network: HostNetwork) -> Iterator[SlurmCluster]:
    made = SlurmCluster(2, network=network)
    try:
        yield made
    finally:
        made.close()


def settings(cluster: SlurmCluster) -> list[str]:
    """Services and agents as jobs, each with a node of its own."""
    address = cluster.head_address
    return as_settings({"launcher": {"name": "slurm", "python": sys.executable, "address": address}})


def test_two_ranks_on_each_of_two_nodes_train_to_the_byte_what_four_on_one_do(
    cluster: SlurmCluster, runs: Runs
) -> None:
    recipe = runs.recipe(steps=ALIKE_STEPS)
    two = runs.start(
        recipe, *ALIKE, *settings(cluster), "train.ranks=4", "train.nodes=2", name="two", place=cluster.place
    )
    assert two.finish() == 0, two.report()
    assert two.summary()["audit_ok"]
    assert places_of(two, AGENT)[0] in cluster.nodes
    wait_for_nothing(cluster.left_over, timeout_s=30.0)
    alone = runs.start(recipe, *ALIKE, "train.ranks=4", "train.shard.replicate=2", name="alone")
    assert alone.finish() == 0, alone.report()
    assert first_steps(two) == first_steps(alone)


def test_the_quickstart_is_learnt_whatever_is_lost(
    cluster: SlurmCluster, network: HostNetwork, runs: Runs, quickstart_model: Path
) -> None:
    def kill_one_with(word: str) -> None:
        next(process for process, command in cluster.tasks().items() if word in command).kill()

    def node_of_agent() -> str:
        log = (runs.folder / "run" / "logs" / f"{AGENT}.log").read_text()
        (*_, last) = [line for line in log.splitlines() if line.startswith("--- on machine ")]
        return last.removeprefix("--- on machine ")

    def lose_the_node() -> None:
        node = node_of_agent()
        cluster.kill_node(node)
        cluster.start(node)

    troubles = [
        lambda: kill_one_with("--rank"),
        lambda: kill_one_with("--node"),
        lambda: cluster.cancel(f"astraflow-{AGENT}"),
        lambda: network.cut_cable(cluster.address_of(node_of_agent()), CUT_S),
        lose_the_node,
    ]
    run = train_through_failures(runs, quickstart_model, troubles, *settings(cluster), place=cluster.place)
    assert "was lost with its machine" in (run.run_dir / "logs" / "trainer-actor.log").read_text()
    wait_for_nothing(cluster.left_over, timeout_s=30.0)


def test_agents_get_their_nodes_all_at_once_and_the_trainer_goes_on_without_a_lost_one(runs: Runs) -> None:
    cluster = SlurmCluster(3)
    agents = ("node-actor-1", "node-actor-2")
    try:
        others = [cluster.hold("n2"), cluster.hold("n3")]
        recipe = runs.recipe(steps=100_000)
        nodes = ("train.ranks=3", "train.nodes=3", "supervision.node_timeout_s=20")
        run = runs.start(recipe, *settings(cluster), *nodes, place=cluster.place)
        log = run.run_dir / "logs" / "trainer-actor.log"
        wait_until(run, lambda: places_of(run, "rollout-0") == ["n1"], timeout_s=120)
        cluster.cancel(others[0])
        wait_until(run, lambda: "astraflow-node-actor" in cluster.jobs().values(), timeout_s=60)
        time.sleep(10)  # the scheduler looks every 2 s
        assert not any(places_of(run, agent) for agent in agents)  # one node isn't enough for both
        cluster.cancel(others[1])
        wait_until(run, lambda: num_steps(run) >= 3, timeout_s=120)
        assert sorted(places_of(run, agent)[0] for agent in agents) == ["n2", "n3"]

        lost = places_of(run, agents[1])[0]
        cluster.kill_node(lost)
        wait_until(run, lambda: "goes on with 2 of 3 machines (2 ranks)" in log.read_text(), timeout_s=120)
        cluster.start(lost)
        wait_until(
            run, lambda: "is back, so the trainer starts again with it" in log.read_text(), timeout_s=180
        )
        before = num_steps(run)
        wait_until(run, lambda: num_steps(run) > before + 5, timeout_s=120)
        assert interrupt(run) == 130, run.report()
        assert audit(run.run_dir / "journal").ok
        wait_for_nothing(cluster.left_over, timeout_s=30.0)
    finally:
        cluster.close()
