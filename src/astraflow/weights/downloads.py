"""Downloads chunks in parallel ranges from several sources, verifies them, and resumes after failures.

    fetch(parts) -> workers, one part each -> ranges in parallel -> the part's view -> hash

A range that has arrived is kept if its source fails, if the caller's deadline passes, and until the next
call. Publishers and stores are called origins. The peers that the `Swarm` names are tried first, then the
origins: the fastest first, and those that just failed last. If a source takes much longer than another would,
its ranges are read from the other. Parts expected from peers have their own workers, most of which are
waiting. All tasks end with `fetch`, so nothing writes into a view afterwards.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from astraflow.errors import Error, UnavailableError, WeightsError
from astraflow.types import Chunk, Manifest, SourceLink
from astraflow.weights.manifest import hash_bytes
from astraflow.weights.peers.reputation import TOO_SLOW, Reputation
from astraflow.weights.peers.swarm import Swarm, is_peer
from astraflow.weights.readers import ChunkReader, HttpReader
from astraflow.weights.threads import off_loop

__all__ = ["ChunkDownload", "Downloads"]

_T = TypeVar("_T")

_NUM_WAITING = 32
"""Number of parts that wait for peers in parallel."""
_NUM_OWN = 2
"""Parts that peers wait for are fetched two at a time, so that the first are complete early and can be passed
on."""

_SPARE_S = 2.0
"""Seconds that a range may take at any source, in addition to what its size allows."""
_UNKNOWN_S = 5.0
"""Seconds that a range may take while no speed is known and another source has not been tried yet."""


@dataclass(slots=True)
class ChunkDownload:
    """A chunk in transfer: the memory for its bytes, and the ranges that are still missing."""

    manifest: Manifest
    label: str
    chunk: Chunk
    view: memoryview
    missing: list[tuple[int, int]]
    is_verified: bool = False

    def arrived_bytes(self) -> int:
        """Bytes that have arrived, verified or not."""
        return self.chunk.num_bytes - sum(end - start for start, end in self.missing)


class _WrongBytesError(WeightsError):
    """A source sent bytes that do not have the chunk's hash."""


class _AbandonedError(UnavailableError):
    """A source was abandoned because another may be faster, not because it failed."""


_Slots = Mapping[bool, asyncio.Semaphore]
"""Limits on ranges read in parallel: from peers (True) and from origins (False)."""


class Downloads:
    """Fetches parts, and measures the speed of sources.

    `readers` maps each kind of source to its reader; the key `peer` stands for peers. `clock` gives seconds.
    `on_arrival` is called with each verified part.
    """

    def __init__(
        self,
        readers: Mapping[str, ChunkReader],
        *,
        swarm: Swarm,
        reputation: Reputation,
        num_parallel: int,
        range_bytes: int,
        clock: Callable[[], float],
        on_arrival: Callable[[ChunkDownload], Awaitable[None]],
    ) -> None:
        self._readers = readers
        self._num_parallel = num_parallel
        self._range_bytes = range_bytes
        self._clock = clock
        self._swarm = swarm
        self._on_arrival = on_arrival
        self._reputation = reputation
        self.peer_bytes = 0
        """Verified bytes that have come from peers since the start."""

    def part(self, manifest: Manifest, label: str, chunk: Chunk, view: memoryview) -> ChunkDownload:
        """A new part, all of whose ranges are missing."""
        return ChunkDownload(manifest, label, chunk, view, self._ranges(chunk))

    async def fetch(self, parts: Sequence[ChunkDownload]) -> None:
        """Completes all parts. The first error cancels the other downloads and is raised.

        Raises: WeightsError if the bytes of a chunk are wrong at a source and no other source has them;
        UnavailableError if no source answers.
        """
        slots = {from_peers: asyncio.Semaphore(self._num_parallel) for from_peers in (True, False)}
        waiting = [part for part in reversed(parts) if not part.is_verified]
        others = [part for part in waiting if self._swarm.peers_before(part.manifest, part.chunk)]
        own = [part for part in waiting if part not in others]
        if waiting:
            self._swarm.begin(waiting[0].manifest, num_own=len(own), num_chunks=len(waiting))
        num_left = len(own)

        async def work(queue: list[ChunkDownload]) -> None:
            nonlocal num_left
            while queue:
                await self._fetch_part(queue.pop(), slots)
                if queue is own:
                    num_left -= 1
                if num_left == 0:
                    self._swarm.note_own_done()

        try:
            async with asyncio.TaskGroup() as group:
                num_own = _NUM_OWN if others else self._num_parallel
                for queue, most in ((own, num_own), (others, _NUM_WAITING)):
                    for _ in range(min(most, len(queue))):
                        group.create_task(work(queue))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def rank_origins(self, sources: Sequence[SourceLink]) -> list[SourceLink]:
        """The origins among the sources: first those not measured yet, then by speed, and last those that
        just failed."""
        now_s = asyncio.get_running_loop().time()
        origins = [source for source in sources if not is_peer(source)]
        return sorted(
            origins,
            key=lambda s: (
                self._reputation.is_paused(s.url, now_s),
                -(self._reputation.speed(s.url) or math.inf),
            ),
        )

    async def ask(self, source: SourceLink, manifest: Manifest, asking: Awaitable[_T]) -> _T:
        """Awaits an origin's answer to a small question. An origin that fails is tried last from then on.

        Raises: whatever `asking` raises; UnavailableError if the answer takes long while another origin could
        be asked.
        """
        limit_s = _UNKNOWN_S if self._others(source, manifest) else None
        try:
            async with asyncio.timeout(limit_s):
                return await asking
        except (TimeoutError, UnavailableError, WeightsError) as err:
            self._reputation.blame(source.url, asyncio.get_running_loop().time(), is_lie=False)
            if isinstance(err, UnavailableError | WeightsError):
                raise
            raise UnavailableError(f"{source.url} did not answer within {limit_s} s") from err

    def _ranges(self, chunk: Chunk) -> list[tuple[int, int]]:
        step = self._range_bytes
        return [(a, min(a + step, chunk.num_bytes)) for a in range(0, chunk.num_bytes, step)]

    async def _fetch_part(self, part: ChunkDownload, slots: _Slots) -> None:
        """Completes one chunk from the first source whose bytes have its hash."""
        manifest = part.manifest
        before = self._swarm.peers_before(manifest, part.chunk)
        after = self._swarm.peers_after(manifest, part.chunk)
        if await self._fetch_from_peers(part, before, slots):
            return
        # If this receiver joined late, peers of any rank may already have the version.
        has_one = bool(after) and await self._swarm.already_has(after[0], manifest, part.chunk)
        if has_one and await self._fetch_from_peers(part, after[:1], slots):
            return
        failures = await self._fetch_from_origins(part, self.rank_origins(manifest.sources), slots)
        if failures is None or await self._fetch_from_peers(part, after, slots):
            return
        left = [source for source, err in failures if isinstance(err, _AbandonedError)]
        if left:  # the sources that seemed faster have failed, so the slow ones are now given all the time
            again = await self._fetch_from_origins(part, left, slots, is_patient=True)
            if again is None:
                return
            failures = [*((s, err) for s, err in failures if s not in left), *again]
        reasons = "; ".join(f"{source.url}: {err}" for source, err in failures)
        message = (
            f"policy {manifest.policy!r} version {manifest.version}: {part.label}, hash {part.chunk.hash}: "
            f"{reasons or 'the manifest names no source'}"
        )
        is_damaged = any(isinstance(err, WeightsError) for _, err in failures)
        raise WeightsError(message) if is_damaged else UnavailableError(message)

    async def _fetch_from_origins(
        self, part: ChunkDownload, sources: Sequence[SourceLink], slots: _Slots, *, is_patient: bool = False
    ) -> list[tuple[SourceLink, Error]] | None:
        """Completes a chunk from the first origin that can. Returns None, or the error of each origin."""
        failures: list[tuple[SourceLink, Error]] = []
        for source in sources:
            try:
                await self._fetch_from(source, part, slots, is_patient=is_patient)
                self._reputation.note_delivery(source.url)
                return None
            except (UnavailableError, WeightsError) as err:
                self._reputation.blame(source.url, asyncio.get_running_loop().time(), is_lie=False)
                failures.append((source, err))
        return failures

    async def _fetch_from_peers(
        self, part: ChunkDownload, peers: Sequence[SourceLink], slots: _Slots
    ) -> bool:
        """Completes a chunk from the first peer that can. Returns False if none did."""
        origins = self.rank_origins(part.manifest.sources)
        speed = max((self._reputation.speed(source.url) for source in origins), default=0.0)
        for peer in peers:
            if not await self._swarm.wait_for(peer, part.manifest, part.chunk, speed):
                continue
            try:
                await self._fetch_from(peer, part, slots)
            except (UnavailableError, WeightsError) as err:
                is_lie = isinstance(err, _WrongBytesError)
                self._swarm.blame(peer, part.manifest, f"failed: {err}", is_lie=is_lie)
                continue
            self._swarm.note_delivery(peer)
            self.peer_bytes += part.chunk.num_bytes
            return True
        return False

    async def _fetch_from(
        self, source: SourceLink, part: ChunkDownload, slots: _Slots, *, is_patient: bool = False
    ) -> None:
        """Completes a chunk from one source.

        Ranges kept from other sources may be damaged. If the hash is wrong, the chunk is therefore read again
        from this source alone before the source is blamed.
        """
        is_mixed = part.missing != self._ranges(part.chunk)
        await self._read_missing(source, part, slots, is_patient=is_patient)
        if is_mixed and await _hash(part.view) != part.chunk.hash:
            part.missing = self._ranges(part.chunk)
            await self._read_missing(source, part, slots, is_patient=is_patient)
        digest = await _hash(part.view)
        if digest != part.chunk.hash:
            part.missing = self._ranges(part.chunk)
            raise _WrongBytesError(f"the bytes hash to {digest}")
        part.is_verified = True
        await self._on_arrival(part)

    async def _read_missing(
        self, source: SourceLink, part: ChunkDownload, slots: _Slots, *, is_patient: bool
    ) -> None:
        """Reads the missing ranges in parallel. Ranges that arrive are kept even if others fail.

        Once a range has failed, ranges that have not started are not read from this source.
        """
        reader = self._readers.get("peer" if is_peer(source) else source.kind)
        if reader is None:
            raise UnavailableError(f"sources of kind {source.kind!r} cannot be read here")

        failure: UnavailableError | None = None

        async def read(start: int, end: int) -> None:
            nonlocal failure
            async with slots[is_peer(source)]:
                if failure is not None:
                    raise failure
                self._check_usable(source, part.manifest, is_patient=is_patient)
                limit_s = None if is_patient else self._limit_s(source, part.manifest, end - start)
                try:
                    await self._read_in_time(reader, source, part, (start, end), limit_s)
                except UnavailableError as err:
                    failure = err
                    self._blame(source, part.manifest, err)
                    raise
            part.missing.remove((start, end))

        outcomes = await asyncio.gather(*(read(a, b) for a, b in part.missing), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _read_in_time(
        self,
        reader: ChunkReader,
        source: SourceLink,
        part: ChunkDownload,
        span: tuple[int, int],
        limit_s: float | None,
    ) -> None:
        """Reads one range. Raises: UnavailableError if the source is too slow."""
        start, end = span
        began_s = self._clock()
        try:
            async with asyncio.timeout(limit_s):
                await _read_range(reader, source, part, start, end)
        except TimeoutError as err:
            raise _AbandonedError(f"{end - start} bytes took more than {limit_s} s") from err
        self._reputation.measure(source.url, end - start, self._clock() - began_s)

    def _blame(self, source: SourceLink, manifest: Manifest, error: UnavailableError) -> None:
        """Marks a source as failed, so that ranges waiting for their turn at it are read elsewhere."""
        if is_peer(source):
            self._swarm.blame(source, manifest, f"failed: {error}")
        else:
            self._reputation.blame(source.url, asyncio.get_running_loop().time(), is_lie=False)

    def _check_usable(self, source: SourceLink, manifest: Manifest, *, is_patient: bool) -> None:
        """Raises: UnavailableError if the source has failed meanwhile and another one can be asked."""
        if is_peer(source):
            if self._swarm.is_bad(source, manifest):
                raise UnavailableError("it failed while this range waited for its turn")
            return
        now_s = asyncio.get_running_loop().time()
        if (
            not is_patient
            and self._reputation.is_paused(source.url, now_s)
            and self._others(source, manifest)
        ):
            raise _AbandonedError("it failed while this range waited for its turn")

    def _others(self, source: SourceLink, manifest: Manifest) -> list[str]:
        """Other origins that have not just failed."""
        now_s = asyncio.get_running_loop().time()
        others = [s.url for s in manifest.sources if not is_peer(s) and s.url != source.url]
        return [url for url in others if not self._reputation.is_paused(url, now_s)]

    def _limit_s(self, source: SourceLink, manifest: Manifest, num_bytes: int) -> float | None:
        """Seconds that a range may take at a source; None if only the reader's own deadlines apply.

        The limit is several times what the fastest other origin would need. If no other origin has been
        measured, this source's own speed is used. Without another origin, there is no limit.
        """
        others = self._others(source, manifest)
        if not others:
            return None
        known = max(map(self._reputation.speed, others))
        if not known and is_peer(source):
            return None  # a peer shares its bandwidth with other receivers, and has its own deadlines
        known = known or self._reputation.speed(source.url)
        return _SPARE_S + TOO_SLOW * num_bytes / known if known else _UNKNOWN_S


async def _read_range(
    reader: ChunkReader, source: SourceLink, part: ChunkDownload, start: int, end: int
) -> None:
    """Reads bytes `[start, end)` of a chunk into its view, without a copy if the reader can."""
    if isinstance(reader, HttpReader):
        await reader.read_into(source.url, part.chunk.hash, part.view[start:end], start=start)
        return
    data = await reader.read(source.url, part.chunk.hash, start=start, end=end)
    if len(data) != end - start:
        raise WeightsError(f"{len(data)} bytes for range {start}-{end - 1}")
    part.view[start:end] = data


async def _hash(view: memoryview) -> str:
    return await off_loop(view.nbytes, hash_bytes, view)
