"""Forges the log of a journal folder: other records or plans, whose entries are whole."""

from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from astraflow.dataflow.audit import AuditReport, audit
from astraflow.dataflow.core.commands import Event
from astraflow.dataflow.core.plan import EvalPlan, Schedule
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import (
    PlanEntry,
    Record,
    RecordedPlan,
    chain_of,
    decode_events,
    encode_events,
    encode_plan,
    encode_records,
)
from astraflow.dataflow.journal.segments import (
    ENTRY_HEAD,
    PAYLOAD,
    PLAN,
    RECORDS,
    SEGMENT_HEADER,
    segment_numbers,
    segment_path,
)


def plan_of(recipe: str = "{}") -> RecordedPlan:
    """The plan of a run without policies."""
    return RecordedPlan(
        recipe=recipe,
        policies={},
        schedule=Schedule(steps={}, eval=EvalPlan(sets={}, every=1, deadline_s=60.0)),
    )


def replace_records(folder: Path, records: Sequence[Record]) -> None:
    """Lets the log consist of these records."""
    _replace(folder / "segments", RECORDS, [encode_records([record]) for record in records])


def replace_plans(folder: Path, plans: Sequence[PlanEntry]) -> None:
    """Lets the log hold these plans."""
    _replace(folder / "segments", PLAN, [encode_plan(plan) for plan in plans])


def rewrite_events(folder: Path, change: Callable[[Event], tuple[Event, ...]]) -> AuditReport:
    """Changes events and mends the chain after them, as a careful forger would. Returns the audit."""
    with JournalReader(folder) as reader:
        records = list(reader.records())
    chain = b""
    forged: list[Record] = []
    for record in records:
        events = [[new for event in led_to for new in change(event)] for led_to in decode_events(record)]
        record = record._replace(events=encode_events(events))
        chain = chain_of(chain, record)
        forged.append(record._replace(chain=chain))
    replace_records(folder, forged)
    return audit(folder)


def _replace(segments: Path, kind: int, entries: Sequence[bytes]) -> None:
    """The old entries become payloads to which nothing refers, and the new ones come last: nothing moves."""
    numbers = segment_numbers(segments)
    for number in numbers:
        path = segment_path(segments, number)
        data = bytearray(path.read_bytes())
        offset = SEGMENT_HEADER.size
        while offset < len(data):
            length, found, _ = ENTRY_HEAD.unpack_from(data, offset)
            end = offset + ENTRY_HEAD.size + length
            if found == kind:
                data[offset:end] = _entry(PAYLOAD, bytes(data[offset + ENTRY_HEAD.size : end]))
            offset = end
        if number == numbers[-1]:
            data += b"".join(_entry(kind, entry) for entry in entries)
        path.write_bytes(data)


def _entry(kind: int, data: bytes) -> bytes:
    return ENTRY_HEAD.pack(len(data), kind, xxhash.xxh3_64_intdigest(data, kind)) + data
