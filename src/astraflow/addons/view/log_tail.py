"""Follows the journal's log as far as it can be read, for people who look at a run, not for the run itself.

Opening or auditing a journal fails if the journal is damaged. A viewer, however, shows everything that is
still intact: `LogTail` continues after damage and reports what it left out. It skips payloads without reading
them; each payload is checked when somebody requests it.

A live journal grows while it is read. If an entry is incomplete and no complete one follows, either it is
still being written or a crash cut it off. The next reading starts there again.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from astraflow.dataflow.journal.segments import (
    ENTRY_HEAD,
    PAYLOAD,
    PLAN,
    RECORDS,
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    SEGMENT_SCHEMA,
    open_segment,
    segment_numbers,
    segment_path,
)

__all__ = ["LogEntry", "LogGap", "LogTail", "Place", "entry_at"]

Place = tuple[int, int]
"""(segment, offset in bytes)."""

_WINDOW_BYTES = 1024 * 1024
"""Bytes per read. The window contains small payloads; large payloads are skipped without reading them."""
_SEARCH_BYTES = 4 * 1024 * 1024
"""Bytes per read while searching for complete records after damage."""
_LIST_OF_RECORDS = re.compile(rb"(?:[\x90-\x9f]|\xdc..|\xdd....)\x95", re.DOTALL)
"""How a list of records begins in msgpack: a list whose first item is a list of five items.

Most bytes that look like the head of an entry are followed by something else. This check rejects them without
a checksum over megabytes.
"""
_PEEK_BYTES = 6
_KIND_AT = 4
"""Number of bytes of an entry before its kind."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """The records of one flush, or a plan."""

    kind: int
    """`RECORDS` or `PLAN`."""
    data: bytes
    begin: Place
    end: Place
    """Where the next entry begins."""


@dataclass(frozen=True, slots=True)
class LogGap:
    """Bytes that can't be read although the bytes after them can."""

    path: Path
    begin: int
    reason: str
    end: Place

    @property
    def text(self) -> str:
        """A message for people: `journal/segments/00000000.seg: damaged from byte 4711 on (...)`."""
        return f"{self.path.name}: {self.reason} from byte {self.begin} on; what lies there is not shown"


class LogTail:
    """Reads the log from a place; each call continues where the previous one stopped.

    Example: `for entry in LogTail(folder, (0, 0)).read()`.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        """Starts at `place` in `folder`, which contains the segments."""
        self._folder = folder
        self.place = place
        """Everything before this place was read or can't be read."""
        self._stuck: tuple[Place, int] | None = None
        """Where the last reading ended at an incomplete entry, and the segment's size then, in bytes."""

    @property
    def is_ahead(self) -> bool:
        """Whether the log ends before the place: it was truncated, or isn't the log that was read before."""
        segment, offset = self.place
        numbers = segment_numbers(self._folder)
        if not numbers:
            return offset > 0
        if segment not in numbers:
            return segment > numbers[-1]
        return segment_path(self._folder, segment).stat().st_size < offset

    def read(self) -> Iterator[LogEntry | LogGap]:
        """Yields the complete entries from `place` on and advances `place`. Raises: OSError."""
        numbers = [number for number in segment_numbers(self._folder) if number >= self.place[0]]
        if numbers and numbers[0] > self.place[0]:
            # Compaction drops entire segments, oldest first.
            self.place = (numbers[0], 0)
        for idx, number in enumerate(numbers):
            if number > self.place[0]:
                self.place = (number, 0)
            is_last = idx + 1 == len(numbers)
            yield from self._of_segment(segment_path(self._folder, number), is_last=is_last)

    def _of_segment(self, path: Path, *, is_last: bool) -> Iterator[LogEntry | LogGap]:
        number, offset = self.place
        if not path.is_file():
            yield LogGap(path, 0, "not a file", (number, 0))
            return
        with path.open("rb") as file:
            window = _Window(file)
            if offset == 0 and window.size >= SEGMENT_HEADER.size:
                offset = SEGMENT_HEADER.size
                magic, schema, _ = SEGMENT_HEADER.unpack(window.bytes_at(0, offset))
                if magic != SEGMENT_MAGIC or schema != SEGMENT_SCHEMA:
                    self.place = (number, window.size)
                    yield LogGap(path, 0, f"not a segment of schema {SEGMENT_SCHEMA}", self.place)
                    return
            if (self.place, window.size) == self._stuck:
                return
            while True:
                self.place = (number, offset)
                entry = window.next_entry(number, offset)
                if entry is not None:
                    offset = entry.end[1]
                    self.place = entry.end
                    yield entry
                    continue
                if window.is_read_up:
                    return
                begin = offset
                offset = window.whole_records_after(begin)
                if offset < 0 and is_last:
                    self._stuck = (self.place, window.size)
                    return
                self.place = (number, offset if offset >= 0 else window.size)
                yield LogGap(path, begin, "damaged", self.place)
                if offset < 0:
                    return


class _Window:
    """A segment, part of which is in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, 2)
        """Size when the segment was opened, in bytes. Later bytes are ignored."""
        self.is_read_up = False
        """Whether the last `next_entry` reached the end of the segment rather than an incomplete entry."""
        self._begin = 0
        self._data = b""

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Returns `length` bytes, or fewer at the end of the segment."""
        first = offset - self._begin
        if first < 0 or first + length > len(self._data):
            self._file.seek(offset)
            self._data = self._file.read(max(length, _WINDOW_BYTES))
            self._begin = offset
            first = 0
        return self._data[first : first + length]

    def next_entry(self, number: int, offset: int) -> LogEntry | None:
        """Returns the first entry from `offset` on that isn't a payload; None if there is no complete one."""
        head_bytes = ENTRY_HEAD.size
        while offset + head_bytes <= self.size:
            length, kind, checksum = ENTRY_HEAD.unpack(self.bytes_at(offset, head_bytes))
            end = offset + head_bytes + length
            if kind > PLAN or end > self.size:
                self.is_read_up = False
                return None
            if kind != PAYLOAD:
                data = self.bytes_at(offset + head_bytes, length)
                if xxhash.xxh3_64_intdigest(data, kind) != checksum:
                    self.is_read_up = False
                    return None
                return LogEntry(kind, data, (number, offset), (number, end))
            offset = end
        self.is_read_up = offset == self.size
        return None

    def whole_records_after(self, offset: int) -> int:
        """Returns the offset of the first complete entry of records from `offset` on; -1 if there is none."""
        for begin in range(offset, self.size, _SEARCH_BYTES):
            # The pieces overlap by one head, for an entry that begins at the end of a piece.
            piece = os.pread(self._file.fileno(), _SEARCH_BYTES + ENTRY_HEAD.size, begin)
            kind_at = piece.find(RECORDS, _KIND_AT)
            while 0 <= kind_at < len(piece) - (ENTRY_HEAD.size - _KIND_AT):
                place = kind_at - _KIND_AT
                if self._are_records(begin + place, piece[place : place + ENTRY_HEAD.size]):
                    return begin + place
                kind_at = piece.find(RECORDS, kind_at + 1)
        return -1

    def _are_records(self, offset: int, head: bytes) -> bool:
        """Checks whether this head at this offset belongs to a complete entry of records."""
        length, kind, checksum = ENTRY_HEAD.unpack(head)
        first = offset + ENTRY_HEAD.size
        if not 0 < length <= self.size - first or not _LIST_OF_RECORDS.match(
            os.pread(self._file.fileno(), _PEEK_BYTES, first)
        ):
            return False
        data = os.pread(self._file.fileno(), length, first)
        return xxhash.xxh3_64_intdigest(data, kind) == checksum


def entry_at(folder: Path, place: Place) -> LogEntry | None:
    """Returns the entry that begins at a place; None if it is gone or damaged."""
    number, offset = place
    try:
        with open_segment(segment_path(folder, number)) as file:
            entry = _Window(file).next_entry(number, offset)
    except OSError:
        return None
    return entry if entry is not None and entry.begin == place else None
