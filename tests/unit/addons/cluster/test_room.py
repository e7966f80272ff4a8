"""What the machines of a cluster have to give."""

from pathlib import Path

import pytest

from astraflow.addons.cluster.room import Room, contents_of, missing_room
from astraflow.errors import ConfigError
from astraflow.protocols import Needs, ProcessSpec

SMALL = Room(cpus=2.0, gpus=0.0, memory_bytes=4e9)
LARGE = Room(cpus=64.0, gpus=8.0, memory_bytes=500e9)


def missing(needs: Needs, *rooms: Room) -> str:
    return missing_room(needs, rooms, cluster="the cluster", remedy="add a machine")


def test_one_machine_with_room_is_enough() -> None:
    assert missing(Needs(cpus=4, gpus=8, memory_bytes=10**9), SMALL, LARGE) == ""


def test_what_no_machine_has_is_named_with_what_they_have_and_the_remedy() -> None:
    assert missing(Needs(gpus=16), SMALL, LARGE) == (
        "no machine of the cluster has 1 CPUs, 16 GPUs; none of its 2 machines has more than 64 CPUs, 8 "
        "GPUs and 500.0 GB. Change cluster.rollout, or add a machine"
    )


def test_needs_that_no_single_machine_meets_are_missing() -> None:
    assert missing(Needs(cpus=96, gpus=1), LARGE, Room(cpus=96.0, gpus=0.0, memory_bytes=1e9))


def test_a_cluster_without_machines_has_no_room() -> None:
    assert "none of its 0 machines" in missing(Needs())


def test_a_folder_cannot_travel_with_a_process(tmp_path: Path) -> None:
    spec = ProcessSpec("rollout-0", ("x",), {}, tmp_path / "log", reads=(tmp_path,))
    with pytest.raises(ConfigError, match=f"reads {tmp_path}, which cannot be sent to another machine"):
        contents_of(spec)
