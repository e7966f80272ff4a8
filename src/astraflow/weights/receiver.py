"""The receiver: fetches a version in the cheapest way, verifies it, and only then returns it.

    fetch(manifest) -> path of manifests -> downloads -> host copy (filled, or patched in place)
                    -> digest -> snapshot

The newest version of a policy stays in host memory as the base of the next delta. Every chunk is checked
against its hash and the whole against the digest before `fetch` returns. Nothing partial is visible, on disk
or in memory. A host copy is patched in place only if nobody reads it any more; otherwise a duplicate is
patched. If a delta fails, because it or the copy here is damaged, the version is fetched in full, and
`num_fallbacks` counts it.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from astraflow.errors import UnavailableError, WeightsError
from astraflow.service.client import HttpTransport, ServiceClient, Transport
from astraflow.service.memory import available_bytes
from astraflow.types import Manifest
from astraflow.types.host_tensors import WeightChanges, WeightSnapshot
from astraflow.weights.arrival import Arrival
from astraflow.weights.downloads import ChunkDownload, Downloads
from astraflow.weights.manifest import (
    check_digest,
    check_manifest,
    delta_of,
    hash_bytes,
    name_of,
    plan_path,
    span_bytes,
    tensors_in,
    tensors_of,
)
from astraflow.weights.peers.admission import check_encoding, check_fits, check_follows
from astraflow.weights.peers.peer import Spool, peer_ticket
from astraflow.weights.peers.reputation import Reputation
from astraflow.weights.peers.swarm import Swarm
from astraflow.weights.readers import ChunkReader, FileReader, HttpReader, ManifestReader
from astraflow.weights.stores.object_stores import ObjectReader
from astraflow.weights.threads import off_loop
from astraflow.weights.transfers import HeldVersion, HostCopy, Transfer, build, content_of

__all__ = ["Receiver"]

_log = logging.getLogger(__name__)

_PATIENCE_S = 20.0
"""A source that does not answer for this long is skipped: a publisher restarts faster than this."""
_PEER_RANGE_S = 10.0
"""How long a peer may take for a range. It is short, because the publisher has every chunk as well."""
_PEER_QUIET_S = 3.0
"""How long a peer may send no byte."""
_QUIET_S = 10.0
"""How long a publisher may send no byte. It is long, because many receivers take turns under an upload
limit."""
_NUM_REMEMBERED = 64
"""Manifests kept per policy, so that they are not asked for again; a chain of deltas is shorter."""


class Receiver:
    """Fetches versions of any number of policies. Call `close` at the end.

    `cache_dir` gets one folder per set of model files (config, tokenizer), shared by all versions that have
    them and by all receivers of a machine. One version of a policy is transferred at a time. A peer that does
    not answer for `peer_patience_s` is skipped, and so is one that takes much longer than the publisher.

    Example: `snapshot = await Receiver(Path("cache"), token=token).fetch(manifest)`.
    """

    def __init__(
        self,
        cache_dir: Path,
        *,
        token: str = "",
        readers: Mapping[str, ChunkReader] | None = None,
        finders: Mapping[str, ManifestReader] | None = None,
        spool: Spool | None = None,
        transport: Callable[[str], Transport] = HttpTransport,
        num_parallel: int = 4,
        range_bytes: int = 4 * 1024 * 1024,
        deadline_s: float = 600.0,
        peer_patience_s: float = 1.0,
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
        memory_bytes: Callable[[], int] = available_bytes,
    ) -> None:
        self._cache_dir = cache_dir
        self._http = _http_reader(token, transport, _PATIENCE_S)
        self._peers = _http_reader(
            peer_ticket(token),
            transport,
            peer_patience_s,
            range_timeout_s=_PEER_RANGE_S,
            quiet_s=_PEER_QUIET_S,
        )
        self._spool = spool
        reputation = Reputation()
        spare_s = 2 * peer_patience_s
        self.swarm = Swarm(self._peers.state, self._own_url, reputation=reputation, spare_s=spare_s)
        origins = {"http": self._http, "file": FileReader(), "s3": ObjectReader()}
        self._finders = finders or origins
        self.downloads = Downloads(
            readers or {**origins, "peer": self._peers},
            swarm=self.swarm,
            reputation=reputation,
            num_parallel=num_parallel,
            range_bytes=range_bytes,
            clock=clock,
            on_arrival=self._arrived,
        )
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes
        self._turns: dict[str, asyncio.Lock] = {}
        self._transfers: dict[str, Transfer] = {}  # those that have not ended, which the next call resumes
        self._held: dict[str, HeldVersion] = {}
        self._remembered: dict[str, dict[int, Manifest]] = {}  # by policy and version
        self.num_fallbacks = 0
        """Number of versions that were fetched in another way because a delta on the copy here failed."""
        self.fetched_bytes = 0
        """Bytes of versions that have arrived since the start."""

    def _own_url(self) -> str:
        return self._spool.url if self._spool is not None else ""

    def arrival(self, policy: str) -> Arrival:
        """The progress of the transfer of a policy's version. A piece of a range counts as soon as it
        arrives, so the bytes of ranges that were read twice may count twice."""
        transfer = self._transfers.get(policy)
        parts = transfer.all_parts if transfer is not None else []
        return Arrival(
            num_bytes=sum(part.chunk.num_bytes for part in parts),
            arrived_bytes=sum(part.arrived_bytes() for part in parts),
            received_bytes=self._http.received_bytes + self._peers.received_bytes,
        )

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        """A verified version in host memory, fetched by deltas on the version held here, or in full.

        Raises: WeightsError if the manifest is wrong, the bytes are wrong at every source, the encoding is
        unknown, or no path leads to the version; UnavailableError if no source answers in time. What has
        arrived is kept then, and fetching the same version again resumes.
        """
        check_encoding(manifest)
        check_manifest(manifest)
        try:
            return await self._fetch(manifest)
        except MemoryError as err:
            raise WeightsError(f"{name_of(manifest)}: this machine has no memory for it") from err

    async def _fetch(self, manifest: Manifest) -> WeightSnapshot:
        policy = manifest.policy
        async with self._turns.setdefault(policy, asyncio.Lock()):
            held = self._held.get(policy)
            if held is not None:
                check_follows(manifest, held.manifest)
            path = await self._plan(manifest, held)
            if not path:
                return await self._lend_held(manifest)
            if path[0].kind == "full":
                return await self._install(path)
            try:
                return await self._install(path)
            except WeightsError as err:  # the copy here or a delta is damaged: a path that needs no copy
                path = await self._plan(manifest, None)
                self.num_fallbacks += 1
                _log.warning(
                    "%s: %s; it is fetched again, from version %d on", name_of(manifest), err, path[0].version
                )
            return await self._install(path)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()
        await self._peers.close()

    # --- the path to a version ---

    async def _plan(self, manifest: Manifest, held: HeldVersion | None) -> tuple[Manifest, ...]:
        """The cheapest path to a version from the one held; empty if they are the same.

        A full version that has no delta as a shortcut is fetched directly. The sources are asked for unknown
        manifests of earlier versions as long as a chain of deltas may still be cheaper.
        """
        remembered = self._remembered.setdefault(manifest.policy, {})
        remembered[manifest.version] = manifest
        for version in sorted(remembered)[:-_NUM_REMEMBERED]:
            del remembered[version]
        delta = delta_of(manifest)
        if delta is None or (held is not None and held.manifest.version > manifest.version):
            held = None
        known = [manifest]
        while delta is not None and not (held is not None and delta.base == held.manifest.version):
            is_past_held = held is None or delta.base < held.manifest.version
            if (known[-1].kind == "full" and is_past_held) or len(known) >= _NUM_REMEMBERED:
                break
            older = remembered.get(delta.base) or await self._find(manifest, delta.base)
            if older is None:
                break
            check_manifest(older)
            remembered[older.version] = older
            known.append(older)
            delta = delta_of(older)
        is_same = held is not None and held.manifest.digest == manifest.digest
        if is_same and held is not None and held.manifest.version == manifest.version:
            return ()
        return plan_path(known, [held.manifest.version] if held is not None else [])

    async def _find(self, manifest: Manifest, version: int) -> Manifest | None:
        """The manifest of a version, from the sources of another version; None if they do not have it.

        Raises: UnavailableError if none of them answers.
        """
        failure: UnavailableError | WeightsError | None = None
        for source in self.downloads.rank_origins(manifest.sources):
            finder = self._finders.get(source.kind)
            if finder is None:
                continue
            try:
                answer = await self.downloads.ask(
                    source, manifest, finder.manifest(source.url, manifest.policy, version)
                )
            except (UnavailableError, WeightsError) as err:
                failure = err
                continue
            if answer is None or (answer.policy, answer.version) == (manifest.policy, version):
                return answer
        if failure is not None:
            raise failure
        return None

    # --- from manifests to a snapshot ---

    async def _install(self, path: tuple[Manifest, ...]) -> WeightSnapshot:
        """Downloads the versions of the path, fills or patches the host copy, and verifies it."""
        for manifest in path:
            check_encoding(manifest)
        target = path[-1]
        policy = target.policy
        transfer = self._begin(path)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._download(transfer)
        except TimeoutError as err:
            arrived = sum(part.arrived_bytes() for part in transfer.all_parts)
            raise UnavailableError(
                f"{name_of(target)}: {arrived} of {sum(m.num_bytes for m in path)} bytes arrived in "
                f"{self._deadline_s:.0f} s; they are kept, fetch again to resume"
            ) from err
        base = self._held.get(policy) if transfer.copy is None else None
        if base is not None and not base.copy.is_free:
            base = HeldVersion(base.manifest, await asyncio.to_thread(base.copy.duplicate))
        del self._transfers[policy]
        self.fetched_bytes += sum(part.chunk.num_bytes for part in transfer.all_parts)
        # From here on a thread changes the copy. If this task is cancelled, nobody may use it any more.
        if base is not None:
            del self._held[policy]
        copy, changes = await off_loop(span_bytes(target.tensors), build, transfer, base)
        model_dir = await self._ensure_installed(transfer)
        return self._keep(HeldVersion(target, copy), model_dir, changes)

    def _begin(self, path: tuple[Manifest, ...]) -> Transfer:
        """A transfer with memory for the versions of the path.

        Raises: WeightsError or MemoryError if there is not enough memory.
        """
        policy = path[-1].policy
        held = self._held.get(policy)
        unfinished = self._transfers.get(policy)
        copies = [owner.copy for owner in (held, unfinished) if owner is not None and owner.copy is not None]
        kept_bytes = sum(copy.data.nbytes for copy in copies)
        check_fits(path, self._cache_dir, self._memory_bytes(), kept_bytes=kept_bytes)
        return self._transfer(path)

    async def _download(self, transfer: Transfer) -> None:
        chunks = [part.chunk for part in transfer.all_parts]
        target = transfer.target
        if self._spool is None:
            await self.downloads.fetch(transfer.all_parts)
            return
        self._spool.expect(target.policy, target.version, chunks)
        try:
            await self.downloads.fetch(transfer.all_parts)
        finally:
            self._spool.give_up(chunks)

    async def _arrived(self, part: ChunkDownload) -> None:
        if self._spool is not None:
            await self._spool.put(part.chunk, part.view)

    async def _lend_held(self, manifest: Manifest) -> WeightSnapshot:
        """The version that is held already, verified again."""
        held = self._held[manifest.policy]
        try:
            await asyncio.to_thread(check_digest, manifest, held.copy.data)
        except WeightsError:
            del self._held[manifest.policy]
            self.num_fallbacks += 1
            return await self._install(await self._plan(manifest, None))
        transfer = Transfer((), manifest, held.copy, [], [])
        self._add_files(transfer)
        await self._download(transfer)
        model_dir = await self._ensure_installed(transfer)
        copy = held.copy if held.copy.is_free else await asyncio.to_thread(held.copy.duplicate)
        return self._keep(HeldVersion(manifest, copy), model_dir)

    def _keep(
        self, fetched: HeldVersion, model_dir: Path, changes: WeightChanges | None = None
    ) -> WeightSnapshot:
        """Returns a verified version, and keeps it as a base unless a newer one is held."""
        manifest = fetched.manifest
        held = self._held.get(manifest.policy)
        if held is None or held.manifest.version <= manifest.version:
            self._held[manifest.policy] = fetched
        tensors = tensors_of(manifest, fetched.copy.lend())
        return WeightSnapshot(manifest.policy, manifest.version, tensors, model_dir, changes)

    # --- what is missing ---

    def _transfer(self, path: tuple[Manifest, ...]) -> Transfer:
        known = self._transfers.get(path[-1].policy)
        if known is not None and [*map(content_of, known.path)] == [*map(content_of, path)]:
            for part in known.all_parts:
                part.manifest = path[-1]
            return known
        transfer = Transfer(path, path[-1], None, [], [])
        for manifest in path:
            num_bytes = sum(c.num_bytes for c in manifest.chunks)
            if manifest.kind == "full":
                transfer.copy = self._empty_copy(manifest, num_bytes, known)
                self._add_chunks(transfer, manifest, transfer.copy.data.data)
            else:
                transfer.deltas.append(bytearray(num_bytes))
                self._add_chunks(transfer, manifest, memoryview(transfer.deltas[-1]))
        self._add_files(transfer)
        self._transfers[path[-1].policy] = transfer
        return transfer

    def _empty_copy(self, manifest: Manifest, num_bytes: int, unfinished: Transfer | None) -> HostCopy:
        """Memory for a full version.

        The memory of a version or transfer that it displaces is used again if nobody reads it, because the
        first touch of fresh memory is slow.
        """
        held = self._held.get(manifest.policy)
        candidates = [unfinished.copy if unfinished is not None else None]
        if held is not None and held.manifest.version <= manifest.version:
            candidates.append(held.copy)
        for copy in candidates:
            if copy is not None and copy.data.nbytes == num_bytes and copy.is_free:
                if held is not None and copy is held.copy:
                    del self._held[manifest.policy]
                return copy
        return HostCopy(num_bytes)

    def _add_chunks(self, transfer: Transfer, manifest: Manifest, view: memoryview) -> None:
        start = 0
        for idx, chunk in enumerate(manifest.chunks):
            end = start + chunk.num_bytes
            what = f"delta {manifest.base} -> {manifest.version}"
            if manifest.kind == "full":
                what = tensors_in(manifest.tensors, start, end)
            part = self.downloads.part(transfer.target, f"chunk {idx} ({what})", chunk, view[start:end])
            transfer.parts.append(part)
            start = end

    def _add_files(self, transfer: Transfer) -> None:
        if self._model_dir(transfer.target).is_dir():
            return
        for info in transfer.target.files:
            view = memoryview(bytearray(info.chunk.num_bytes))
            part = self.downloads.part(transfer.target, f"file {info.name!r}", info.chunk, view)
            transfer.files.append((info, part))

    # --- the model folder ---

    def _model_dir(self, manifest: Manifest) -> Path:
        table = "".join(f"{f.name}\0{f.chunk.hash}\0" for f in sorted(manifest.files, key=lambda f: f.name))
        return self._cache_dir / f"model-{manifest.policy}-{hash_bytes(table.encode())[:16]}"

    async def _ensure_installed(self, transfer: Transfer) -> Path:
        target = self._model_dir(transfer.target)
        if not target.is_dir():
            await asyncio.to_thread(self._install_files, transfer, target)
        return target

    def _install_files(self, transfer: Transfer, target: Path) -> None:
        """Writes the model folder under another name and renames it. If several receivers do so at once, the
        first one's folder stays."""
        if len(transfer.files) != len(transfer.target.files):
            raise UnavailableError(
                f"{name_of(transfer.target)}: {target} was deleted during the fetch; fetch again"
            )
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".model-", dir=self._cache_dir))
        try:
            for info, part in transfer.files:
                (aside / info.name).write_bytes(part.view)
            aside.chmod(0o755)
            with contextlib.suppress(OSError):  # another receiver was first
                os.rename(aside, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        if not target.is_dir():
            raise WeightsError(f"{name_of(transfer.target)}: cannot write the model files to {target}")


def _http_reader(
    token: str,
    transport: Callable[[str], Transport],
    patience_s: float,
    *,
    range_timeout_s: float = 60.0,
    quiet_s: float = _QUIET_S,
) -> HttpReader:
    def connect(url: str) -> ServiceClient:
        return ServiceClient(url, token=token, patience_s=patience_s, transport=transport(url))

    return HttpReader(connect, token=token, range_timeout_s=range_timeout_s, quiet_s=quiet_s)
