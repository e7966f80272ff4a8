"""The content of the journal's log, records and plans, and its encoding.

A record holds the commands that were accepted at one moment (the results of one request), with the events of
each. Its `chain` is a running xxh3-128 over all records up to it, which reveals an edited, missing or
reordered record. A plan holds the recipe and the limits of the run, as of a start of the dataflow.

This module only deals with bytes. `segments` stores them on disk.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from astraflow.dataflow.core.commands import Command, EvalFinished, Event, StepCommitted
from astraflow.dataflow.core.plan import Schedule
from astraflow.errors import JournalError
from astraflow.types import Item

__all__ = [
    "UNWRITABLE",
    "PlanEntry",
    "PolicyFacts",
    "Record",
    "RecordedPlan",
    "chain_of",
    "decode_commands",
    "decode_events",
    "decode_plan",
    "decode_records",
    "encode_command",
    "encode_commands",
    "encode_events",
    "encode_plan",
    "encode_records",
    "events_of",
    "records_following",
]

UNWRITABLE = (OverflowError, ValueError, TypeError, RecursionError)
"""What encoding raises for values that cannot be stored: integers of more than 64 bits, half a surrogate
pair, too deeply nested values."""

_EventT = TypeVar("_EventT", StepCommitted, EvalFinished)
_CHAIN_HEAD = struct.Struct("<QdQ")
"""Number, time, and length of the commands, which separates the commands from the events after them."""


class PolicyFacts(Item, frozen=True, kw_only=True):
    """What the audit needs to know about a policy's table."""

    group_size: int
    min_group_size: int
    groups_per_batch: int
    staleness_bound: int
    """Inclusive."""
    num_steps: int
    max_replayed: int = 0
    """Groups of earlier steps that a batch may hold."""
    replaces_fresh: bool = False
    """Whether these count toward `groups_per_batch`."""
    max_uses: int = 1
    """Steps that may hold the same group."""


class RecordedPlan(Item, frozen=True, kw_only=True):
    """The run's plan as of a start of the dataflow. It is in force for all records after that."""

    recipe: str
    """Resolved recipe, JSON text."""
    policies: dict[str, PolicyFacts]
    schedule: Schedule
    most_drawn: int = 0
    """Tasks of the sources that may be drawn, each as often as the recipe's epochs say. 0: no limit."""


class PlanEntry(Item, frozen=True, array_like=True):
    """A plan in the log, and the id of the run."""

    run_id: str
    seq: int
    at_s: float
    plan: bytes


class Record(NamedTuple):
    """A record of the log. Commands and events stay encoded until they are needed."""

    seq: int
    at_s: float
    commands: bytes
    events: bytes
    chain: bytes


_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS = msgspec.msgpack.Decoder(tuple[Command, ...])
_EVENTS = msgspec.msgpack.Decoder(tuple[tuple[Event, ...], ...])
_RECORDS = msgspec.msgpack.Decoder(list[Record])
_PLAN_ENTRIES = msgspec.msgpack.Decoder(PlanEntry)


def encode_command(command: Command) -> msgspec.Raw:
    """Encodes one command for `encode_commands`. Raises: one of `UNWRITABLE`."""
    return msgspec.Raw(_ENCODER.encode(command))


def encode_commands(commands: Sequence[Command | msgspec.Raw]) -> bytes:
    """Encodes the commands of one record."""
    return _ENCODER.encode(commands)


def encode_events(events: Sequence[Sequence[Event]]) -> bytes:
    """Encodes the events of one record, by command."""
    return _ENCODER.encode(events)


def decode_commands(record: Record) -> tuple[Command, ...]:
    """Decodes the commands of a record. Raises: JournalError."""
    try:
        return _COMMANDS.decode(record.commands)
    except msgspec.DecodeError as err:
        raise JournalError(f"journal record {record.seq}: its command cannot be read: {err}") from err


def decode_events(record: Record) -> tuple[tuple[Event, ...], ...]:
    """Decodes the events of a record, by command. Raises: JournalError."""
    try:
        return _EVENTS.decode(record.events)
    except msgspec.DecodeError as err:
        raise JournalError(f"journal record {record.seq}: its events cannot be read: {err}") from err


def events_of(record: Record, kind: type[_EventT]) -> list[_EventT]:
    """The events of one kind in a record. Raises: JournalError."""
    if kind.__name__.encode() not in record.events:  # most records have none, and need no decoding
        return []
    return [event for events in decode_events(record) for event in events if isinstance(event, kind)]


def encode_records(records: Sequence[Record]) -> bytes:
    """Encodes records as one entry of the log."""
    return _ENCODER.encode(records)


def decode_records(data: bytes) -> list[Record]:
    """Decodes the records of one entry of the log. Raises: JournalError."""
    try:
        return _RECORDS.decode(data)
    except msgspec.DecodeError as err:
        raise JournalError(f"records in the journal's segments cannot be read: {err}") from err


def chain_of(previous: bytes, record: Record) -> bytes:
    """xxh3-128 over the previous record's chain and this record's content."""
    head = _CHAIN_HEAD.pack(record.seq, record.at_s, len(record.commands))
    return xxhash.xxh3_128_digest(b"".join((previous, head, record.commands, record.events)))


def records_following(newest: tuple[int, bytes], entries: Iterable[bytes]) -> Iterator[Record]:
    """Yields the records in entries of the log that follow the newest known one.

    `newest`: number and chain of that record. Raises: JournalError if one is missing or was changed.
    """
    seq, chain = newest
    for entry in entries:
        for record in decode_records(entry):
            if record.seq <= seq:
                continue
            if record.seq != seq + 1 or chain_of(chain, record) != record.chain:
                raise JournalError(
                    f"journal record {record.seq} in the segments does not follow record {seq}; restore the "
                    "journal folder from a copy"
                )
            seq = record.seq
            chain = record.chain
            yield record


def encode_plan(entry: PlanEntry) -> bytes:
    """Encodes a plan as an entry of the log."""
    return _ENCODER.encode(entry)


def decode_plan(data: bytes) -> PlanEntry:
    """Decodes the plan of an entry of the log. Raises: JournalError."""
    try:
        return _PLAN_ENTRIES.decode(data)
    except msgspec.DecodeError as err:
        raise JournalError(f"a plan in the journal's segments cannot be read: {err}") from err
