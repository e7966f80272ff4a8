"""Downloads of chunks: parallel ranges from several sources, verified, resumed.

    fetch(parts) -> workers -> a part each -> ranges in parallel -> the part's view -> hash

Ranges that arrived stay in a part when a source fails, when the caller's deadline passes, and from one call
to the next. Publishers and stores are tried by measured speed, one that just failed last; peers before
them, as the `Swarm` says. A source that takes much longer than another would is left, and its range goes
there. Parts that are to come from peers have workers of their own, most of which wait. All tasks end with
`fetch`, so that nobody writes into a view afterwards.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from astraflow.errors import UnavailableError, WeightsError
from astraflow.protocols import ChunkReader
from astraflow.types import Chunk, Manifest, SourceLink
from astraflow.weights.manifest import hash_bytes
from astraflow.weights.readers import FillsBuffer
from astraflow.weights.standing import TOO_SLOW, Standing
from astraflow.weights.swarm import Swarm, is_peer
from astraflow.weights.threads import off_loop

__all__ = ["Downloads", "Part"]

_NUM_WAITING = 32
"""Parts that wait for peers at once."""
_NUM_OWN = 2
"""Parts that others wait for are fetched few at once, so that the first are soon whole and can go on."""

_SPARE_S = 2.0
"""A range may take so long at any source."""


@dataclass(slots=True)
class Part:
    """One chunk on its way: where its bytes go, and which ranges are still missing."""

    manifest: Manifest
    label: str
    chunk: Chunk
    view: memoryview
    missing: list[tuple[int, int]]
    is_verified: bool = False

    def arrived_bytes(self) -> int:
        """Bytes that are here, verified or not."""
        return self.chunk.num_bytes - sum(end - start for start, end in self.missing)


class _WrongBytesError(WeightsError):
    """A source gave other bytes than those of the chunk."""


_Slots = Mapping[bool, asyncio.Semaphore]
"""Ranges that are read at once: from peers (True), from elsewhere (False)."""


class Downloads:
    """Fetches parts; remembers how fast sources are.

    `readers` by kind of source, and `peer` for peers. `clock` is in seconds; a test passes its own. `arrived`
    gets each verified part.
    """

    def __init__(
        self,
        readers: Mapping[str, ChunkReader],
        *,
        swarm: Swarm,
        standing: Standing,
        num_parallel: int,
        range_bytes: int,
        clock: Callable[[], float],
        arrived: Callable[[Part], Awaitable[None]],
    ) -> None:
        self._readers = readers
        self._num_parallel = num_parallel
        self._range_bytes = range_bytes
        self._clock = clock
        self._swarm = swarm
        self._arrived = arrived
        self._standing = standing
        self.peer_bytes = 0
        """Verified bytes that came from peers, since the start."""

    def part(self, manifest: Manifest, label: str, chunk: Chunk, view: memoryview) -> Part:
        """A chunk of which nothing is here yet."""
        return Part(manifest, label, chunk, view, self._ranges(chunk))

    async def fetch(self, parts: Sequence[Part]) -> None:
        """Completes all parts; the first error wins and ends the others.

        Raises: WeightsError if a chunk's bytes are wrong at some source and to be had from no other,
        UnavailableError if no source answered.
        """
        near, far = asyncio.Semaphore(self._num_parallel), asyncio.Semaphore(self._num_parallel)
        slots = {True: near, False: far}
        waiting = [part for part in reversed(parts) if not part.is_verified]
        others = [part for part in waiting if self._swarm.before_me(part.manifest, part.chunk)]
        own = [part for part in waiting if part not in others]
        if waiting:
            self._swarm.begin(waiting[0].manifest, num_own=len(own), num_chunks=len(waiting))
        num_left = len(own)

        async def work(queue: list[Part]) -> None:
            nonlocal num_left
            while queue:
                await self._fetch_part(queue.pop(), slots)
                num_left -= queue is own
                if num_left == 0:
                    self._swarm.own_done()

        try:
            async with asyncio.TaskGroup() as group:
                num_own = _NUM_OWN if others else self._num_parallel
                for queue, most in ((own, num_own), (others, _NUM_WAITING)):
                    for _ in range(min(most, len(queue))):
                        group.create_task(work(queue))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def ranked(self, sources: Sequence[SourceLink]) -> list[SourceLink]:
        """Those that are no peers: fastest first, unmeasured before measured, failed last; ties as given."""
        now_s = asyncio.get_running_loop().time()
        origins = [source for source in sources if not is_peer(source)]
        return sorted(
            origins,
            key=lambda s: (
                self._standing.is_paused(s.url, now_s),
                -(self._standing.speed(s.url) or math.inf),
            ),
        )

    def _ranges(self, chunk: Chunk) -> list[tuple[int, int]]:
        step = self._range_bytes
        return [(a, min(a + step, chunk.num_bytes)) for a in range(0, chunk.num_bytes, step)]

    async def _fetch_part(self, part: Part, slots: _Slots) -> None:
        """One chunk, from the first source whose bytes have its hash."""
        manifest = part.manifest
        before, after = (f(manifest, part.chunk) for f in (self._swarm.before_me, self._swarm.after_me))
        if await self._fetch_from_peers(part, before, slots) or (
            after
            and await self._swarm.has_now(after[0], manifest, part.chunk)
            and await self._fetch_from_peers(part, after[:1], slots)
        ):
            return
        failures: list[str] = []
        is_damaged = False
        for source in self.ranked(manifest.sources):
            try:
                await self._fetch_from(source, part, slots)
                self._standing.delivered(source.url)
                return
            except (UnavailableError, WeightsError) as err:
                self._standing.blame(source.url, asyncio.get_running_loop().time(), is_lie=False)
                is_damaged = is_damaged or isinstance(err, WeightsError)
                failures.append(f"{source.url}: {err}")
        if await self._fetch_from_peers(part, after, slots):
            return
        message = (
            f"policy {manifest.policy!r} version {manifest.version}: {part.label}, hash {part.chunk.hash}: "
        ) + ("; ".join(failures) or "the manifest names no source")
        raise WeightsError(message) if is_damaged else UnavailableError(message)

    async def _fetch_from_peers(self, part: Part, peers: Sequence[SourceLink], slots: _Slots) -> bool:
        """True if a peer had the chunk, and its bytes were right."""
        origins = self.ranked(part.manifest.sources)
        speed = max((self._standing.speed(source.url) for source in origins), default=0.0)
        for peer in peers:
            if not await self._swarm.wait_for(peer, part.manifest, part.chunk, speed):
                continue
            try:
                await self._fetch_from(peer, part, slots)
            except (UnavailableError, WeightsError) as err:
                is_lie = isinstance(err, _WrongBytesError)
                self._swarm.blame(peer, part.manifest, f"failed: {err}", is_lie=is_lie)
                continue
            self._swarm.delivered(peer)
            self.peer_bytes += part.chunk.num_bytes
            return True
        return False

    async def _fetch_from(self, source: SourceLink, part: Part, slots: _Slots) -> None:
        """Completes a chunk from one source. Ranges kept from elsewhere may be the damaged ones, so that
        a wrong hash counts against this source only if all bytes are its own."""
        is_mixed = part.missing != self._ranges(part.chunk)
        await self._read_missing(source, part, slots)
        if is_mixed and await _hash(part.view) != part.chunk.hash:
            part.missing = self._ranges(part.chunk)
            await self._read_missing(source, part, slots)
        found = await _hash(part.view)
        if found != part.chunk.hash:
            part.missing = self._ranges(part.chunk)
            raise _WrongBytesError(f"the bytes hash to {found}")
        part.is_verified = True
        await self._arrived(part)

    async def _read_missing(self, source: SourceLink, part: Part, slots: _Slots) -> None:
        """The missing ranges in parallel; those that arrive stay, whatever happens to the others."""
        reader = self._readers.get("peer" if is_peer(source) else source.kind)
        if reader is None:
            raise UnavailableError(f"sources of kind {source.kind!r} cannot be read here")

        async def read(start: int, end: int) -> None:
            async with slots[is_peer(source)]:
                await self._read_in_time(reader, source, part, start, end)
            part.missing.remove((start, end))

        outcomes = await asyncio.gather(*(read(a, b) for a, b in part.missing), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _read_in_time(
        self, reader: ChunkReader, source: SourceLink, part: Part, start: int, end: int
    ) -> None:
        """One range, or an error once the source is slow; a peer that fails is blamed before the next range
        has its turn."""
        if is_peer(source) and self._swarm.is_bad(source, part.manifest):
            raise UnavailableError("it failed while this range waited for its turn")
        began_s = self._clock()
        limit_s = self._limit_s(source, part.manifest, end - start)
        try:
            async with asyncio.timeout(limit_s):
                await _read_range(reader, source, part, start, end)
        except (TimeoutError, UnavailableError) as err:
            reason = (
                f"{end - start} bytes took over {limit_s} s" if isinstance(err, TimeoutError) else str(err)
            )
            if is_peer(source):
                self._swarm.blame(source, part.manifest, f"failed: {reason}")
            raise UnavailableError(reason) from err
        self._standing.measure(source.url, end - start, self._clock() - began_s)

    def _limit_s(self, source: SourceLink, manifest: Manifest, num_bytes: int) -> float | None:
        """How long a range may take at a source: several times what the fastest other publisher or store
        would need. None if there is no other, or none was measured: the reader's own deadlines hold."""
        now_s = asyncio.get_running_loop().time()
        others = [s.url for s in manifest.sources if not is_peer(s) and s.url != source.url]
        usable = (self._standing.speed(url) for url in others if not self._standing.is_paused(url, now_s))
        fastest = max(usable, default=0.0)
        return _SPARE_S + TOO_SLOW * num_bytes / fastest if fastest else None


async def _read_range(reader: ChunkReader, source: SourceLink, part: Part, start: int, end: int) -> None:
    """Bytes `[start, end)` of a chunk into its view, without a copy where the reader can."""
    if isinstance(reader, FillsBuffer):
        await reader.read_into(source.url, part.chunk.hash, part.view[start:end], start=start)
        return
    data = await reader.read(source.url, part.chunk.hash, start=start, end=end)
    if len(data) != end - start:
        raise WeightsError(f"{len(data)} bytes for range {start}-{end - 1}")
    part.view[start:end] = data


async def _hash(view: memoryview) -> str:
    return await off_loop(view.nbytes, hash_bytes, view)
