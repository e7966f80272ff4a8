"""Publishers and stores that misbehave, over real sockets: the other source gives the version soon, and where
there is no other, the fetch ends with a reason and the version before stays."""

import time
from pathlib import Path

import msgspec
import pytest

from astraflow.errors import UnavailableError, WeightsError
from astraflow.types import SourceLink
from astraflow.weights.receiver import Receiver
from drivers.hostile_driver import SOURCE_KINDS, hostile
from drivers.swarm_driver import assert_equal, swarm, weights

pytestmark = pytest.mark.timeout(120)

SOON_S = 20.0
"""Alone a version takes 0.3 s. A source that may be slow has 5 s once; generous to a busy machine."""
DEADLINE_S = 4.0


@pytest.mark.parametrize("other", ["publisher", "store"])
@pytest.mark.parametrize("kind", SOURCE_KINDS)
async def test_a_hostile_source_costs_a_moment_while_there_is_another(
    tmp_path: Path, kind: str, other: str
) -> None:
    async with (
        swarm(tmp_path, num_peers=0, num_others=1) as rig,
        hostile("silent") as (inner, inner_url),
        hostile(kind) as (source, url),
    ):
        source.inner_url = inner_url
        folder = str(tmp_path / "weights" / "chunks")
        store = SourceLink(kind="file", url=folder, labels={"store": "yes"})
        for version in range(2):
            tensors = weights(num_chunks=32, seed=version)
            manifest = await rig.client.publish("actor", version, tensors, {})
            sound = manifest.sources if other == "publisher" else (store,)
            manifest = msgspec.structs.replace(manifest, sources=(SourceLink(kind="http", url=url), *sound))
            began_s = time.monotonic()
            assert_equal(await rig.receivers[0].fetch(manifest), tensors)
            assert time.monotonic() - began_s < SOON_S
        assert source.num_requests > 0
        assert inner.num_requests == 0


@pytest.mark.parametrize("kind", SOURCE_KINDS)
async def test_a_hostile_source_alone_ends_the_fetch_and_the_version_before_stays(
    tmp_path: Path, kind: str
) -> None:
    async with (
        swarm(tmp_path, num_peers=0) as rig,
        hostile("silent") as (inner, inner_url),
        hostile(kind) as (source, url),
    ):
        source.inner_url = inner_url
        receiver = Receiver(tmp_path / "cache", deadline_s=DEADLINE_S)
        tensors = weights(num_chunks=8)
        first = await rig.client.publish("actor", 0, tensors, {})
        held = await receiver.fetch(first)
        second = await rig.client.publish("actor", 1, weights(num_chunks=8, seed=1), {})
        second = msgspec.structs.replace(second, sources=(SourceLink(kind="http", url=url),))
        began_s = time.monotonic()
        with pytest.raises((UnavailableError, WeightsError), match="'actor' version 1: "):
            await receiver.fetch(second)
        assert time.monotonic() - began_s < SOON_S
        assert_equal(held, tensors)
        assert_equal(await receiver.fetch(first), tensors)
        assert inner.num_requests == 0
        await receiver.close()


@pytest.mark.parametrize("kind", ["silent", "drips_head", "endless", "redirects", "hangs_up"])
async def test_a_joiner_asks_another_source_for_the_base_of_a_delta(tmp_path: Path, kind: str) -> None:
    async with (
        swarm(tmp_path, num_peers=0, num_others=1, delta=True) as rig,
        hostile("silent") as (inner, inner_url),
        hostile(kind) as (source, url),
    ):
        source.inner_url = inner_url
        tensors = weights(num_chunks=8)
        await rig.client.publish("actor", 0, tensors, {})
        tensors[0].data[:64] += 1
        delta = await rig.client.publish("actor", 1, tensors, {})
        assert delta.kind == "delta"
        delta = msgspec.structs.replace(delta, sources=(SourceLink(kind="http", url=url), *delta.sources))
        began_s = time.monotonic()
        assert_equal(await rig.receivers[0].fetch(delta), tensors)
        assert time.monotonic() - began_s < SOON_S
        assert source.num_requests > 0
        assert inner.num_requests == 0
