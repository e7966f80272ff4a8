"""The one writer of a run's journal: segments hold payloads and the log of records, SQLite holds the tables.

Durability: one flush task at a time takes what is pending. In the journal's own thread it writes the
payloads and the records to the segments and syncs them (fdatasync). After a quiet time a flush begins at
once; otherwise a group forms while the last one is written, and for `_PAUSE_S`. Nothing is acknowledged
before it is `durable`.

The segments are the log. Rows go into SQLite (WAL, `synchronous=NORMAL`) behind them, in a thread of their
own; rows that a crash or a power loss keeps from it are made from the segments when the journal is opened.

After a failed write (disk full) the pending records stay in memory. `check` refuses further commands and
tries again at most once per second: once there is room, the journal continues by itself. After a fault of the
program, in any of the three tasks, the journal `is_broken`: only a new process can go on.

    append, store --> pending --(flush task)--> journal's thread: segments --> wakes `durable` waiters
                                                    |
                                                    +--(task of `TableWriter`)--> tables' thread: SQLite
                                                    +--(compaction task)--> tables' thread: SQLite, segments
"""

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from astraflow.dataflow.core.commands import Command, Decision, Event, PayloadRef
from astraflow.dataflow.journal.check import check_database, check_header, segments_end
from astraflow.dataflow.journal.compaction import Compaction, CompactionPlan
from astraflow.dataflow.journal.journal_db import (
    DATABASE,
    UNREADABLE,
    SqlRow,
    TableRows,
    TranscriptRow,
    catch_up,
    derived_rows,
    insert_rows,
    newest_record,
    open_database,
    summed,
)
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import (
    UNWRITABLE,
    PlanEntry,
    PlanRow,
    Record,
    chain_of,
    decode_commands,
    encode_commands,
    encode_events,
    encode_plan,
    encode_records,
)
from astraflow.dataflow.journal.segments import SEGMENT_BYTES, PendingWrite, SegmentStore
from astraflow.dataflow.journal.table_writer import RETRY_S, InsertRows, TableWriter
from astraflow.errors import Error, JournalError
from astraflow.types import BusySpan

__all__ = ["Journal", "Replayable"]

_log = logging.getLogger(__name__)
_PAUSE_S = 0.002
"""Between two flushes: each costs two threads some 100 us to hand over, whatever it holds."""


class Replayable(Protocol):
    """What the journal must know about the core."""

    def apply(self, command: Command, now_s: float) -> Decision: ...

    def snapshot_parts(self) -> Iterator[bytes]: ...

    def eval_deadlines(self) -> tuple[tuple[int, float], ...]: ...

    def groups_for_replay(self) -> frozenset[int]: ...


_CoreT = TypeVar("_CoreT", bound=Replayable)


@dataclass(slots=True)
class _Pending:
    """What one flush makes durable; `done` is set when it is, or when that failed."""

    writes: list[PendingWrite] = field(default_factory=list["PendingWrite"])
    num_logged: int = 0
    """Number of records, from the first, that are among the writes already."""
    tables: TableRows = field(default_factory=TableRows)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    error: JournalError | None = None
    """Why it failed, once `done` is set."""

    def absorb(self, later: "_Pending") -> None:
        """Puts a later group behind this one."""
        self.writes += later.writes
        self.num_logged += later.num_logged
        self.tables.absorb(later.tables)

    def log_records(self, segments: SegmentStore) -> None:
        """Adds the new records to the writes, behind the payloads that they refer to."""
        records = self.tables.records
        if new := records[self.num_logged :]:
            segments.append_records(encode_records(new))
            self.num_logged = len(records)
        self.writes += segments.take()
        self.tables.end = segments.end if self.writes else None


class Journal:
    """A journal folder, locked against other processes while open.

    Lifecycle: `Journal(folder)` opens and locks; `recover` rebuilds the core; `append` ... `durable`;
    `close`. Example::

        journal = Journal(Path("runs/a/journal"))
        core = journal.recover(new=lambda: Core(plan), restore=lambda state: Core.from_snapshot(plan, state))
        seq = journal.append([command], [decision.events], at_s=now)
        await journal.durable(seq)
    """

    def __init__(
        self,
        folder: Path,
        *,
        snapshot_every: int = sys.maxsize,
        segment_bytes: int = SEGMENT_BYTES,
        retained_steps: int = sys.maxsize,
        insert: InsertRows = insert_rows,
    ) -> None:
        """Opens or creates the folder.

        `snapshot_every`: commands between two snapshots. `retained_steps`: committed steps whose payloads
        are kept. By default no snapshot comes while the journal is open, and all payloads are kept.
        `insert`: puts rows into the tables.

        Raises: JournalError if it is in use, damaged or not writable.
        """
        self.folder = folder
        self._snapshot_every = snapshot_every
        self._retained_steps = retained_steps
        self._lock_file = _locked(folder)
        try:
            self._open(segment_bytes)
        except (Error, OSError, *UNREADABLE) as err:
            os.close(self._lock_file)
            if isinstance(err, Error):
                raise
            raise JournalError(f"{folder / DATABASE} cannot be opened: {err}") from err
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        # A lambda, for `on_broken` is set later.
        self._tables = TableWriter(self._db, insert=insert, on_broken=lambda: self.on_broken())
        self._pending = _Pending()
        self._in_flight: _Pending | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._failure: JournalError | None = None
        """Why the newest flush failed, if it did; the next one tries again."""
        self._failed_at = 0.0
        self._fault: BaseException | None = None
        """What ended a task that must never end so; nothing is tried again."""
        self.on_broken: Callable[[], None] = _ignore
        """Called at once when `is_broken` becomes true."""
        self._last_snapshot = self._seq
        self._num_since = 0
        """Commands since then: what a restart applies again, and what compaction has in memory at once."""
        self._compacting: asyncio.Task[None] | None = None
        self._is_closing = False
        """No further piece of a compaction is wanted."""
        self._is_closed = False
        """Nothing more is accepted."""

    def _open(self, segment_bytes: int) -> None:
        """Opens what is there, if it is whole: the audit makes the same checks (`journal_check`)."""
        check_header(self.folder / DATABASE)
        self._db = open_database(self.folder / DATABASE)
        try:
            with JournalReader(self.folder) as reader:
                check_database(reader)
                # Records that the tables lack are checked when the tables catch up with them.
                segments_end(self.folder, reader)
                first = reader.first_segment
                written = reader.written
                self.run_id = reader.meta("run_id")
            self._segments = SegmentStore(self.folder / "segments", segment_bytes=segment_bytes)
            if self._segments.end > written:
                catch_up(self._db, self.folder / "segments", written, self._segments.end)
                # A database that is made again takes the run's id from the log.
                with JournalReader(self.folder) as reader:
                    self.run_id = reader.meta("run_id")
            self._seq, self._chain = newest_record(self._db)
            self._durable_seq = self._seq
            # A crash may have come between the end of a compaction and the deletion of its segments.
            self._segments.drop(first)
        except BaseException:
            self._db.close()
            raise

    # --- restart ---

    def recover(self, *, new: Callable[[], _CoreT], restore: Callable[[bytes], _CoreT]) -> _CoreT:
        """The core as it was: the newest snapshot, and every later command applied again.

        Raises: JournalError naming the record whose replay gives other events than were stored.
        """
        row = self._db.execute("SELECT seq, state FROM snapshots ORDER BY seq DESC LIMIT 1").fetchone()
        core = restore(bytes(row[1])) if row else new()
        after = int(row[0]) if row else 0
        with JournalReader(self.folder) as reader:
            if after < reader.compacted:
                raise JournalError(
                    f"{self.folder}: the snapshot of record {reader.compacted} is missing, and the records "
                    "before it are compacted; restore the folder from a copy"
                )
            for record in reader.records(after):
                self._num_since += _replay(core, record)
        self._last_snapshot = after
        return core

    @property
    def newest_s(self) -> float:
        """Time of the newest record in the tables; 0 if there is none."""
        row = self._db.execute("SELECT at_s FROM records ORDER BY seq DESC LIMIT 1").fetchone()
        return float(row[0]) if row else 0.0

    def reader(self) -> JournalReader:
        """What is durable now, to read."""
        return JournalReader(self.folder)

    # --- writing ---

    @property
    def seq(self) -> int:
        """Number of the newest record, durable or not."""
        return self._seq

    @property
    def is_broken(self) -> bool:
        """Whether a part failed by a fault of the program: only a new process can go on."""
        return self._fault is not None or self._tables.is_broken

    @property
    def failure(self) -> JournalError | None:
        """Why the journal cannot be written now, if so."""
        error = self._fault or self._tables.failure
        return self._failure if error is None else self._refused(error)

    def check(self) -> None:
        """Call before a command is applied. Raises: JournalError if the journal cannot be written now, or is
        closed."""
        if self._is_closed:
            raise JournalError(f"the journal {self.folder} is closed: the dataflow is stopping or restarts")
        if (failure := self.failure) is None:
            return
        if self._flusher is None and time.monotonic() - self._failed_at >= RETRY_S:
            self._start_flush()
        self._tables.retry_if_due()
        raise failure

    def store(self, payload: bytes) -> PayloadRef:
        """Gives a payload its place; it is on disk no later than the next record that is appended."""
        return self._segments.append(payload)

    def append(
        self, commands: Sequence[Command | msgspec.Raw], events: Sequence[Sequence[Event]], *, at_s: float
    ) -> int:
        """Adds a record of commands that were applied at one moment, each with its events.

        Returns its number, for `durable`. Raises: JournalError if it cannot be encoded. It leaves no gap in
        the numbers then, for nothing is changed before all is encoded.
        """
        seq = self._seq + 1
        try:
            row = (seq, at_s, encode_commands(commands), encode_events(events))
            rows = derived_rows(seq, events)
        except UNWRITABLE as err:
            raise JournalError(f"journal record {seq} cannot be encoded: {err}") from err
        chain = chain_of(self._chain, Record(*row, b""))
        self._seq = seq
        self._chain = chain
        self._pending.tables.records.append(Record(*row, chain))
        self._pending.tables.rows += rows
        self._num_since += len(commands)
        self._start_flush()
        return self._seq

    def note_plan(self, plan: PlanRow) -> None:
        """Keeps what the run is told from here on, unless that is what it was told last."""
        blob = msgspec.msgpack.encode(plan)
        newest = self._db.execute("SELECT plan FROM plans ORDER BY rowid DESC LIMIT 1").fetchone()
        if newest is None or bytes(newest[0]) != blob:
            entry = PlanEntry(self.run_id, self._seq, time.time(), blob)
            self._segments.append_plan(encode_plan(entry))
            self._add_row(*summed("plans", (entry.seq, entry.at_s, entry.plan)))

    def note_spans(self, source: str, spans: tuple[BusySpan, ...]) -> None:
        """Keeps busy spans, unless the journal cannot be written now: nothing rests on them.

        A span whose ends are no finite numbers says nothing, and is left out.
        """
        if self._is_closed or self.failure is not None:
            return
        for span in spans:
            if math.isfinite(span.start_s) and math.isfinite(span.end_s):
                row = (source, span.kind, float(span.start_s), float(span.end_s))
                self._add_row(*summed("telemetry", row))

    def note_transcript(self, transcript: TranscriptRow) -> None:
        """Keeps where the messages of an episode lie."""
        row = (
            transcript.kind,
            transcript.group_id,
            transcript.task_id,
            transcript.policy,
            transcript.version,
            float(transcript.score),
            transcript.ref.segment,
            transcript.ref.offset,
            transcript.ref.length,
            None,  # The messages themselves, once compaction drops their segment.
        )
        self._add_row(*summed("samples", row))

    def snapshot_if_due(self, core: Replayable) -> None:
        """Begins a snapshot, and compaction after it, if `snapshot_every` commands came since the last."""
        if self._num_since < self._snapshot_every or self._compacting is not None:
            return
        self._last_snapshot = self._seq
        self._num_since = 0
        plan = CompactionPlan(
            self._seq,
            core.snapshot_parts(),
            open_rounds=frozenset(round_id for round_id, _ in core.eval_deadlines()),
            replayable=core.groups_for_replay(),
            segment=self._segments.end[0],
            retained_steps=self._retained_steps,
        )
        work = Compaction(self.folder, self._db, self._segments, plan)
        self._compacting = asyncio.get_running_loop().create_task(
            self._compact(work, self._seq), name="journal compaction"
        )
        self._compacting.add_done_callback(self._compaction_ended)

    async def _compact(self, work: Compaction, seq: int) -> None:
        """Does one piece after another, with flushes in between, until done or no longer wanted (`close`)."""
        try:
            await self.durable(seq)
            await self._tables.settle()
            while not work.is_done and not self._is_closing and self.failure is None:
                await self._tables.run(work.step)
        except JournalError as err:
            if self.failure is None:
                _log.error("the journal %s grows: %s", self.folder, err)
        finally:
            await self._tables.run(work.close)

    def _compaction_ended(self, task: asyncio.Task[None]) -> None:
        """A compaction that raised met a fault of the program: the next one would meet it too."""
        self._compacting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the journal's compaction failed", exc_info=error)
            self._break(error)

    def snapshot(self, core: Replayable) -> None:
        """Adds a snapshot of the core as of the newest record, at once."""
        if self._seq != self._last_snapshot or self._compacting is not None:
            self._last_snapshot = self._seq
            self._num_since = 0
            row = (self._seq, b"".join(core.snapshot_parts()))
            self._add_row(*summed("snapshots", row, replaces=True))
            self._add_row("DELETE FROM snapshots WHERE seq < ?", (self._seq,))

    async def durable(self, seq: int) -> None:
        """Returns when record `seq` is on disk. Raises: JournalError if it cannot be written now."""
        while self._durable_seq < seq:
            self.check()
            flight = self._in_flight
            group = flight if flight and flight.tables.newest >= seq else self._pending
            await group.done.wait()
            if group.error is not None:
                raise group.error

    async def flushed(self) -> None:
        """Returns when nothing is pending, all is in the tables and no compaction runs.

        Raises: JournalError if the journal cannot be written now.
        """
        while tasks := {task for task in (self._flusher, self._compacting) if task is not None}:
            await asyncio.wait(tasks)
        await self._tables.settle()
        if (failure := self.failure) is not None:
            raise failure

    def read(self, ref: PayloadRef) -> bytes:
        """A durable payload. Raises: JournalError."""
        return self._segments.read(ref)

    def read_all(self, refs: Sequence[PayloadRef]) -> list[memoryview]:
        """Durable payloads in the order of `refs`. Raises: JournalError."""
        return self._segments.read_all(refs)

    async def close(self) -> None:
        """Writes what is pending, closes the files and unlocks the folder.

        Raises: JournalError if what is pending cannot be written; the folder is unlocked all the same.
        """
        self._is_closing = True
        try:
            self._failed_at = 0.0
            self._start_flush()
            self._tables.start()
            await self.flushed()
        finally:
            self._is_closed = True
            self._thread.shutdown()
            self._tables.close()
            self._segments.close()
            self._db.close()
            with contextlib.suppress(OSError):
                os.close(self._lock_file)

    # --- the flush task ---

    def _add_row(self, sql: str, row: SqlRow) -> None:
        self._pending.tables.rows.append((sql, row))
        self._start_flush()

    def _start_flush(self) -> None:
        in_pause = self._failure is not None and time.monotonic() - self._failed_at < RETRY_S
        if self._flusher is None and not in_pause and not self._is_closed:
            self._flusher = asyncio.get_running_loop().create_task(self._flush(), name="journal flush")
            self._flusher.add_done_callback(self._flush_ended)

    async def _flush(self) -> None:
        """Writes groups until none is pending, or one fails. Woken by `_start_flush`; wakes `durable`."""
        loop = asyncio.get_running_loop()
        while not self._pending.tables.is_empty:
            group = self._pending
            self._pending = _Pending()
            self._in_flight = group
            group.log_records(self._segments)
            if group.writes:
                try:
                    await loop.run_in_executor(self._thread, self._segments.write, group.writes)
                except OSError as err:
                    self._fail(group, err)
                    break
            self._failure = None
            self._durable_seq = max(self._durable_seq, group.tables.newest)
            self._in_flight = None
            group.done.set()
            self._tables.add(group.tables)
            await asyncio.sleep(_PAUSE_S)
        # Here, not when the task has ended: what is appended between the two must begin a new one.
        self._flusher = None

    def _flush_ended(self, task: asyncio.Task[None]) -> None:
        """A flush that raised has lost its group: nothing more is accepted, and whoever waits is told."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.critical("the journal's flush failed", exc_info=error)
        self._flusher = None
        self._is_closed = True
        self._break(error)
        self._fail(self._in_flight or _Pending(), error)

    def _break(self, error: BaseException) -> None:
        self._fault = error
        self.on_broken()

    def _fail(self, group: _Pending, err: BaseException) -> None:
        """Tells all who wait; the group goes in front of what is pending, to be tried again."""
        self._failure = self._refused(err)
        self._failed_at = time.monotonic()
        _log.error("%s", self._failure)
        waiting = (group.done, self._pending.done)
        group.error = self._failure
        self._pending.error = self._failure
        again = _Pending()
        again.absorb(group)
        again.absorb(self._pending)
        self._pending = again
        self._in_flight = None
        for done in waiting:
            done.set()

    def _refused(self, err: BaseException) -> JournalError:
        if self.is_broken:
            return JournalError(
                f"the journal {self.folder} failed by a fault of the program ({type(err).__name__}: {err}). "
                "What was acknowledged is safe; the dataflow ends, and restarts from its journal"
            )
        return JournalError(
            f"the journal {self.folder} cannot be written: {err}. What was acknowledged is safe. Free space "
            "or repair the disk; the dataflow then continues by itself, and senders retry"
        )


def _ignore() -> None:
    """Stands in for `on_broken` until somebody asks to be told."""


def _locked(folder: Path) -> int:
    """The open lock file of a folder, which is made if need be. Raises: JournalError if another process holds
    it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as err:
        raise JournalError(f"journal {folder} cannot be opened: {err}") from err
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        holder = os.read(file, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(file)
        raise JournalError(
            f"journal {folder} is in use by process {holder}: the run is active already; stop it first, or "
            "choose another run folder"
        ) from err
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def _replay(core: Replayable, record: Record) -> int:
    """Applies a record's commands again, as a restart does after the newest snapshot; how many they are.

    Raises: JournalError naming the record if it gives other events than were stored.
    """
    try:
        decisions = [core.apply(command, record.at_s) for command in decode_commands(record)]
    except JournalError:
        raise
    except Error as err:
        raise JournalError(
            f"journal record {record.seq} was accepted once and is refused in the replay: {err}. Was the "
            "recipe changed after a crash? Resume once with the former recipe"
        ) from err
    events = encode_events([decision.events for decision in decisions])
    if events != record.events:
        raise JournalError(
            f"journal record {record.seq}: replaying its command gives other events than were stored. Was "
            "the recipe or AstraFlow changed after a crash? Resume once with the former one"
        )
    return len(decisions)
