"""How long a receiver waits for a peer, under a virtual clock."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from astraflow.types import Chunk, Manifest, SourceLink
from astraflow.weights.manifest import build_manifest, hash_bytes
from astraflow.weights.peers.peer import State
from astraflow.weights.peers.reputation import Reputation
from astraflow.weights.peers.swarm import Swarm
from drivers.virtual_loop import run_virtual
from drivers.weight_fakes import make_weights

OWN = "http://10.0.0.1:8500"
PEERS = tuple(
    SourceLink(kind="http", url=f"http://10.0.0.{n}:8500", labels={"peer": f"rollout-{n}"})
    for n in range(2, 9)
)
CHUNK = Chunk(hash=hash_bytes(b"weights"), num_bytes=1000)


def manifest(peers: Sequence[SourceLink], version: int = 1) -> Manifest:
    origin = SourceLink(kind="http", url="http://publisher")
    own = SourceLink(kind="http", url=OWN, labels={"peer": "rollout-1"})
    full = build_manifest("actor", version, make_weights(1), chunk_bytes=4096)
    return msgspec.structs.replace(full, sources=(origin, own, *peers))


class Peers:
    """Peers that have a chunk from a given time on and are fetching it before that."""

    def __init__(self, here_at_s: float = float("inf")) -> None:
        self.here_at_s = here_at_s
        self.waits_s: list[float] = []

    async def state(self, url: str, chunk: Chunk, version: Manifest, wait_s: float) -> State:
        self.waits_s.append(wait_s)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, min(wait_s, self.here_at_s - loop.time())))
        return "here" if loop.time() >= self.here_at_s else "coming"


def swarm_of(peers: Peers, own_url: str = OWN) -> Swarm:
    return Swarm(peers.state, lambda: own_url, reputation=Reputation(), spare_s=2.0)


async def wait(
    swarm: Swarm, *, num_own: int, own_s: float = 0.0, num_chunks: int = 8, speed: float = 0.0
) -> tuple[bool, float]:
    """Fetches the receiver's own share in `own_s`, then waits for a peer. Returns the answer and its time."""
    version = manifest(PEERS[:3])
    swarm.begin(version, num_own=num_own, num_chunks=num_chunks)
    await asyncio.sleep(own_s)
    swarm.note_own_done()
    is_here = await swarm.wait_for(PEERS[0], version, CHUNK, speed)
    swarm.note_own_done()
    return is_here, asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("num_own", "own_s", "speed", "given_up_s"),
    [
        (2, 3.0, 0.0, 8.0),  # its share of 2 of 8 chunks with 4 services took 3 s: 2 + 2 * 3
        (1, 3.0, 0.0, 14.0),  # half a mean share took 3 s: 2 + 2 * 6
        (4, 3.0, 0.0, 8.0),  # a share above the mean gives a peer no less time
        (2, 3.0, 200.0, 12.0),  # the publisher needs 5 s for the chunk: 2 + 2 * 5
        (0, 0.0, 200.0, 12.0),
        (0, 0.0, 0.0, 30.0),  # nothing is known
    ],
)
def test_a_peer_is_given_twice_the_time_of_the_publisher(
    num_own: int, own_s: float, speed: float, given_up_s: float
) -> None:
    swarm = swarm_of(Peers())
    assert run_virtual(wait(swarm, num_own=num_own, own_s=own_s, speed=speed)) == (False, given_up_s)
    assert swarm.num_bad == 1


def test_a_peer_that_has_the_chunk_in_time_is_not_blamed() -> None:
    peers = Peers(here_at_s=7.0)
    swarm = swarm_of(peers)
    assert run_virtual(wait(swarm, num_own=2, own_s=3.0)) == (True, 7.0)
    assert swarm.num_bad == 0
    assert peers.waits_s == [0.0, 2.0, 2.0]  # the first question only shows that the peer answers


def test_there_is_no_limit_while_a_receiver_fetches_its_own_share() -> None:
    async def fetch(swarm: Swarm) -> tuple[bool, float]:
        version = manifest(PEERS[:3])
        swarm.begin(version, num_own=1, num_chunks=8)
        return await swarm.wait_for(PEERS[0], version, CHUNK, 0.0), asyncio.get_running_loop().time()

    assert run_virtual(fetch(swarm_of(Peers(here_at_s=500.0)))) == (True, 500.0)


async def test_each_peer_has_one_parent_and_serves_a_chunk_to_at_most_two() -> None:
    version = manifest(PEERS)
    parents: list[str] = []
    for peer in PEERS:
        before = swarm_of(Peers(), peer.url).peers_before(version, CHUNK)
        after = swarm_of(Peers(), peer.url).peers_after(version, CHUNK)
        assert {link.url for link in (*before, *after)} == {OWN, *(p.url for p in PEERS)} - {peer.url}
        parents += [link.url for link in before[:1]]
    parents += [link.url for link in swarm_of(Peers()).peers_before(version, CHUNK)[:1]]
    assert len(parents) == len(PEERS)  # all but the first of the 8
    assert max(map(parents.count, parents)) == 2


async def test_a_peer_that_failed_is_asked_again_for_no_chunk_of_the_version() -> None:
    swarm = swarm_of(Peers())
    version = manifest(PEERS)
    swarm.blame(PEERS[0], version, "sent wrong bytes", is_lie=True)
    swarm.blame(PEERS[0], version, "sent wrong bytes", is_lie=True)
    assert swarm.num_bad == 1
    assert swarm.is_bad(PEERS[0], version)
    assert not swarm.is_bad(PEERS[1], version)
    asked = [*swarm.peers_before(version, CHUNK), *swarm.peers_after(version, CHUNK)]
    assert {link.url for link in asked} == {peer.url for peer in PEERS[1:]}
