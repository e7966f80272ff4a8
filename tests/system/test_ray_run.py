"""A small run whose rollout service is on a node of a real Ray cluster: two raylets on this machine.

`tests/long/test_ray_run.py` has larger ones, with nodes that die.
"""

import pytest

from drivers.ray_driver import BIN, RayCluster
from drivers.system_driver import Runs, num_steps, places_of, wait_gone

pytestmark = [
    pytest.mark.long,
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (BIN / "ray").exists(), reason="no Ray: `make test-ray` installs it"),
]


def test_a_service_on_another_node_of_ray_generates_what_is_trained_here(runs: Runs) -> None:
    with RayCluster() as cluster:
        node = cluster.add_node()
        run = runs.start(runs.recipe(steps=2), *cluster.arguments, place=cluster.place)
        assert run.finish() == 0, run.report()
        assert places_of(run, "rollout-0") == [node]
        assert num_steps(run) == 2
        assert run.summary()["audit_ok"]
        assert wait_gone(run.pids(), timeout_s=5.0) == []
    assert cluster.left_over() == []
