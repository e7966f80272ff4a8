"""The journal's tables, and how its rows are coded: shared by the one writer and by read-only readers.

`records` holds every accepted command with the events it led to, in order; commands of one moment (the
results of one request) share a row. `chain` is a running xxh3-128 over all rows, so that an edited, missing
or reordered one shows. All other rows end in a `sum` over their values, for SQLite itself does not notice a
flipped bit in them. `fates` has one row per (policy, group) for ever. `plans` holds what the run was told
at each start. The rest is derived (`steps`, `evals`), for reading (`samples`, `telemetry`), or for restart
(`snapshots`, `meta`).

Compaction takes old records away. What the audit needs of them stays in `books` (all that was open then, and
counts), in the fates (whose last two columns it fills in) and in `payloads` (where the kept trajectories of
closed groups lie). `meta` has the record up to which that is done, and the first segment that is kept.
"""

import itertools
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from astraflow.dataflow.core.commands import (
    Command,
    EvalFinished,
    Event,
    FateDecided,
    PayloadRef,
    StepCommitted,
)
from astraflow.errors import JournalError
from astraflow.types import BusySpan, EvalRecord, Item, Message, StepRecord

__all__ = [
    "DATABASE",
    "JOURNAL_SCHEMA",
    "SCHEMA_SQL",
    "SUMMED_TABLES",
    "UNREADABLE",
    "UNWRITABLE",
    "UPGRADES",
    "ClosedFates",
    "FateRow",
    "JournalReader",
    "PlanEntry",
    "PlanRow",
    "PolicyFacts",
    "Record",
    "SampleRow",
    "SqlRow",
    "TelemetryRow",
    "chain_of",
    "decode_commands",
    "decode_events",
    "decode_plan",
    "decode_records",
    "derived_rows",
    "encode_command",
    "encode_commands",
    "encode_events",
    "encode_plan",
    "encode_records",
    "opened_to_read",
    "row_sum",
    "summed",
]

DATABASE = "journal.sqlite"
JOURNAL_SCHEMA = 4
"""Version of the tables below and of the coding of their rows."""
UPGRADES: dict[int, str] = {
    2: """
        ALTER TABLE fates ADD COLUMN samples INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE fates ADD COLUMN trained_tokens INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE samples ADD COLUMN data BLOB;
        """,
    3: "",
}
"""Schema -> statements that make the next one of it, besides the tables that it lacks and the sums of rows,
which came with 4."""
SUMMED_TABLES = (
    "meta", "snapshots", "fates", "books", "payloads", "plans", "steps", "evals", "telemetry", "samples",
)  # fmt: skip
"""Tables whose rows end in a sum; that of `records` has its chain."""

SCHEMA_SQL = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, sum BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, commands BLOB NOT NULL, events BLOB NOT NULL,
    chain BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (seq INTEGER PRIMARY KEY, state BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS fates (
    policy TEXT NOT NULL, group_id INTEGER NOT NULL, fate TEXT NOT NULL, step INTEGER NOT NULL,
    staleness INTEGER NOT NULL, tokens INTEGER NOT NULL, samples INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL, sum BLOB NOT NULL, PRIMARY KEY (policy, group_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS books (at_seq INTEGER NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL,
    sum BLOB NOT NULL, PRIMARY KEY (at_seq, part)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS payloads (
    policy TEXT NOT NULL, group_id INTEGER NOT NULL, segment INTEGER NOT NULL, refs BLOB NOT NULL,
    sum BLOB NOT NULL, PRIMARY KEY (policy, group_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS plans (
    seq INTEGER NOT NULL, at_s REAL NOT NULL, plan BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS steps (seq INTEGER PRIMARY KEY, record BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS evals (seq INTEGER NOT NULL, record BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS telemetry (
    source TEXT NOT NULL, kind TEXT NOT NULL, start_s REAL, end_s REAL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    kind TEXT NOT NULL, group_id INTEGER NOT NULL, task_id TEXT NOT NULL, policy TEXT NOT NULL,
    version INTEGER NOT NULL, score REAL NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, data BLOB, sum BLOB NOT NULL);
"""

UNWRITABLE = (OverflowError, ValueError, TypeError, RecursionError)
"""What encoding raises for a value that cannot be stored: an integer of more than 64 bits, half a surrogate
pair, what is nested too deeply."""

UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises for a damaged database: its own message may hold the damaged bytes."""

SqlRow = tuple[object, ...]
"""Parameters of one statement."""

_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS: msgspec.msgpack.Decoder[tuple[Command, ...]] = msgspec.msgpack.Decoder(tuple[Command, ...])
_EVENTS: msgspec.msgpack.Decoder[tuple[tuple[Event, ...], ...]] = msgspec.msgpack.Decoder(
    tuple[tuple[Event, ...], ...]
)
_HEAD = struct.Struct("<QdQ")
_STEPS = msgspec.msgpack.Decoder(StepRecord)
_EVALS = msgspec.msgpack.Decoder(EvalRecord)
_REFS = msgspec.msgpack.Decoder(list[PayloadRef])
_MESSAGES = msgspec.msgpack.Decoder(tuple[Message, ...])
_FATE_COLUMNS = 8
"""Those that say something; the last is their sum."""
_T = TypeVar("_T")


class PolicyFacts(Item, frozen=True, kw_only=True):
    """What the audit must know of a policy's table."""

    group_size: int
    min_group_size: int
    groups_per_batch: int
    staleness_bound: int
    """Inclusive."""
    num_steps: int
    max_replayed: int = 0
    """Groups of earlier steps that a batch may hold."""
    max_uses: int = 1
    """Steps that may hold one group."""


class PlanRow(Item, frozen=True, kw_only=True):
    """What the run was told when the dataflow (re)started: rows after record `seq` obey it."""

    recipe: str
    """Resolved recipe, JSON text."""
    policies: dict[str, PolicyFacts]


class PlanEntry(Item, frozen=True, array_like=True):
    """A plan in the segments' log: a row of `plans`, and whose journal it is."""

    run_id: str
    seq: int
    at_s: float
    plan: bytes


class SampleRow(Item, frozen=True, kw_only=True):
    """An episode whose messages are kept to be read."""

    kind: str
    """`train` or `eval`."""
    group_id: int
    task_id: str
    policy: str
    version: int
    """Evaluated version, or the oldest that trained tokens of the episode were made with."""
    score: float
    ref: PayloadRef
    data: bytes = b""
    """The messages themselves, once their segment is dropped."""


class Record(NamedTuple):
    """One row of the journal. Commands and events stay encoded until asked for."""

    seq: int
    at_s: float
    commands: bytes
    events: bytes
    chain: bytes


_PLAN_ENTRIES = msgspec.msgpack.Decoder(PlanEntry)
_PLANS = msgspec.msgpack.Decoder(PlanRow)
_RECORDS = msgspec.msgpack.Decoder(list[Record])


@dataclass(frozen=True, slots=True)
class FateRow:
    """How one group ended for one policy."""

    policy: str
    group_id: int
    fate: str
    step: int
    staleness: int
    tokens: int
    samples: int = 0
    """Trained samples; filled in when the group is closed, as is the next."""
    trained_tokens: int = 0


class ClosedFates(msgspec.Struct):
    """How many fates are closed, and a sum over them that no row can leave, enter or change unseen.

    The sum is of the rows' xxh3-128 hashes modulo 2^128: rows come in any order, and twice one shows.
    """

    num: int = 0
    digest: bytes = bytes(16)

    def add(self, row: FateRow) -> None:
        """Counts a row in."""
        digest = xxhash.xxh3_128_intdigest(_ENCODER.encode(row))
        total = int.from_bytes(self.digest, "big") + digest
        self.num, self.digest = self.num + 1, (total % (1 << 128)).to_bytes(16, "big")


@dataclass(frozen=True, slots=True)
class TelemetryRow:
    """A busy span and who reported it."""

    source: str
    span: BusySpan


def encode_command(command: Command) -> msgspec.Raw:
    """A command as `encode_commands` takes it too. Raises: one of `UNWRITABLE`."""
    return msgspec.Raw(_ENCODER.encode(command))


def encode_commands(commands: Sequence[Command | msgspec.Raw]) -> bytes:
    """The commands of one row as they are stored."""
    return _ENCODER.encode(commands)


def encode_events(events: Sequence[Sequence[Event]]) -> bytes:
    """The events of each command of one row as they are stored."""
    return _ENCODER.encode(events)


def decode_commands(row: Record) -> tuple[Command, ...]:
    """The commands of a row. Raises: JournalError."""
    try:
        return _COMMANDS.decode(row.commands)
    except msgspec.DecodeError as err:
        raise JournalError(f"journal record {row.seq}: its command cannot be read: {err}") from err


def decode_events(row: Record) -> tuple[tuple[Event, ...], ...]:
    """The events of each command of a row. Raises: JournalError."""
    try:
        return _EVENTS.decode(row.events)
    except msgspec.DecodeError as err:
        raise JournalError(f"journal record {row.seq}: its events cannot be read: {err}") from err


def encode_records(records: Sequence[Record]) -> bytes:
    """Rows as the segments' log holds them."""
    return _ENCODER.encode(records)


def decode_records(data: bytes) -> list[Record]:
    """Rows of the log. Raises: JournalError."""
    try:
        return _RECORDS.decode(data)
    except msgspec.DecodeError as err:
        raise JournalError(f"records in the journal's segments cannot be read: {err}") from err


def row_sum(table: str, values: SqlRow) -> bytes:
    """What the last column of a row holds: xxh3-64 over its table's name and its other values."""
    return xxhash.xxh3_64_digest(_ENCODER.encode((table, *values)))


def summed(table: str, values: SqlRow, *, replaces: bool = False) -> tuple[str, SqlRow]:
    """(SQL, parameters) that insert a row of one of the `SUMMED_TABLES`."""
    verb = "INSERT OR REPLACE" if replaces else "INSERT"
    places = ", ".join("?" * (len(values) + 1))
    return f"{verb} INTO {table} VALUES ({places})", (*values, row_sum(table, values))


def encode_plan(entry: PlanEntry) -> bytes:
    """A plan as the segments' log holds it."""
    return _ENCODER.encode(entry)


def decode_plan(data: bytes) -> PlanEntry:
    """A plan of the log. Raises: JournalError."""
    try:
        return _PLAN_ENTRIES.decode(data)
    except msgspec.DecodeError as err:
        raise JournalError(f"a plan in the journal's segments cannot be read: {err}") from err


def derived_rows(seq: int, events: Sequence[Sequence[Event]]) -> list[tuple[str, SqlRow]]:
    """(SQL, parameters) of the other tables' rows that a record's events lead to."""
    rows: list[tuple[str, SqlRow]] = []
    for event in itertools.chain.from_iterable(events):
        match event:
            case FateDecided():
                figures = (event.step, event.staleness, event.num_tokens, 0, 0)
                rows.append(summed("fates", (event.policy, event.group_id, event.fate, *figures)))
            case StepCommitted():
                rows.append(summed("steps", (seq, _ENCODER.encode(event.record))))
            case EvalFinished():
                rows.append(summed("evals", (seq, _ENCODER.encode(event.record))))
            case _:
                pass
    return rows


def chain_of(previous: bytes, row: Record) -> bytes:
    """xxh3-128 over the previous row's chain and this row's content."""
    head = _HEAD.pack(row.seq, row.at_s, len(row.commands))
    return xxhash.xxh3_128_digest(b"".join((previous, head, row.commands, row.events)))


class JournalReader:
    """Read-only view of a journal folder, live or finished, of one moment. `close` it, or use `with`.

    Raises JournalError for whatever cannot be read.
    """

    def __init__(self, folder: Path, database: sqlite3.Connection | None = None) -> None:
        """`database`: read this instead of the folder's; it is closed with the reader."""
        self.path = folder / DATABASE
        try:
            self.database = database or opened_to_read(self.path)
            self.database.execute("BEGIN")
            schema = self.meta("schema")
        except UNREADABLE as err:
            raise JournalError(f"{self.path} cannot be read: {err}") from err
        if schema not in {str(JOURNAL_SCHEMA), *map(str, UPGRADES)}:
            self.close()
            raise JournalError(
                f"{self.path} has schema {schema or 'none'}; this version reads {JOURNAL_SCHEMA}"
            )

    def __enter__(self) -> "JournalReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def _rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        try:
            # Not `yield from`, which would close the cursor: in another thread, if it is dropped there.
            cursor = self.database.execute(query, values)
            while (row := cursor.fetchone()) is not None:
                yield row
        except UNREADABLE as err:
            raise JournalError(f"{self.path} cannot be read: {err}") from err

    def _decoded(self, table: str, decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
        try:
            return decoder.decode(data)
        except msgspec.DecodeError as err:
            raise JournalError(f"{self.path}: a row of {table} cannot be read: {err}") from err

    def meta(self, key: str) -> str:
        """A value of the `meta` table, or an empty text."""
        row = next(self._rows("SELECT value FROM meta WHERE key = ?", key), None)
        return str(row[0]) if row else ""

    def records(self, after: int = 0) -> Iterator[Record]:
        """All records newer than `after`, in order."""
        query = "SELECT seq, at_s, commands, events, chain FROM records WHERE seq > ? ORDER BY seq"
        return (Record(*row) for row in self._rows(query, max(after, self.compacted)))

    @property
    def newest(self) -> tuple[int, bytes]:
        """Number and chain of the newest record."""
        row = next(self._rows("SELECT seq, chain FROM records ORDER BY seq DESC LIMIT 1"), None)
        return (int(row[0]), bytes(row[1])) if row else (0, b"")

    @property
    def compacted(self) -> int:
        """Number of the newest record that the books stand for; records up to it are gone or going."""
        return self._number("compacted")

    @property
    def first_segment(self) -> int:
        """The first segment that is kept."""
        return self._number("first_segment")

    @property
    def written(self) -> tuple[int, int]:
        """Segment and offset up to which the segments are in the tables."""
        segment, _, offset = self.meta("written").partition(" ")
        if not (segment.isdecimal() and offset.isdecimal()):
            raise JournalError(f"{self.path}: meta says that {self.meta('written')!r} is written")
        return int(segment), int(offset)

    def _number(self, key: str) -> int:
        value = self.meta(key) or "0"
        if not value.isdecimal():
            raise JournalError(f"{self.path}: meta says that {key} is {value!r}")
        return int(value)

    def books(self) -> list[bytes]:
        """The parts of the books, as `compaction` coded them; none before the first time."""
        if not self.compacted:
            return []
        query = "SELECT data FROM books WHERE at_seq = ? ORDER BY part"
        return [data for (data,) in self._rows(query, self.compacted)]

    def payloads(self) -> Iterator[tuple[str, int, list[PayloadRef]]]:
        """(policy, closed group, its trained trajectories), as far as they are kept."""
        query = "SELECT policy, group_id, refs FROM payloads ORDER BY policy, group_id"
        rows = self._rows(query) if self.compacted else ()
        return ((policy, group, self._decoded("payloads", _REFS, refs)) for policy, group, refs in rows)

    def fates(self) -> Iterator[FateRow]:
        """All fates."""
        query = "SELECT * FROM fates ORDER BY policy, group_id"
        return (FateRow(*row[:_FATE_COLUMNS]) for row in self._rows(query))

    def plans(self) -> list[tuple[int, PlanRow]]:
        """(seq after which it holds, plan), oldest first."""
        rows = self._rows("SELECT seq, plan FROM plans ORDER BY rowid")
        return [(seq, self._decoded("plans", _PLANS, blob)) for seq, blob in rows]

    def steps(self) -> list[StepRecord]:
        """Committed steps of all policies, in order of commit."""
        rows = self._rows("SELECT record FROM steps ORDER BY seq")
        return [self._decoded("steps", _STEPS, blob) for (blob,) in rows]

    def evals(self) -> list[EvalRecord]:
        """Finished evaluation rounds, in order."""
        rows = self._rows("SELECT record FROM evals ORDER BY rowid")
        return [self._decoded("evals", _EVALS, blob) for (blob,) in rows]

    def telemetry(self) -> list[TelemetryRow]:
        """All busy spans. (SQLite stores what is not a number as NULL; such a span says nothing.)"""
        query = (
            "SELECT source, kind, start_s, end_s FROM telemetry "
            "WHERE start_s IS NOT NULL AND end_s IS NOT NULL"
        )
        return [
            TelemetryRow(source, BusySpan(kind, start, end)) for source, kind, start, end in self._rows(query)
        ]

    def samples(self, kind: str) -> list[SampleRow]:
        """Episodes of one kind whose messages are kept, in order of arrival."""
        query = "SELECT * FROM samples WHERE kind = ? ORDER BY rowid"
        return [
            SampleRow(
                kind=row[0],
                group_id=row[1],
                task_id=row[2],
                policy=row[3],
                version=row[4],
                score=row[5],
                ref=PayloadRef(*row[6:9]),
                data=(row[9] if len(row) > 9 else None) or b"",
            )
            for row in self._rows(query, kind)
        ]

    @staticmethod
    def messages(payload: bytes) -> tuple[Message, ...]:
        """The messages in a sample's payload. Raises: JournalError."""
        try:
            return _MESSAGES.decode(payload)
        except msgspec.DecodeError as err:
            raise JournalError(f"the messages of an episode cannot be read: {err}") from err


def opened_to_read(path: Path) -> sqlite3.Connection:
    """A database that exists, read only. Raises: JournalError, sqlite3.Error."""
    if not path.is_file():
        raise JournalError(f"{path.parent} holds no journal: {DATABASE} is missing")
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
