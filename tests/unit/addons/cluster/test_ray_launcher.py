"""What the launcher of a Ray cluster reads of it."""

import pytest

from astraflow.addons.cluster.config import RayLauncherConfig
from astraflow.addons.cluster.ray_launcher import room_of
from astraflow.addons.cluster.room import Room
from astraflow.errors import ConfigError
from astraflow.processes.launcher import make_launcher


def test_a_node_without_gpus_has_none() -> None:
    assert room_of({"Alive": True, "Resources": {"CPU": 2.0, "memory": 4e9}}) == Room(2.0, 0.0, 4e9)


def test_a_node_that_gives_nothing_away_has_no_room() -> None:
    assert room_of({"Alive": True, "Resources": {"node:10.0.0.5": 1.0}}) == Room(0.0, 0.0, 0.0)


def test_the_address_of_a_ray_client_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"ray://head:10001.*ray job submit"):
        make_launcher(RayLauncherConfig(address="ray://head:10001"))
