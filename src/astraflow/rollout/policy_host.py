"""One policy on a rollout service: its engine and renderer, kept at the newest version.

    dataflow --versions (long-poll)--> follow --manifest--> receiver --snapshot--> engine.load(live | pinned)

`follow` is the only writer of the engine's weights. If a version cannot be fetched or installed, the old one
keeps serving, and `follow` tries again with growing pauses. The engine is made from the first version that
arrives. The tokenizer comes with the files of that version.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from astraflow.errors import DeadlineError, RolloutError, UnavailableError, UnfitVersionError, WeightsError
from astraflow.protocols import Engine, Renderer, SlotName
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.membership import WorkerLink
from astraflow.rollout.waiting import run_unless
from astraflow.types import (
    BusySpan,
    Manifest,
    PolicyInfo,
    ServedVersions,
    VersionsReply,
    WaitReason,
    WeightTransfer,
)
from astraflow.types.bounds import as_label
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.arrival import Arrival

__all__ = ["PolicyHost", "WeightArrivals", "WeightFetcher", "WeightSlots", "load_in_turn"]

_log = logging.getLogger(__name__)

_POLL_S = 25.0
_PAUSE_S = 0.05
"""Pause after an answer without news, because a dataflow that is ending answers at once."""
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_LOADING = threading.Lock()
"""Only one thread loads a model or a tokenizer at a time: transformers then imports modules lazily, and
another thread could find one that is only half imported."""
_ResultT = TypeVar("_ResultT")


async def load_in_turn(load: Callable[..., _ResultT], *args: Any) -> _ResultT:
    """Runs a function that loads a model or a tokenizer in a thread, after others that are running."""

    def run() -> _ResultT:
        with _LOADING:
            return load(*args)

    return await asyncio.to_thread(run)


class WeightArrivals:
    """How much of a policy's newest version has arrived, and for how long nothing has arrived. Passive.

    Example: `arrivals.begin(7, before, now_s)`, then `arrivals.make_report("actor", arrival, now_s)` now and
    then, and `arrivals.end()` once the version is here.
    """

    def __init__(self) -> None:
        self._version = -1
        """-1: nothing is in transfer."""
        self._began_s = 0.0
        self._moved_s = 0.0
        """When a report last found that bytes had arrived."""
        self._received_before = 0
        self._received = 0
        self._arrived = 0
        self._problem = ""

    def begin(self, version: int, before: Arrival, now_s: float) -> None:
        """Begins an attempt to fetch a version; a second attempt at the same version continues the first."""
        if version == self._version:
            return
        if self._version < 0:
            self._began_s = self._moved_s = now_s
        self._version = version
        self._problem = ""
        self._received_before = before.received_bytes
        self._received = before.received_bytes
        self._arrived = before.arrived_bytes

    def fail(self, reason: str) -> None:
        """Notes that an attempt has failed, and why. Another attempt follows."""
        self._problem = reason

    def end(self) -> None:
        """Notes that the version has arrived, or is no longer wanted."""
        self._version = -1
        self._problem = ""

    def make_report(self, policy: str, arrival: Arrival, now_s: float) -> WeightTransfer | None:
        """The transfer in progress; None if there is none, for example because only the engine is awaited."""
        if self._version < 0 or not (arrival.num_bytes or self._problem):
            return None
        if (arrival.received_bytes, arrival.arrived_bytes) != (self._received, self._arrived):
            self._received = arrival.received_bytes
            self._arrived = arrival.arrived_bytes
            self._moved_s = now_s
        # `arrived_bytes` counts only complete ranges; bytes of incomplete ranges show in `received` alone.
        received = self._received - self._received_before
        return WeightTransfer(
            policy=policy,
            version=self._version,
            num_bytes=arrival.num_bytes,
            arrived_bytes=min(max(arrival.arrived_bytes, received), arrival.num_bytes),
            age_s=now_s - self._began_s,
            quiet_s=now_s - self._moved_s,
            problem=as_label(self._problem),
        )


class WeightFetcher(Protocol):
    """Downloads and verifies a version; `weights.receiver.Receiver` does."""

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        """The version in host memory. Raises: WeightsError, UnavailableError."""
        ...

    def arrival(self, policy: str) -> Arrival:
        """Progress of the transfer of a policy's version."""
        ...


class WeightSlots:
    """Which versions the two weight slots of a policy have, and when a slot may be swapped. Passive.

    `live` follows the newest version. `pinned` has the version of an evaluation, whose episodes name an exact
    version and hold it. A slot whose version is held is not swapped, unless the other slot has that version
    too. Training episodes hold nothing, because they continue with the next version. -1 means no version.

    Example: `slots.begin_swap("live")`, install the weights, `slots.finish_swap("live", 7)`.
    """

    def __init__(self) -> None:
        self.live = -1
        self.pinned = -1
        self._wanted: tuple[int, ...] = ()
        self._holds: Counter[int] = Counter()
        self._is_retiring = False
        """The live version is replaced as soon as nothing holds it, so it is no longer offered."""
        self._is_swapping = False
        """The live version is being replaced right now, so no new episode may hold it."""

    def want(self, versions: tuple[int, ...]) -> None:
        """Sets the versions that evaluation needs now."""
        self._wanted = tuple(sorted(versions))

    @property
    def wants_more(self) -> bool:
        """Whether evaluation needs a version that no slot has."""
        return any(version not in {self.live, self.pinned} for version in self._wanted)

    def next_pinned(self) -> int:
        """The version to load into `pinned` now, or -1. Evaluation rounds take turns, oldest first."""
        if not self._wanted or self.pinned in self._wanted or self.is_held("pinned"):
            return -1
        return self._wanted[0]

    def is_held(self, slot: SlotName) -> bool:
        """Whether episodes need the version of this slot and the other slot doesn't have it."""
        mine, other = (self.live, self.pinned) if slot == "live" else (self.pinned, self.live)
        return mine != other and self._holds[mine] > 0

    def retire_live(self) -> None:
        """Stops offering the live version, because a newer one waits for its slot. It may still be held."""
        self._is_retiring = True

    def begin_swap(self, slot: SlotName) -> None:
        """Notes that the slot is being changed, so that no new episode holds its version."""
        if slot == "live":
            self._is_swapping = True
        else:
            self.pinned = -1

    def finish_swap(self, slot: SlotName, version: int) -> None:
        """Notes that the slot serves `version` now."""
        if slot == "live":
            self.live = version
            self.keep_live()
        else:
            self.pinned = version

    def keep_live(self) -> None:
        """Offers the live version again, for example because its successor could not be installed."""
        self._is_retiring = self._is_swapping = False

    def offered_versions(self) -> tuple[int, ...]:
        """Versions to request leases for, newest last.

        None of them is newer than the live one: the dataflow would grant training leases for it, but training
        episodes run on `live`.
        """
        pinned = {self.pinned} if self.pinned in self._wanted and self.pinned <= self.live else set[int]()
        live = set[int]() if self._is_retiring else {self.live}
        return tuple(sorted((pinned | live) - {-1}))

    def hold(self, version: int) -> bool:
        """Holds a version for an evaluation episode. Returns False if no slot serves it, or not for long."""
        if version == self.pinned or (version == self.live and not self._is_swapping):
            self._holds[version] += 1
            return True
        return False

    def release(self, version: int) -> None:
        """Ends the hold of one evaluation episode."""
        self._holds[version] -= 1


class PolicyHost:
    """Hosts one policy from its first version until `follow` is cancelled or the run ends.

    `make_engine` makes an engine for a version, or returns an awaitable. The engine serves the version once
    `load` has returned. `changed` is called whenever the served versions change.
    """

    def __init__(
        self,
        info: PolicyInfo,
        *,
        link: WorkerLink,
        weights: WeightFetcher,
        make_engine: Callable[[WeightSnapshot], Engine | Awaitable[Engine]],
        make_renderer: Callable[[PolicyInfo, Path], Renderer],
        changed: Callable[[], None],
    ) -> None:
        self.info = info
        self.hosted: HostedPolicy | None = None
        self.problem = ""
        """The newest error; empty if the newest version is installed."""
        self._refused = -1
        """The version to which `problem` belongs, if no retry can install it; else -1."""
        self._link = link
        self._weights = weights
        self._make_engine = make_engine
        self._make_renderer = make_renderer
        self._changed = changed
        self._engine: Engine | None = None
        self._slots = WeightSlots()
        self._arrivals = WeightArrivals()
        self._spans: list[BusySpan] = []
        """When versions were fetched and installed, until `take_spans` takes the spans."""
        self._seen_newest = -1
        """The newest version that was announced when the last update succeeded."""
        self._released = asyncio.Event()

    @property
    def served_versions(self) -> ServedVersions:
        """The versions for which leases may be requested now."""
        return ServedVersions(policy=self.info.name, versions=self._slots.offered_versions())

    @property
    def live_version(self) -> int:
        """Version of the live slot; -1 before the first."""
        return self._slots.live

    @property
    def wait_reason(self) -> WaitReason | None:
        """What the policy waits for; None if it is served and up to date."""
        if self.problem:
            return WaitReason(
                kind="weights_failed",
                policy=self.info.name,
                version=self._refused,
                detail=as_label(self.problem),
            )
        return None if self.hosted else WaitReason(kind="first_version", policy=self.info.name)

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Takes the spans in which versions were fetched and installed since the last call."""
        spans = tuple(self._spans)
        self._spans.clear()
        return spans

    def transfer(self) -> WeightTransfer | None:
        """The transfer in progress; None if there is none."""
        return self._arrivals.make_report(self.info.name, self._arrival(), time.monotonic())

    def _arrival(self) -> Arrival:
        return self._weights.arrival(self.info.follows or self.info.name)

    @contextmanager
    def hold_version(self, version: int) -> Generator[None]:
        """Keeps an exact version in its slot while an evaluation episode runs in the block.

        Raises: RolloutError if the version is not served here, or no longer.
        """
        if not self._slots.hold(version):
            served = self._slots.offered_versions()
            raise RolloutError(f"version {version} of {self.info.name} is not served here (served: {served})")
        try:
            yield
        finally:
            self._slots.release(version)
            self._released.set()

    async def follow(self) -> None:
        """Keeps the slots up to date. Returns when the run is over."""
        backoff_s = _FIRST_BACKOFF_S
        newest = -1
        while True:
            try:
                reply = await self._poll()
                newest = reply.manifests[-1].version if reply.manifests else newest
                if reply.state in {"finished", "failed"}:
                    return
                await self._update(reply)
                self._seen_newest = reply.newest
                if not reply.manifests:
                    await asyncio.sleep(_PAUSE_S)
                self.problem = ""
                self._refused = -1
                backoff_s = _FIRST_BACKOFF_S
            except (UnavailableError, WeightsError, DeadlineError, OSError, MemoryError) as err:
                self._slots.keep_live()
                reason = str(err) or "this machine does not have enough memory for it"
                self._arrivals.fail(reason)
                self.problem = reason
                self._refused = newest if isinstance(err, UnfitVersionError) else -1
                _log.warning("policy %s stays at version %d: %s", self.info.name, self._slots.live, reason)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            self._changed()

    async def close(self) -> None:
        """Closes the engine."""
        if self._engine is not None:
            await self._engine.close()

    async def _poll(self) -> VersionsReply:
        """Waits for newer versions. While a wanted version has no slot, a released hold ends the wait too."""
        source = self.info.follows or self.info.name
        if self.info.lag:
            return await self._poll_with_lag(source)
        poll = self._link.versions(source, after=max(self._slots.live, -1), wait_s=_POLL_S)
        if not self._slots.wants_more or self._slots.live < 0:
            return await poll
        self._released.clear()
        if (reply := await run_unless(poll, self._released)) is not None:
            return reply
        # A slot may be free now, so ask which version is needed in it. The answer must not wait for a new
        # one.
        return await self._link.versions(source, after=self._slots.live, wait_s=0.0)

    async def _poll_with_lag(self, source: str) -> VersionsReply:
        """Waits for a newer version of `source`. The reply has the one version to serve, `lag` behind."""
        reply = await self._link.versions(source, after=self._seen_newest, wait_s=_POLL_S)
        wanted = max(0, reply.newest - self.info.lag)
        # The reply lists only versions newer than `_seen_newest`; an older one is asked for separately.
        if reply.newest > self._seen_newest and wanted <= self._seen_newest:
            older = await self._link.versions(source, after=wanted - 1, wait_s=0.0)
            reply = msgspec.structs.replace(reply, manifests=older.manifests)
        behind = tuple(m for m in reply.manifests if m.version <= wanted)
        return msgspec.structs.replace(reply, manifests=behind[-1:] or reply.manifests[:1])

    async def _update(self, reply: VersionsReply) -> None:
        self._slots.want(() if self.info.follows else reply.pinned)
        if self.hosted is not None:
            await self._update_pinned(reply)
        newest = reply.manifests[-1] if reply.manifests else None
        if newest is not None and newest.version > self._slots.live:
            await self._update_live(newest)
            await self._update_pinned(reply)

    async def _update_live(self, manifest: Manifest) -> None:
        began_s = time.time()
        self._arrivals.begin(manifest.version, self._arrival(), time.monotonic())
        snapshot = await self._weights.fetch(manifest)
        self._arrivals.end()
        fetched_s = time.time()
        if self.hosted is None:
            renderer = await load_in_turn(self._make_renderer, self.info, snapshot.model_dir)
            if self._engine is None:
                made = self._make_engine(snapshot)
                self._engine = await made if inspect.isawaitable(made) else made
            await self._engine.load(snapshot, slot="live")  # returns once the version is served
            self.hosted = HostedPolicy(self.info, self._engine, renderer, snapshot.model_dir)
            self._note_installed(snapshot, "live")
            self._spans.append(BusySpan("load", began_s, time.time()))
            return
        while self._slots.is_held("live"):
            # Evaluation episodes still need the live version. Without new offers, they run out.
            self._slots.retire_live()
            self._changed()
            self._released.clear()
            await self._released.wait()
        # The time spent waiting for these episodes doesn't count as loading.
        waited_s = time.time() - fetched_s
        await self._install(self.hosted.engine, snapshot, "live")
        self._spans.append(BusySpan("load", began_s + waited_s, time.time()))

    async def _update_pinned(self, reply: VersionsReply) -> None:
        version = self._slots.next_pinned()
        if version < 0 or self.hosted is None:
            return
        manifest = next((m for m in reply.manifests if m.version == version), None)
        if manifest is None:
            source = self.info.follows or self.info.name
            older = await self._link.versions(source, after=version - 1, wait_s=0.0)
            manifest = next((m for m in older.manifests if m.version == version), None)
        if manifest is None:
            raise UnavailableError(f"version {version} is needed for evaluation, but no longer listed")
        await self._install(self.hosted.engine, await self._weights.fetch(manifest), "pinned")

    async def _install(self, engine: Engine, snapshot: WeightSnapshot, slot: SlotName) -> None:
        self._slots.begin_swap(slot)
        await engine.load(snapshot, slot=slot)
        self._note_installed(snapshot, slot)

    def _note_installed(self, snapshot: WeightSnapshot, slot: SlotName) -> None:
        self._slots.finish_swap(slot, snapshot.version)
        self._changed()
        _log.info("policy %s serves version %d (%s)", self.info.name, snapshot.version, slot)
