"""The only writer of a run's journal. Segments hold payloads and the log of records; SQLite holds what
compaction keeps of the records that it drops, and rows for people.

Durability: one flush task at a time takes what is pending. In the journal's own thread, it writes payloads
and records to the segments and syncs them (fdatasync). After a quiet time, a flush starts at once. Otherwise,
a group of records forms while the previous one is written, and for `_PAUSE_S`. Nothing is acknowledged before
`wait_durable` returns.

Rows go into SQLite (WAL, `synchronous=NORMAL`) in another thread. No decision depends on those that a crash
or a power loss keeps out of it.

After a failed write (disk full), the pending records stay in memory. `check` refuses further commands, and
tries again at most once per second. Once there is room, the journal continues by itself. After a bug in any
of the three tasks, the journal `is_broken`, and only a new process can continue.

    append, store --> pending --(flush task)--> journal's thread: segments --> wakes `wait_durable`
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
from astraflow.dataflow.journal.check import check_database, check_header, check_segments
from astraflow.dataflow.journal.compaction import Compaction, CompactionInput
from astraflow.dataflow.journal.journal_db import (
    DATABASE,
    UNREADABLE,
    SqlRow,
    TableRows,
    TranscriptRow,
    insert_rows,
    make_insert,
    open_database,
)
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import (
    UNWRITABLE,
    PlanEntry,
    Record,
    RecordedPlan,
    chain_of,
    decode_commands,
    encode_commands,
    encode_events,
    encode_plan,
    encode_records,
)
from astraflow.dataflow.journal.segments import PLAN, RECORDS, SEGMENT_BYTES, PendingWrite, SegmentStore
from astraflow.dataflow.journal.table_writer import RETRY_S, InsertRows, TableWriter
from astraflow.errors import Error, JournalError
from astraflow.types import BusySpan

__all__ = ["Journal", "Replayable"]

_log = logging.getLogger(__name__)
_PAUSE_S = 0.002
"""Time between two flushes. Each costs about 100 us for the switch between threads, whatever its size."""


class Replayable(Protocol):
    """What the journal needs of the core."""

    def apply(self, command: Command, now_s: float) -> Decision: ...

    def snapshot_parts(self) -> Iterator[bytes]: ...

    def eval_deadlines(self) -> tuple[tuple[int, float], ...]: ...

    def groups_for_replay(self) -> frozenset[int]: ...


_CoreT = TypeVar("_CoreT", bound=Replayable)


@dataclass(slots=True)
class _Pending:
    """The content of one flush. `done` is set once it is durable, or the flush failed."""

    writes: list[PendingWrite] = field(default_factory=list["PendingWrite"])
    records: list[Record] = field(default_factory=list["Record"])
    num_logged: int = 0
    """Number of records, from the first on, that `writes` already contains."""
    rows: list[tuple[str, SqlRow]] = field(default_factory=list[tuple[str, "SqlRow"]])
    """(SQL, parameters)."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    error: JournalError | None = None
    """The error of the flush, if it failed."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.writes or self.records or self.rows)

    @property
    def newest(self) -> int:
        """Number of the newest record, or 0."""
        return self.records[-1].seq if self.records else 0

    def absorb(self, later: "_Pending") -> None:
        """Appends a later group."""
        self.writes += later.writes
        self.num_logged += later.num_logged
        self.records += later.records
        self.rows += later.rows

    def log_records(self, segments: SegmentStore) -> None:
        """Adds the new records to the writes, after the payloads to which they refer."""
        if new := self.records[self.num_logged :]:
            segments.add(RECORDS, encode_records(new))
            self.num_logged = len(self.records)
        self.writes += segments.take()


class Journal:
    """A journal folder, locked against other processes while open.

    Lifecycle: `Journal(folder)` opens and locks; `recover` rebuilds the core; `append` ... `durable`;
    `close`. Example::

        journal = Journal(Path("runs/a/journal"))
        core = journal.recover(new=lambda: Core(plan), restore=lambda state: Core.from_snapshot(plan, state))
        seq = journal.append([command], [decision.events], at_s=now)
        await journal.wait_durable(seq)
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

        `snapshot_every`: commands between two snapshots. `retained_steps`: committed steps whose payloads are
        kept. By default, no snapshots are made while the journal is open, and all payloads are kept.
        `insert`: inserts rows into the tables.

        Raises: JournalError if it is in use, damaged or not writable.
        """
        self.folder = folder
        self._snapshot_every = snapshot_every
        self._retained_steps = retained_steps
        self._lock_file = _lock_folder(folder)
        try:
            self._open(segment_bytes)
        except (Error, OSError, *UNREADABLE) as err:
            os.close(self._lock_file)
            if isinstance(err, Error):
                raise
            raise JournalError(f"{folder / DATABASE} cannot be opened: {err}") from err
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        # A lambda, because `on_broken` is set later.
        self._tables = TableWriter(self._db, insert=insert, on_broken=lambda: self.on_broken())
        self._pending = _Pending()
        self._in_flight: _Pending | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._failure: JournalError | None = None
        """The error of the newest flush, if it failed. The next one tries again."""
        self._failed_at = 0.0
        self._fault: BaseException | None = None
        """The bug that ended a task. Nothing is tried again."""
        self.on_broken: Callable[[], None] = _ignore
        """Called immediately when `is_broken` becomes true."""
        self._last_snapshot = self._seq
        self._num_since = 0
        """Commands since then: what a restart applies again, and what compaction has in memory at once."""
        self._compacting: asyncio.Task[None] | None = None
        self._is_closing = False
        """Whether a running compaction should stop after its current piece."""
        self._is_closed = False
        """Whether no more records are accepted."""

    def _open(self, segment_bytes: int) -> None:
        """Opens the files after the checks that the audit makes too (`check`)."""
        check_header(self.folder / DATABASE)
        self._db = open_database(self.folder / DATABASE)
        try:
            with JournalReader(self.folder) as reader:
                check_database(reader)
                check_segments(self.folder, reader)
                first = reader.first_segment
                self.run_id = reader.run_id
                self.date = reader.date
                self._plan = b"".join(entry.plan for entry in reader.plan_entries()[-1:])
                newest = reader.newest
                is_remade = self.run_id != reader.meta("run_id")
            self._segments = SegmentStore(self.folder / "segments", segment_bytes=segment_bytes)
            if is_remade:  # the database was lost and made again
                self._db.execute(*make_insert("meta", ("run_id", self.run_id), replaces=True))
            self._seq = newest.seq
            self._chain = newest.chain
            self._durable_seq = newest.seq
            self.newest_s = newest.at_s
            """Time of the newest record; 0 if there is none."""
            # A crash may have come between the end of a compaction and the deletion of its segments.
            self._segments.drop(first)
        except BaseException:
            self._db.close()
            raise

    # --- restart ---

    def recover(self, *, new: Callable[[], _CoreT], restore: Callable[[bytes], _CoreT]) -> _CoreT:
        """Rebuilds the core: restores the newest snapshot, and applies every later command again.

        Raises: JournalError, naming the record, if a replay gives other events than the stored ones.
        """
        row = self._db.execute("SELECT seq, state FROM snapshots ORDER BY seq DESC LIMIT 1").fetchone()
        core = restore(bytes(row[1])) if row else new()
        after = int(row[0]) if row else 0
        with JournalReader(self.folder) as reader:
            compacted = reader.compacted.seq
            if after < compacted:
                raise JournalError(
                    f"{self.folder}: the snapshot of record {compacted} is missing, and the records "
                    "before it are compacted; restore the folder from a copy"
                )
            for record in reader.records(after):
                self._num_since += _replay(core, record)
        self._last_snapshot = after
        return core

    def reader(self) -> JournalReader:
        """Opens a reader of what is durable now."""
        return JournalReader(self.folder)

    # --- writing ---

    @property
    def seq(self) -> int:
        """Number of the newest record, durable or not."""
        return self._seq

    @property
    def is_broken(self) -> bool:
        """Whether a bug ended one of the tasks, so that only a new process can continue."""
        return self._fault is not None or self._tables.is_broken

    @property
    def failure(self) -> JournalError | None:
        """Why the journal cannot be written now, or None."""
        error = self._fault or self._tables.failure
        return self._failure if error is None else self._make_error(error)

    def check(self) -> None:
        """Call before a command is applied. Raises: JournalError if the journal is closed or not writable."""
        if self._is_closed:
            raise JournalError(f"the journal {self.folder} is closed: the dataflow is stopping or restarting")
        if (failure := self.failure) is None:
            return
        if self._flusher is None and time.monotonic() - self._failed_at >= RETRY_S:
            self._start_flush()
        self._tables.retry_if_due()
        raise failure

    def store(self, payload: bytes) -> PayloadRef:
        """Assigns a payload its position. It is on disk no later than the next appended record."""
        return self._segments.append(payload)

    def append(
        self, commands: Sequence[Command | msgspec.Raw], events: Sequence[Sequence[Event]], *, at_s: float
    ) -> int:
        """Adds a record of commands that were applied at one moment, with the events of each.

        Returns its number, for `wait_durable`. Raises: JournalError if it cannot be encoded. Nothing is
        changed before all is encoded, so a failure leaves no gap in the numbers.
        """
        seq = self._seq + 1
        try:
            row = (seq, at_s, encode_commands(commands), encode_events(events))
        except UNWRITABLE as err:
            raise JournalError(f"journal record {seq} cannot be encoded: {err}") from err
        chain = chain_of(self._chain, Record(*row, b""))
        self._seq = seq
        self._chain = chain
        self.newest_s = at_s
        self._pending.records.append(Record(*row, chain))
        self._num_since += len(commands)
        self._start_flush()
        return self._seq

    def note_plan(self, plan: RecordedPlan) -> None:
        """Adds the plan to the log if it differs from the newest one there."""
        blob = msgspec.msgpack.encode(plan)
        if blob != self._plan:
            self._plan = blob
            entry = PlanEntry(self.run_id, self._seq, time.time(), blob)
            self._segments.add(PLAN, encode_plan(entry))
            self._pending.writes += self._segments.take()
            self._start_flush()

    def note_spans(self, source: str, spans: tuple[BusySpan, ...]) -> None:
        """Stores busy spans with finite ends. Does nothing if the journal cannot be written now, because no
        decision depends on them.
        """
        if self._is_closed or self.failure is not None:
            return
        for span in spans:
            if math.isfinite(span.start_s) and math.isfinite(span.end_s):
                row = (source, span.kind, float(span.start_s), float(span.end_s))
                self._add_row(*make_insert("telemetry", row))

    def note_transcript(self, transcript: TranscriptRow) -> None:
        """Stores the position of an episode's messages."""
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
        self._add_row(*make_insert("samples", row))

    def snapshot_if_due(self, core: Replayable) -> None:
        """Starts a snapshot, followed by compaction, if `snapshot_every` commands came since the last one."""
        if self._num_since < self._snapshot_every or self._compacting is not None:
            return
        self._last_snapshot = self._seq
        self._num_since = 0
        what = CompactionInput(
            self._seq,
            core.snapshot_parts(),
            open_rounds=frozenset(round_id for round_id, _ in core.eval_deadlines()),
            replayable=core.groups_for_replay(),
            segment=self._segments.end[0],
            retained_steps=self._retained_steps,
        )
        work = Compaction(self.folder, self._db, self._segments, what)
        self._compacting = asyncio.get_running_loop().create_task(
            self._compact(work, self._seq), name="journal compaction"
        )
        self._compacting.add_done_callback(self._on_compaction_end)

    async def _compact(self, work: Compaction, seq: int) -> None:
        """Does one piece after another, with flushes in between, until it is done or `close` is called."""
        try:
            await self.wait_durable(seq)
            await self._tables.settle()
            while not work.is_done and not self._is_closing and self.failure is None:
                await self._tables.run(work.step)
        except JournalError as err:
            if self.failure is None:
                _log.error("the journal %s grows: %s", self.folder, err)
        finally:
            await self._tables.run(work.close)

    def _on_compaction_end(self, task: asyncio.Task[None]) -> None:
        """If the compaction raised, that is a bug, which would also end the next one."""
        self._compacting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the journal's compaction failed", exc_info=error)
            self._break(error)

    def snapshot(self, core: Replayable) -> None:
        """Immediately adds a snapshot of the core as of the newest record."""
        if self._seq != self._last_snapshot or self._compacting is not None:
            self._last_snapshot = self._seq
            self._num_since = 0
            row = (self._seq, b"".join(core.snapshot_parts()))
            self._add_row(*make_insert("snapshots", row, replaces=True))
            self._add_row("DELETE FROM snapshots WHERE seq < ?", (self._seq,))

    async def wait_durable(self, seq: int) -> None:
        """Returns once record `seq` is on disk. Raises: JournalError if it cannot be written now."""
        while self._durable_seq < seq:
            self.check()
            flight = self._in_flight
            group = flight if flight and flight.newest >= seq else self._pending
            await group.done.wait()
            if group.error is not None:
                raise group.error

    async def wait_flushed(self) -> None:
        """Returns once nothing is pending, everything is in the tables, and no compaction is running.

        Raises: JournalError if the journal cannot be written now.
        """
        while tasks := {task for task in (self._flusher, self._compacting) if task is not None}:
            await asyncio.wait(tasks)
        await self._tables.settle()
        if (failure := self.failure) is not None:
            raise failure

    def read_all(self, refs: Sequence[PayloadRef]) -> list[memoryview]:
        """Durable payloads in the order of `refs`. Raises: JournalError."""
        return self._segments.read_all(refs)

    async def close(self) -> None:
        """Writes what is pending, closes the files, and unlocks the folder.

        Raises: JournalError if pending records cannot be written; the folder is unlocked nevertheless.
        """
        self._is_closing = True
        try:
            self._failed_at = 0.0
            self._start_flush()
            self._tables.start()
            await self.wait_flushed()
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
        self._pending.rows.append((sql, row))
        self._start_flush()

    def _start_flush(self) -> None:
        in_pause = self._failure is not None and time.monotonic() - self._failed_at < RETRY_S
        if self._flusher is None and not in_pause and not self._is_closed:
            self._flusher = asyncio.get_running_loop().create_task(self._flush(), name="journal flush")
            self._flusher.add_done_callback(self._on_flush_end)

    async def _flush(self) -> None:
        """Writes groups until none is pending or one fails. Woken by `_start_flush`; wakes `wait_durable`."""
        loop = asyncio.get_running_loop()
        while not self._pending.is_empty:
            group = self._pending
            self._pending = _Pending()
            self._in_flight = group
            group.log_records(self._segments)
            end = self._segments.end
            if group.writes:
                try:
                    await loop.run_in_executor(self._thread, self._segments.write, group.writes)
                except OSError as err:
                    self._fail(group, err)
                    break
            self._failure = None
            self._durable_seq = max(self._durable_seq, group.newest)
            self._in_flight = None
            group.done.set()
            self._tables.add(TableRows(group.rows, end))
            await asyncio.sleep(_PAUSE_S)
        # Not in a callback at the task's end: what is appended in between must start a new task.
        self._flusher = None

    def _on_flush_end(self, task: asyncio.Task[None]) -> None:
        """If the flush raised, or was cancelled with all tasks of a loop that ends, its group is lost.
        Nothing more is accepted, and all waiters get the error."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
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
        """Passes the error to all waiters, and puts the group back in front of what is pending."""
        self._failure = self._make_error(err)
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

    def _make_error(self, err: BaseException) -> JournalError:
        if self.is_broken:
            return JournalError(
                f"the journal {self.folder} failed because of a bug ({type(err).__name__}: {err}). "
                "What was acknowledged is safe. The dataflow ends and restarts from its journal"
            )
        return JournalError(
            f"the journal {self.folder} cannot be written: {err}. What was acknowledged is safe. Free space "
            "or repair the disk; the dataflow then continues by itself, and senders retry"
        )


def _ignore() -> None:
    """The default of `on_broken`."""


def _lock_folder(folder: Path) -> int:
    """Creates and locks a folder; returns its lock file. Raises: JournalError if it is in use."""
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
    """Applies a record's commands again. Returns their number.

    Raises: JournalError, naming the record, if they give other events than the stored ones.
    """
    try:
        decisions = [core.apply(command, record.at_s) for command in decode_commands(record)]
    except JournalError:
        raise
    except Error as err:
        raise JournalError(
            f"journal record {record.seq} was accepted but is refused in the replay: {err}. Was the "
            "recipe changed after a crash? Resume once with the previous recipe"
        ) from err
    events = encode_events([decision.events for decision in decisions])
    if events != record.events:
        raise JournalError(
            f"journal record {record.seq}: replaying its command gives other events than were stored. Was "
            "the recipe or AstraFlow changed after a crash? Resume once with the previous one"
        )
    return len(decisions)
