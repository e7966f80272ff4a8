"""What the journal's log holds, and how it is encoded: records and plans.

A record is one row of the log: the commands that were accepted at one moment (the results of one request),
with the events that each led to. Its `chain` is a running xxh3-128 over all records up to it, so that an
edited, missing or reordered record shows. A plan says what the run was told when the dataflow started.

This module knows bytes only. `segments` keeps them on disk; `tables` makes rows of them.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from astraflow.dataflow.core.commands import Command, Event
from astraflow.dataflow.core.plan import EvalPlan, Schedule
from astraflow.errors import JournalError
from astraflow.types import Item

__all__ = [
    "UNWRITABLE",
    "PlanEntry",
    "PlanRow",
    "PolicyFacts",
    "Record",
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
    "records_following",
    "schedule_of",
]

UNWRITABLE = (OverflowError, ValueError, TypeError, RecursionError)
"""What encoding raises for a value that cannot be stored: an integer of more than 64 bits, half a surrogate
pair, what is nested too deeply."""

_CHAIN_HEAD = struct.Struct("<QdQ")
"""Number, time and length of the commands: it separates the commands from the events that follow them."""


class PolicyFacts(Item, frozen=True, kw_only=True):
    """What the audit must know about a policy's table."""

    group_size: int
    min_group_size: int
    groups_per_batch: int
    staleness_bound: int
    """Inclusive."""
    num_steps: int
    max_replayed: int = 0
    """Groups of earlier steps that a batch may hold."""
    max_uses: int = 1
    """Steps that may hold the same group."""


class PlanRow(Item, frozen=True, kw_only=True):
    """What the run was told when the dataflow started: records after the one it names obey it."""

    recipe: str
    """Resolved recipe, JSON text."""
    policies: dict[str, PolicyFacts]
    schedule: Schedule | None = None
    """None in plans of versions that could not change it; the recipe says then what it was."""


class PlanEntry(Item, frozen=True, array_like=True):
    """A plan in the log: a row of the table `plans`, and the run that the journal belongs to."""

    run_id: str
    seq: int
    at_s: float
    plan: bytes


class Record(NamedTuple):
    """One row of the log. Commands and events stay encoded until somebody asks for them."""

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


# --- commands and events --------------------------------------------------------------------------


def encode_command(command: Command) -> msgspec.Raw:
    """A command in the form that `encode_commands` takes too. Raises: one of `UNWRITABLE`."""
    return msgspec.Raw(_ENCODER.encode(command))


def encode_commands(commands: Sequence[Command | msgspec.Raw]) -> bytes:
    """The commands of one record as they are stored."""
    return _ENCODER.encode(commands)


def encode_events(events: Sequence[Sequence[Event]]) -> bytes:
    """The events of each command of one record as they are stored."""
    return _ENCODER.encode(events)


def decode_commands(record: Record) -> tuple[Command, ...]:
    """The commands of a record. Raises: JournalError."""
    try:
        return _COMMANDS.decode(record.commands)
    except msgspec.DecodeError as err:
        raise JournalError(f"journal record {record.seq}: its command cannot be read: {err}") from err


def decode_events(record: Record) -> tuple[tuple[Event, ...], ...]:
    """The events of each command of a record. Raises: JournalError."""
    try:
        return _EVENTS.decode(record.events)
    except msgspec.DecodeError as err:
        raise JournalError(f"journal record {record.seq}: its events cannot be read: {err}") from err


# --- records --------------------------------------------------------------------------------------


def encode_records(records: Sequence[Record]) -> bytes:
    """Records as one entry of the log."""
    return _ENCODER.encode(records)


def decode_records(data: bytes) -> list[Record]:
    """The records of one entry of the log. Raises: JournalError."""
    try:
        return _RECORDS.decode(data)
    except msgspec.DecodeError as err:
        raise JournalError(f"records in the journal's segments cannot be read: {err}") from err


def chain_of(previous: bytes, record: Record) -> bytes:
    """xxh3-128 over the previous record's chain and this record's content."""
    head = _CHAIN_HEAD.pack(record.seq, record.at_s, len(record.commands))
    return xxhash.xxh3_128_digest(b"".join((previous, head, record.commands, record.events)))


def records_following(newest: tuple[int, bytes], entries: Iterable[bytes]) -> Iterator[Record]:
    """The records in entries of the log that come after the newest known one.

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


# --- plans ----------------------------------------------------------------------------------------


def encode_plan(entry: PlanEntry) -> bytes:
    """A plan as an entry of the log."""
    return _ENCODER.encode(entry)


def decode_plan(data: bytes) -> PlanEntry:
    """The plan of an entry of the log. Raises: JournalError."""
    try:
        return _PLAN_ENTRIES.decode(data)
    except msgspec.DecodeError as err:
        raise JournalError(f"a plan in the journal's segments cannot be read: {err}") from err


class _RecipeOfEvaluation(msgspec.Struct):
    """The part of a recipe that a schedule is made of; other keys are passed over."""

    eval: EvalPlan


def schedule_of(plan: PlanRow) -> Schedule:
    """The schedule that a plan of the log tells. Raises: JournalError if it is in neither place."""
    if plan.schedule is not None:
        return plan.schedule
    steps = {name: facts.num_steps for name, facts in plan.policies.items()}
    try:
        recipe = msgspec.json.decode(plan.recipe, type=_RecipeOfEvaluation)
    except msgspec.DecodeError as err:
        raise JournalError(f"a plan in the journal does not say what is evaluated: {err}") from err
    return Schedule(steps, recipe.eval)
