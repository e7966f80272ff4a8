"""A trainer whose other nodes are nodes of a real Ray cluster: reserved together, and one is lost."""

import pytest

from astraflow.dataflow.audit import audit
from drivers.ray_driver import BIN, RayCluster
from drivers.system_driver import Runs, interrupt, num_steps, places_of, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (BIN / "ray").exists(), reason="no Ray: `make test-ray` installs it"),
]

AGENTS = ("node-actor-1", "node-actor-2")
NEEDS = ("cluster.rollout.cpus=0.5", "cluster.trainer.cpus=0.5")
NODES = ("train.ranks=3", "train.nodes=3", "supervision.node_timeout_s=40")


def test_agents_get_their_nodes_all_at_once_and_the_trainer_goes_on_without_a_lost_one(runs: Runs) -> None:
    with RayCluster() as cluster:
        first = cluster.add_node()
        recipe = runs.recipe(steps=100_000)
        grows = ("launcher.autoscales=true", *cluster.arguments)
        run = runs.start(recipe, *NODES, *NEEDS, *grows, place=cluster.place)
        trainer_log = run.run_dir / "logs" / "trainer-actor.log"
        logs = [run.run_dir / "logs" / f"{agent}.log" for agent in AGENTS]

        def all_wait() -> bool:
            return all(log.exists() and "waits for a machine" in log.read_text() for log in logs)

        wait_until(run, all_wait, timeout_s=120)
        wait_until(run, lambda: places_of(run, "rollout-0") == [first], timeout_s=120)
        assert not any(places_of(run, agent) for agent in AGENTS)  # one node isn't enough for both
        second = cluster.add_node()
        wait_until(run, lambda: num_steps(run) >= 3, timeout_s=180)
        assert sorted(places_of(run, agent)[0] for agent in AGENTS) == sorted([first, second])

        cluster.kill_node(second)
        said = "goes on with 2 of 3 machines (2 ranks)"
        wait_until(run, lambda: said in trainer_log.read_text(), timeout_s=120)
        cluster.add_node()
        said = "is back, so the trainer starts again with it"
        wait_until(run, lambda: said in trainer_log.read_text(), timeout_s=180)
        before = num_steps(run)
        wait_until(run, lambda: num_steps(run) > before + 5, timeout_s=120)
        assert interrupt(run) == 130, run.report()
        assert audit(run.run_dir / "journal").ok


def test_too_few_nodes_are_named_before_anything_trains(runs: Runs) -> None:
    with RayCluster() as cluster:
        cluster.add_node()
        run = runs.start(runs.recipe(), *NODES, *NEEDS, *cluster.arguments, place=cluster.place)
        assert run.finish() != 0
        said = "node-actor-1, node-actor-2: each needs a machine with 0.5 CPUs, and the Ray cluster has 1 of"
        assert said in run.report()
