"""What the launcher of a Ray cluster reads of it."""

from astraflow.addons.cluster.ray_launcher import room_of
from astraflow.addons.cluster.room import Room


def test_a_node_without_gpus_has_none() -> None:
    assert room_of({"Alive": True, "Resources": {"CPU": 2.0, "memory": 4e9}}) == Room(2.0, 0.0, 4e9)


def test_a_node_that_gives_nothing_away_has_no_room() -> None:
    assert room_of({"Alive": True, "Resources": {"node:10.0.0.5": 1.0}}) == Room(0.0, 0.0, 0.0)
