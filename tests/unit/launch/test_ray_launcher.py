"""What the launcher of a Ray cluster decides without one."""

from astraflow.launch.ray_launcher import missing_room
from astraflow.protocols import Needs

SMALL = {"Alive": True, "Resources": {"CPU": 2.0, "memory": 4e9}}
LARGE = {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 500e9}}
DEAD = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 16.0, "memory": 500e9}}


def test_one_node_with_room_is_enough() -> None:
    assert missing_room(Needs(cpus=4, gpus=8, memory_bytes=10**9), [SMALL, LARGE]) == ""


def test_what_only_a_dead_node_had_is_missing() -> None:
    text = missing_room(Needs(gpus=16), [SMALL, LARGE, DEAD])
    assert text.startswith(
        "no node of the Ray cluster has 1 CPUs, 16 GPUs; of its 2 nodes, none has more than 64 CPUs, 8 GPUs"
    )
    assert "cluster.rollout" in text


def test_needs_that_no_single_node_meets_are_missing() -> None:
    cpus = {"Alive": True, "Resources": {"CPU": 96.0, "memory": 1e9}}
    assert missing_room(Needs(cpus=96, gpus=1), [LARGE, cpus])
