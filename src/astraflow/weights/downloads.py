"""Downloads of chunks: parallel ranges from several sources, verified, resumed.

    fetch(parts) -> workers -> a part each -> ranges in parallel -> the part's view -> hash

Ranges that have arrived are kept when a source fails, when the caller's deadline passes, and from one call to
the next. Publishers and stores are called origins. They are tried by measured speed, those that just failed
last, and after the peers that the `Swarm` names. If a source takes much longer than another would, its ranges
are read there instead. Parts that are to come from peers have workers of their own, most of which wait. All
tasks end with `fetch`, so that nobody writes into a view afterwards.
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
from astraflow.weights.readers import ChunkReader, FillsBuffer
from astraflow.weights.threads import off_loop

__all__ = ["Downloads", "Part"]

_T = TypeVar("_T")

_NUM_WAITING = 32
"""Parts that wait for peers in parallel."""
_NUM_OWN = 2
"""Parts that peers wait for are fetched two at a time, so that the first ones are soon whole and can be
passed on."""

_SPARE_S = 2.0
"""Seconds that a range may take at any source, in addition to what its size allows."""
_UNKNOWN_S = 5.0
"""Seconds that a range may take while no speed is known and another source has not been tried yet."""


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
        """Bytes that have arrived, verified or not."""
        return self.chunk.num_bytes - sum(end - start for start, end in self.missing)


class _WrongBytesError(WeightsError):
    """A source sent bytes that are not those of the chunk."""


class _LeftError(UnavailableError):
    """A source was given up because another may be faster, not because it failed."""


_Slots = Mapping[bool, asyncio.Semaphore]
"""Limits of the ranges that are read in parallel: from peers (True) and from origins (False)."""


class Downloads:
    """Fetches parts and measures how fast sources are.

    `readers` maps each kind of source to its reader; the key `peer` stands for peers. `clock` gives seconds.
    `arrived` is called with each verified part.
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
        arrived: Callable[[Part], Awaitable[None]],
    ) -> None:
        self._readers = readers
        self._num_parallel = num_parallel
        self._range_bytes = range_bytes
        self._clock = clock
        self._swarm = swarm
        self._arrived = arrived
        self._reputation = reputation
        self.peer_bytes = 0
        """Verified bytes that have come from peers since the start."""

    def part(self, manifest: Manifest, label: str, chunk: Chunk, view: memoryview) -> Part:
        """A part of which nothing has arrived yet."""
        return Part(manifest, label, chunk, view, self._ranges(chunk))

    async def fetch(self, parts: Sequence[Part]) -> None:
        """Completes all parts. The first error cancels the other downloads and is raised.

        Raises: WeightsError if the bytes of a chunk are wrong at a source and no other source has them;
        UnavailableError if no source answers.
        """
        slots = {from_peers: asyncio.Semaphore(self._num_parallel) for from_peers in (True, False)}
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
                if queue is own:
                    num_left -= 1
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
        """The origins among the sources: those not measured yet, then the fastest first, and those that just
        failed last."""
        now_s = asyncio.get_running_loop().time()
        origins = [source for source in sources if not is_peer(source)]
        return sorted(
            origins,
            key=lambda s: (
                self._reputation.is_paused(s.url, now_s),
                -(self._reputation.speed(s.url) or math.inf),
            ),
        )

    async def in_turn(self, source: SourceLink, manifest: Manifest, asking: Awaitable[_T]) -> _T:
        """The answer of an origin to a small question. An origin that fails is tried last from then on.

        Raises: UnavailableError if the answer takes long while another origin could be asked; what `asking`
        raises.
        """
        limit_s = _UNKNOWN_S if self._others(source, manifest) else None
        try:
            async with asyncio.timeout(limit_s):
                return await asking
        except (TimeoutError, UnavailableError, WeightsError) as err:
            self._reputation.blame(source.url, asyncio.get_running_loop().time(), is_lie=False)
            if isinstance(err, UnavailableError | WeightsError):
                raise
            raise UnavailableError(f"{source.url} gave no answer in {limit_s} s") from err

    def _ranges(self, chunk: Chunk) -> list[tuple[int, int]]:
        step = self._range_bytes
        return [(a, min(a + step, chunk.num_bytes)) for a in range(0, chunk.num_bytes, step)]

    async def _fetch_part(self, part: Part, slots: _Slots) -> None:
        """Completes one chunk from the first source whose bytes have its hash."""
        manifest = part.manifest
        before = self._swarm.before_me(manifest, part.chunk)
        after = self._swarm.after_me(manifest, part.chunk)
        if await self._fetch_from_peers(part, before, slots):
            return
        # A receiver that joined late finds peers that already have the version, whatever their rank.
        has_one = bool(after) and await self._swarm.has_now(after[0], manifest, part.chunk)
        if has_one and await self._fetch_from_peers(part, after[:1], slots):
            return
        failures = await self._fetch_from_origins(part, self.ranked(manifest.sources), slots)
        if failures is None or await self._fetch_from_peers(part, after, slots):
            return
        left = [source for source, err in failures if isinstance(err, _LeftError)]
        if left:  # the sources that were expected to be faster have failed, so time no longer matters
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
        self, part: Part, sources: Sequence[SourceLink], slots: _Slots, *, is_patient: bool = False
    ) -> list[tuple[SourceLink, Error]] | None:
        """Completes a chunk from the first origin that can. Returns None, or why each of them failed."""
        failures: list[tuple[SourceLink, Error]] = []
        for source in sources:
            try:
                await self._fetch_from(source, part, slots, is_patient=is_patient)
                self._reputation.delivered(source.url)
                return None
            except (UnavailableError, WeightsError) as err:
                self._reputation.blame(source.url, asyncio.get_running_loop().time(), is_lie=False)
                failures.append((source, err))
        return failures

    async def _fetch_from_peers(self, part: Part, peers: Sequence[SourceLink], slots: _Slots) -> bool:
        """True if a peer had the chunk and its bytes were right."""
        origins = self.ranked(part.manifest.sources)
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
            self._swarm.delivered(peer)
            self.peer_bytes += part.chunk.num_bytes
            return True
        return False

    async def _fetch_from(
        self, source: SourceLink, part: Part, slots: _Slots, *, is_patient: bool = False
    ) -> None:
        """Completes a chunk from one source.

        Ranges that were kept from other sources may be damaged. If the hash is wrong, the chunk is therefore
        read again from this source alone before the source is blamed.
        """
        is_mixed = part.missing != self._ranges(part.chunk)
        await self._read_missing(source, part, slots, is_patient=is_patient)
        if is_mixed and await _hash(part.view) != part.chunk.hash:
            part.missing = self._ranges(part.chunk)
            await self._read_missing(source, part, slots, is_patient=is_patient)
        found = await _hash(part.view)
        if found != part.chunk.hash:
            part.missing = self._ranges(part.chunk)
            raise _WrongBytesError(f"the bytes hash to {found}")
        part.is_verified = True
        await self._arrived(part)

    async def _read_missing(self, source: SourceLink, part: Part, slots: _Slots, *, is_patient: bool) -> None:
        """Reads the missing ranges in parallel. Those that arrive are kept, whatever happens to the others.

        Once a range has failed, those that still wait for their turn are not read from this source.
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
        part: Part,
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
            raise _LeftError(f"{end - start} bytes took over {limit_s} s") from err
        self._reputation.measure(source.url, end - start, self._clock() - began_s)

    def _blame(self, source: SourceLink, manifest: Manifest, error: UnavailableError) -> None:
        """Marks a source as failed, so that ranges waiting for their turn at it are read elsewhere."""
        if is_peer(source):
            self._swarm.blame(source, manifest, f"failed: {error}")
        else:
            self._reputation.blame(source.url, asyncio.get_running_loop().time(), is_lie=False)

    def _check_usable(self, source: SourceLink, manifest: Manifest, *, is_patient: bool) -> None:
        """Raises: UnavailableError if the source has failed in the meantime and another one can be asked."""
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
            raise _LeftError("it failed while this range waited for its turn")

    def _others(self, source: SourceLink, manifest: Manifest) -> list[str]:
        """Other origins that have not just failed."""
        now_s = asyncio.get_running_loop().time()
        others = [s.url for s in manifest.sources if not is_peer(s) and s.url != source.url]
        return [url for url in others if not self._reputation.is_paused(url, now_s)]

    def _limit_s(self, source: SourceLink, manifest: Manifest, num_bytes: int) -> float | None:
        """How many seconds a range may take at a source; None for no limit but the reader's own deadlines.

        The limit is several times what the fastest other origin would need. If no other origin was measured,
        the speed of this source so far counts. Without another origin there is no limit.
        """
        others = self._others(source, manifest)
        if not others:
            return None
        known = max(map(self._reputation.speed, others))
        if not known and is_peer(source):
            return None  # a peer shares its bandwidth with other receivers, and has deadlines of its own
        known = known or self._reputation.speed(source.url)
        return _SPARE_S + TOO_SLOW * num_bytes / known if known else _UNKNOWN_S


async def _read_range(reader: ChunkReader, source: SourceLink, part: Part, start: int, end: int) -> None:
    """Reads bytes `[start, end)` of a chunk into its view, without a copy if the reader can."""
    if isinstance(reader, FillsBuffer):
        await reader.read_into(source.url, part.chunk.hash, part.view[start:end], start=start)
        return
    data = await reader.read(source.url, part.chunk.hash, start=start, end=end)
    if len(data) != end - start:
        raise WeightsError(f"{len(data)} bytes for range {start}-{end - 1}")
    part.view[start:end] = data


async def _hash(view: memoryview) -> str:
    return await off_loop(view.nbytes, hash_bytes, view)
