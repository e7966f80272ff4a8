"""Runs whose rollout services are jobs of a real Slurm: slurmctld, and three slurmd on this machine."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.quickstart_elsewhere import as_settings, learn_the_quickstart
from drivers.slurm_driver import SlurmCluster, missing_for_slurm
from drivers.system_driver import (
    Runs,
    interrupt,
    num_steps,
    own_address,
    places_of,
    service_of,
    wait_for_nothing,
    wait_until,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm()),
]

SERVICES = ("rollout-0", "rollout-1", "rollout-2")


def launcher(**settings: object) -> dict[str, object]:
    return {"name": "slurm", "python": sys.executable, "address": own_address(), **settings}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    made = SlurmCluster(3)
    try:
        yield made
    finally:
        made.close()


def test_a_cancelled_job_and_a_lost_node_cost_a_service_and_the_run_stops_and_resumes(
    cluster: SlurmCluster, runs: Runs
) -> None:
    recipe = runs.recipe(steps=100_000, services=3, launcher=launcher())
    run = runs.start(recipe, place=cluster.place)
    wait_until(run, lambda: num_steps(run) >= 3 and all(places_of(run, s) for s in SERVICES), timeout_s=120)
    assert sorted(cluster.jobs().values()) == [f"astraflow-{name}" for name in SERVICES]

    cluster.cancel("astraflow-rollout-1")
    wait_until(run, lambda: len(places_of(run, "rollout-1")) == 2, timeout_s=60)
    assert service_of(run, "rollout-1")["last_line"] == "its machine was lost"
    assert "no message" not in (run.run_dir / "logs" / "rollout-1.log").read_text()

    cluster.kill_node("n1")
    wait_until(run, lambda: any(service_of(run, s)["state"] == "restarting" for s in SERVICES), timeout_s=120)
    before = num_steps(run)
    wait_until(run, lambda: num_steps(run) > before + 20, timeout_s=120)  # the others go on
    cluster.start("n1")
    wait_until(run, lambda: all(service_of(run, s)["state"] == "running" for s in SERVICES), timeout_s=120)

    assert interrupt(run) == 130, run.report()
    wait_for_nothing(cluster.left_over, timeout_s=30.0)

    steps = num_steps(run) + 20
    resumed = runs.start(recipe, f"steps={steps}", place=cluster.place)
    assert resumed.finish() == 0, resumed.report()
    assert resumed.summary()["audit_ok"], resumed.report()
    wait_for_nothing(cluster.left_over, timeout_s=30.0)


def test_a_job_at_its_time_limit_drains_and_goes_on_as_another_job(cluster: SlurmCluster, runs: Runs) -> None:
    limits = launcher(options=["--time=1"], notice_s=20)
    run = runs.start(runs.recipe(steps=100_000, launcher=limits), place=cluster.place)
    wait_until(run, lambda: len(places_of(run, "rollout-0")) == 2, timeout_s=180)
    log = (run.run_dir / "logs" / "rollout-0.log").read_text()
    assert "is lost" not in log, log  # it was told, and ended by itself
    assert service_of(run, "rollout-0")["last_line"] == "its machine was lost"
    assert interrupt(run) == 130, run.report()
    wait_for_nothing(cluster.left_over, timeout_s=30.0)


def test_a_partition_that_does_not_exist_is_named_with_the_remedy(cluster: SlurmCluster, runs: Runs) -> None:
    run = runs.start(runs.recipe(launcher=launcher(partition="fast")), place=cluster.place)
    assert run.finish() == 2
    text = "".join(run.lines)
    assert re.search(r"nvalid partition.*see `sinfo`", text), text
    wait_for_nothing(cluster.left_over, timeout_s=30.0)


def test_a_job_that_waits_in_the_queue_is_gone_with_its_run(cluster: SlurmCluster, runs: Runs) -> None:
    recipe = runs.recipe(steps=100_000, services=4, launcher=launcher())
    run = runs.start(recipe, place=cluster.place)
    wait_until(run, lambda: len(cluster.jobs()) == 4 and num_steps(run) >= 3, timeout_s=120)
    assert interrupt(run) == 130, run.report()
    wait_for_nothing(cluster.left_over, timeout_s=30.0)


def test_the_quickstart_is_learnt_by_services_on_three_nodes(
    cluster: SlurmCluster, runs: Runs, quickstart_model: Path
) -> None:
    settings = as_settings({"launcher": launcher()})
    used = learn_the_quickstart(quickstart_model, runs, *settings, place=cluster.place, services=3)
    assert len(used) == 3
    wait_for_nothing(cluster.left_over, timeout_s=30.0)
