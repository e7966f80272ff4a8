"""Runs whose rollout services are on the nodes of a real Ray cluster: three raylets on this machine."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.quickstart_elsewhere import learn_the_quickstart
from drivers.ray_driver import BIN, RayCluster
from drivers.system_driver import (
    ROOT,
    Runs,
    environment,
    interrupt,
    num_steps,
    places_of,
    service_of,
    wait_gone,
    wait_until,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (BIN / "ray").exists(), reason="no Ray: `make test-ray` installs it"),
]

FAST_S = 5.0
"""Within this time a run that is interrupted must end."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster() as made:
        yield made
    assert made.left_over() == []


def test_a_lost_node_costs_one_service_and_the_run_stops_and_resumes(cluster: RayCluster, runs: Runs) -> None:
    nodes = [cluster.add_node(), cluster.add_node()]
    recipe = runs.recipe(steps=100_000, services=2)
    run = runs.start(recipe, *cluster.arguments, place=cluster.place)
    services = ("rollout-0", "rollout-1")
    wait_until(run, lambda: num_steps(run) >= 3 and all(places_of(run, s) for s in services), timeout_s=120)
    homes = {name: places_of(run, name)[-1] for name in services}
    assert sorted(homes.values()) == sorted(nodes)  # spread over the nodes

    lost = "rollout-0"
    cluster.kill_node(homes[lost])
    wait_until(run, lambda: service_of(run, lost)["state"] == "restarting", timeout_s=120)
    assert service_of(run, lost)["last_line"] == "its machine was lost"
    before = num_steps(run)
    wait_until(run, lambda: num_steps(run) > before + 20, timeout_s=120)  # the other service goes on
    assert service_of(run, "rollout-1")["restarts"] == 0

    home = cluster.add_node()
    wait_until(run, lambda: service_of(run, lost)["state"] == "running", timeout_s=120)
    assert places_of(run, lost)[-1] == home

    pids = run.pids()
    begin = time.monotonic()
    assert interrupt(run) == 130, run.report()
    assert time.monotonic() - begin < FAST_S + 5.0  # the report, and Ray's own goodbye
    assert wait_gone(pids, timeout_s=5.0) == []

    steps = num_steps(run) + 20
    resumed = runs.start(recipe, f"steps={steps}", *cluster.arguments, place=cluster.place)
    assert resumed.finish() == 0, resumed.report()
    summary = resumed.summary()
    assert summary["audit_ok"], resumed.report()
    assert "registered as rollout-0" in (resumed.run_dir / "logs" / "rollout-0.log").read_text()


def test_needs_that_no_node_can_meet_are_named_before_anything_runs(cluster: RayCluster, runs: Runs) -> None:
    recipe = runs.recipe(cluster={"rollout": {"gpus": 1}})
    run = runs.start(recipe, *cluster.arguments, place=cluster.place)
    assert run.finish() != 0
    text = "".join(run.lines)
    assert "Ray cluster has 1 CPUs, 1 GPUs" in text, text
    assert wait_gone(run.pids(), timeout_s=5.0) == []


def test_without_a_cluster_the_error_names_the_address_and_the_remedy(runs: Runs, tmp_path: Path) -> None:
    arguments = ("--run-dir", tmp_path / "run", "--on", "ray", "launcher.address=127.0.0.1:9")
    done = subprocess.run(
        [BIN / "astraflow", "run", runs.recipe(), *arguments],
        cwd=ROOT,
        env={**environment(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "launcher.address = '127.0.0.1:9': cannot join" in done.stderr + done.stdout
    assert "ray start --head" in done.stderr + done.stdout


def test_the_quickstart_is_learnt_by_services_on_three_nodes(
    cluster: RayCluster, runs: Runs, quickstart_model: Path
) -> None:
    for _ in range(3):
        cluster.add_node()
    arguments = cluster.arguments
    used = learn_the_quickstart(quickstart_model, runs, *arguments, place=cluster.place, services=3)
    assert len(used) == 3  # a node has room for one
