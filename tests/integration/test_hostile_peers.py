"""Peers and stores that misbehave, over real sockets: a version arrives soon, and they are remembered."""

import time
from pathlib import Path

import pytest

from astraflow.types import SourceLink
from drivers.hostile_driver import SOURCE_KINDS, hostile
from drivers.swarm_driver import assert_equal, swarm, weights

pytestmark = pytest.mark.timeout(120)

SOON_S = 20.0
"""Alone a version takes 0.3 s; a silent peer cost 10 s for each version. Generous to a busy machine."""


@pytest.mark.parametrize("kind", [*SOURCE_KINDS, "coming_for_ever"])
async def test_a_hostile_peer_costs_a_moment_once_and_is_remembered(tmp_path: Path, kind: str) -> None:
    async with (
        swarm(tmp_path, num_peers=1, patience_s=1.0) as rig,
        hostile("silent") as (inner, inner_url),
        hostile(kind) as (peer, url),
    ):
        peer.inner_url = inner_url
        link = SourceLink(kind="http", url=url, labels={"peer": "hostile"})
        asked: list[int] = []
        for version in range(4):
            tensors = weights(num_chunks=32, seed=version)
            manifest = rig.known(await rig.client.publish("actor", version, tensors, {}), link)
            began_s = time.monotonic()
            assert_equal(await rig.receivers[0].fetch(manifest), tensors)
            assert time.monotonic() - began_s < SOON_S
            asked.append(peer.num_requests)
        assert asked[0] > 0
        assert asked[1:] == asked[:1] * 3, "it is left alone after the first version"
        assert inner.num_requests == 0
