"""Chooses which peer to ask for which chunk, so that a publisher sends each chunk about once in total.

All receivers rank the peers of a chunk in the same way (rendezvous hashing over chunk and address). The ranks
form a binary tree: number k waits for number (k - 1) // 2. Number 0 fetches from the publisher, each peer
serves a chunk to at most two others, and the uploads of a version are spread evenly. If a receiver's parent
will not have the chunk soon, the receiver asks the others with a lower number, and if none of them is
fetching it, it goes to the publisher itself. Nobody waits for a peer with a higher number, so waits cannot
form a cycle, even while receivers know different peers. A peer that fails is not asked again for the version,
nor for a while afterwards (`Reputation`), so it delays a run by a few seconds once, not with each version.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import xxhash

from astraflow.errors import UnavailableError, WeightsError
from astraflow.types import Chunk, Manifest, SourceLink
from astraflow.weights.peers.peer import State
from astraflow.weights.peers.reputation import Reputation

__all__ = ["AskPeer", "Swarm", "is_peer"]

_log = logging.getLogger(__name__)

AskPeer = Callable[[str, Chunk, Manifest, float], Awaitable[State]]
"""Asks the peer at a URL for the state of a chunk of a version; the peer waits up to this many seconds for a
change."""

_ASK_S = 2.0
"""Longest wait that a peer is asked for at once."""
_BLIND_S = 30.0
"""Patience with a peer while the speed of the publisher is unknown."""


def is_peer(source: SourceLink) -> bool:
    """Whether a source is another receiver."""
    return "peer" in source.labels


class Swarm:
    """One receiver's view of its peers, for one fetch after another.

    `ask` asks a peer for the state of a chunk. `own_url` is where this receiver serves chunks; empty if it
    does not. `spare_s` is added to the time that a peer is given.
    """

    def __init__(
        self, ask: AskPeer, own_url: Callable[[], str], *, reputation: Reputation, spare_s: float = 2.0
    ) -> None:
        self._ask = ask
        self._spare_s = spare_s
        self._own_url = own_url
        self._reputation = reputation
        self._answered: set[str] = set()
        """Peers that have answered. Only these are asked to wait for a change before they answer."""
        self._bad: dict[str, tuple[int, set[str]]] = {}
        """By policy: the newest version for which peers failed, and the URLs of these peers."""
        self._idle: set[str] = set()
        """Peers that are not fetching the version."""
        self._may_be_late = True
        """Whether this receiver may have joined after the others received the version."""
        self._began_s = 0.0
        self._own_done_s = 0.0
        """Seconds from the start of the fetch until this receiver had its own share; -1 until then."""
        self._own_scale = 1.0
        """Ratio of the mean share of chunks to this receiver's share, at least 1."""
        self.num_bad = 0
        """How often a peer was abandoned for a version: wrong bytes, no answer, or too slow."""

    def begin(self, manifest: Manifest, *, num_own: int, num_chunks: int) -> None:
        """Begins a fetch of `num_chunks`, `num_own` of which this receiver fetches from the publisher."""
        self._idle.clear()
        self._may_be_late = True
        self._began_s = asyncio.get_running_loop().time()
        self._own_done_s = -1.0 if num_own else 0.0
        num_serving = 1 + sum(is_peer(p) and p.url != self._own_url() for p in manifest.sources)
        self._own_scale = max(1.0, num_chunks / num_serving / max(num_own, 1))

    def note_own_done(self) -> None:
        """Records that this receiver has the chunks that it fetches from the publisher."""
        if self._own_done_s < 0:
            self._own_done_s = asyncio.get_running_loop().time() - self._began_s

    def peers_before(self, manifest: Manifest, chunk: Chunk) -> list[SourceLink]:
        """The peers to ask for a chunk before any origin: the parent in the tree, then the others by rank."""
        own = self._own_url()
        # The highest hash is number 0. A receiver that does not serve comes after all peers.
        own_hash = _rank(own, chunk) if own else -1
        before = [p for p in self._rank_peers(manifest, chunk) if _rank(p.url, chunk) > own_hash]
        if before:  # this receiver is number `len(before)`; its parent goes to the front
            before.insert(0, before.pop((len(before) - 1) // 2))
        return before

    def peers_after(self, manifest: Manifest, chunk: Chunk) -> list[SourceLink]:
        """The other peers, as the last resort."""
        before = self.peers_before(manifest, chunk)
        return [p for p in self._rank_peers(manifest, chunk) if p not in before]

    async def wait_for(self, peer: SourceLink, manifest: Manifest, chunk: Chunk, speed: float) -> bool:
        """Waits until the peer has the chunk. Returns False if it will not have the chunk in time.

        `speed` is the publisher's, in bytes per second; 0 if unknown.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while peer.url not in self._idle and not self.is_bad(peer, manifest):
            left_s = self._patience_s(chunk, speed) - (loop.time() - self._began_s)
            wait_s = min(max(left_s, 0.0), _ASK_S) if peer.url in self._answered else 0.0
            try:
                state = await self._ask(peer.url, chunk, manifest, wait_s)
            except (UnavailableError, WeightsError) as err:
                self._answered.discard(peer.url)
                self.blame(peer, manifest, f"does not say whether it has a chunk: {err}")
                return False
            if state == "absent" and wait_s == 0.0 and peer.url not in self._answered:
                self._answered.add(peer.url)
                continue  # it answers, so it can be asked to wait: it may be about to fetch the version
            self._answered.add(peer.url)
            if state == "absent":
                self._idle.add(peer.url)
                self._charge(peer, manifest, began_s)
            if state != "coming":
                return state == "here"
            if left_s <= 0:
                self.blame(peer, manifest, "is slower than the publisher")
        return False

    async def already_has(self, peer: SourceLink, manifest: Manifest, chunk: Chunk) -> bool:
        """Whether the peer already has the chunk, because it had the version before this receiver joined.

        Once any peer lacks a chunk, no peer is asked again in this fetch: the version is then new to all.
        """
        if not self._may_be_late:
            return False
        try:
            self._may_be_late = await self._ask(peer.url, chunk, manifest, 0.0) == "here"
        except (UnavailableError, WeightsError) as err:
            self.blame(peer, manifest, f"does not say whether it has a chunk: {err}")
            return False
        return self._may_be_late

    def note_delivery(self, peer: SourceLink) -> None:
        """Records that the peer sent a chunk with the right hash."""
        self._reputation.note_delivery(peer.url)

    def _charge(self, peer: SourceLink, manifest: Manifest, began_s: float) -> None:
        """Records that this receiver waited for the peer in vain, and blames the peer if that took long or
        happened often."""
        if self._reputation.note_waste(peer.url, began_s, asyncio.get_running_loop().time()):
            self.blame(peer, manifest, "made this receiver wait in vain several times")

    def blame(self, peer: SourceLink, manifest: Manifest, reason: str, *, is_lie: bool = False) -> None:
        """Ensures that the peer is not asked again for this version, nor for some time afterwards."""
        self._reputation.blame(peer.url, asyncio.get_running_loop().time(), is_lie=is_lie)
        if self._failed_for(peer, manifest):
            return
        version, urls = self._bad.get(manifest.policy, (-1, set[str]()))
        if version != manifest.version:
            urls = set[str]()
        self._bad[manifest.policy] = (manifest.version, urls | {peer.url})
        self.num_bad += 1
        name = peer.labels.get("peer")
        _log.warning("%s version %d: peer %s %s", manifest.policy, manifest.version, name, reason)

    def is_bad(self, peer: SourceLink, manifest: Manifest) -> bool:
        """Whether the peer failed for this version, or recently."""
        is_paused = self._reputation.is_paused(peer.url, asyncio.get_running_loop().time())
        return is_paused or self._failed_for(peer, manifest)

    def _failed_for(self, peer: SourceLink, manifest: Manifest) -> bool:
        version, urls = self._bad.get(manifest.policy, (-1, set[str]()))
        return version == manifest.version and peer.url in urls

    def _rank_peers(self, manifest: Manifest, chunk: Chunk) -> list[SourceLink]:
        own = self._own_url()
        peers = [p for p in manifest.sources if is_peer(p) and p.url != own and not self.is_bad(p, manifest)]
        return sorted(peers, key=lambda p: -_rank(p.url, chunk))

    def _patience_s(self, chunk: Chunk, speed: float) -> float:
        """Seconds from the start of the fetch that a peer may take for a chunk.

        This is `spare_s` plus twice the longer of two times: the time that this receiver needed for its own
        share (or would have needed for a mean share, if that is larger), and the time that the publisher
        would need for the chunk. There is no limit while this receiver is still fetching its own share.
        """
        if self._own_done_s < 0:
            return float("inf")
        alone_s = chunk.num_bytes / speed if speed else 0.0
        known_s = max(self._own_done_s * self._own_scale, alone_s)
        return self._spare_s + 2 * known_s if known_s else _BLIND_S


def _rank(url: str, chunk: Chunk) -> int:
    return xxhash.xxh3_64_intdigest(f"{chunk.hash} {url}".encode())
