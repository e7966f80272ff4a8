"""Which peer to ask for which chunk, so that a publisher sends each chunk about once to all receivers.

All receivers rank the peers of a chunk alike (rendezvous hashing over chunk and address). The ranks form a
tree: the k-th waits for the one at (k - 1) / 2, so that the first fetches from the publisher, each peer gives
a chunk to two others at most, and the uploads of a version are spread evenly. If the one above has the chunk
neither now nor soon, the others that rank before are asked, and if none of them fetches it, this receiver
does. Nobody waits for a peer that ranks after itself, so that waits form no circle, even while receivers
know different peers. What a peer did wrong is held against it for the version at hand, and after that for a
while (`Standing`), so that it costs a run seconds, not seconds for each version.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import xxhash

from astraflow.errors import UnavailableError, WeightsError
from astraflow.types import Chunk, Manifest, SourceLink
from astraflow.weights.peer import State
from astraflow.weights.standing import Standing

__all__ = ["AsksPeer", "Swarm", "is_peer"]

_log = logging.getLogger(__name__)

AsksPeer = Callable[[str, Chunk, Manifest, float], Awaitable[State]]
"""Asks the peer at a URL for the state of a version's chunk, waiting up to so many seconds for a change."""

_ASK_S = 2.0
_BLIND_S = 30.0
"""Patience with a peer while nothing tells how fast the publisher is."""


def is_peer(source: SourceLink) -> bool:
    """Whether a source is another receiver."""
    return "peer" in source.labels


class Swarm:
    """The peers as one receiver sees them, during one fetch after the other.

    `own_url`: where this receiver serves; empty if it does not. A peer may be late by `spare_s` and more.
    """

    def __init__(
        self, ask: AsksPeer, own_url: Callable[[], str], *, standing: Standing, spare_s: float = 2.0
    ) -> None:
        self._ask = ask
        self._spare_s = spare_s
        self._own_url = own_url
        self._standing = standing
        self._answered: set[str] = set()
        """Peers that answer: only these are asked to hold their answer back until there is news."""
        self._bad: dict[str, tuple[int, set[str]]] = {}
        self._idle: set[str] = set()
        """Peers that do not fetch what this receiver does."""
        self._may_be_late = True
        self._began_s = self._own_done_s = 0.0
        self._own_scale = 1.0
        """How much larger a mean share of the publisher's chunks is than this receiver's."""
        self.num_bad = 0
        """Peers passed over for the rest of a version: wrong bytes, no answer, or too slow."""

    def begin(self, manifest: Manifest, *, num_own: int, num_chunks: int) -> None:
        """A fetch of so many chunks begins; `num_own` are this receiver's to fetch from the publisher."""
        self._idle.clear()
        self._may_be_late = True
        self._began_s = asyncio.get_running_loop().time()
        self._own_done_s = -1.0 if num_own else 0.0
        num_serving = 1 + sum(is_peer(p) and p.url != self._own_url() for p in manifest.sources)
        self._own_scale = max(1.0, num_chunks / num_serving / max(num_own, 1))

    def own_done(self) -> None:
        """The chunks that are this receiver's to fetch are here."""
        if self._own_done_s < 0:
            self._own_done_s = asyncio.get_running_loop().time() - self._began_s

    def before_me(self, manifest: Manifest, chunk: Chunk) -> list[SourceLink]:
        """The peers to ask for a chunk before it is fetched from a publisher or store: the one above in the
        tree, then the others as they rank."""
        own = self._own_url()
        floor = _rank(own, chunk) if own else -1
        before = [p for p in self._ranked(manifest, chunk) if _rank(p.url, chunk) > floor]
        if before:
            before.insert(0, before.pop((len(before) - 1) // 2))
        return before

    def after_me(self, manifest: Manifest, chunk: Chunk) -> list[SourceLink]:
        """The other peers: the last resort."""
        before = self.before_me(manifest, chunk)
        return [p for p in self._ranked(manifest, chunk) if p not in before]

    async def wait_for(self, peer: SourceLink, manifest: Manifest, chunk: Chunk, speed: float) -> bool:
        """Whether the peer has the chunk, sooner or later. `speed`: of the publisher, bytes/s; 0: unknown."""
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
                continue  # now that it is known to answer, it is asked whether the version is on its way
            self._answered.add(peer.url)
            if state == "absent":
                self._idle.add(peer.url)
                self._charge(peer, manifest, began_s)
            if state != "coming":
                return state == "here"
            if left_s <= 0:
                self.blame(peer, manifest, "is slower than the publisher")
        return False

    async def has_now(self, peer: SourceLink, manifest: Manifest, chunk: Chunk) -> bool:
        """Whether the peer has the chunk already: it got the version before this receiver came. Asked until
        one does not: the version is then on its way to all."""
        if not self._may_be_late:
            return False
        try:
            self._may_be_late = await self._ask(peer.url, chunk, manifest, 0.0) == "here"
        except (UnavailableError, WeightsError) as err:
            self.blame(peer, manifest, f"does not say whether it has a chunk: {err}")
            return False
        return self._may_be_late

    def delivered(self, peer: SourceLink) -> None:
        """The peer gave a chunk whose hash is right."""
        self._standing.delivered(peer.url)

    def _charge(self, peer: SourceLink, manifest: Manifest, began_s: float) -> None:
        """The receiver waited for the peer in vain; it is blamed if that was long, or happens often."""
        if self._standing.wasted(peer.url, began_s, asyncio.get_running_loop().time()):
            self.blame(peer, manifest, "is waited for in vain again and again")

    def blame(self, peer: SourceLink, manifest: Manifest, reason: str, *, is_lie: bool = False) -> None:
        """The peer is not asked again for this version, nor for some time after it."""
        self._standing.blame(peer.url, asyncio.get_running_loop().time(), is_lie=is_lie)
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
        """Whether it failed for this version, or not long ago."""
        is_paused = self._standing.is_paused(peer.url, asyncio.get_running_loop().time())
        return is_paused or self._failed_for(peer, manifest)

    def _failed_for(self, peer: SourceLink, manifest: Manifest) -> bool:
        version, urls = self._bad.get(manifest.policy, (-1, set[str]()))
        return version == manifest.version and peer.url in urls

    def _ranked(self, manifest: Manifest, chunk: Chunk) -> list[SourceLink]:
        own = self._own_url()
        peers = [p for p in manifest.sources if is_peer(p) and p.url != own and not self.is_bad(p, manifest)]
        return sorted(peers, key=lambda p: -_rank(p.url, chunk))

    def _patience_s(self, chunk: Chunk, speed: float) -> float:
        """From the fetch's beginning: twice what this receiver needed for its own share, or would have for a
        mean one if its own is smaller, or would need for the chunk."""
        if self._own_done_s < 0:
            return float("inf")
        alone_s = chunk.num_bytes / speed if speed else 0.0
        known_s = max(self._own_done_s * self._own_scale, alone_s)
        return self._spare_s + 2 * known_s if known_s else _BLIND_S


def _rank(url: str, chunk: Chunk) -> int:
    return xxhash.xxh3_64_intdigest(f"{chunk.hash} {url}".encode())
