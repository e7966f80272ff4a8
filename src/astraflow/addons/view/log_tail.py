"""Follows the log of a live or damaged journal as far as it can be read, for people who look at a run.

The journal's `LogReader` fails if the log is damaged, because audits and restarts need all of it. `LogTail`
goes through the same entries (`SegmentScan`), but it continues after damage and reports what it left out, and
its next reading continues where the last one stopped.

A live journal grows while it is read. If an entry is incomplete and no complete one follows, either it is
still being written or a crash cut it off. The next reading starts there again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from astraflow.dataflow.journal.segments import (
    ENTRY_HEAD,
    PAYLOAD,
    SEGMENT_HEADER,
    SEGMENT_SCHEMA,
    SegmentScan,
    open_segment,
    segment_numbers,
    segment_path,
)
from astraflow.errors import JournalError

__all__ = ["LogEntry", "LogGap", "LogTail", "Position", "entry_at"]

Position = tuple[int, int]
"""(segment, offset in bytes)."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """The records of one flush, or a plan."""

    kind: int
    """`RECORDS` or `PLAN`."""
    data: bytes
    begin: Position


@dataclass(frozen=True, slots=True)
class LogGap:
    """Bytes that can't be read although the bytes after them can."""

    path: Path
    begin: int
    reason: str

    @property
    def text(self) -> str:
        """A message for people: `00000000.seg: damaged from byte 4711 on; what lies there is not shown`."""
        return f"{self.path.name}: {self.reason} from byte {self.begin} on; what lies there is not shown"


class LogTail:
    """Reads the log from a place; each call continues where the previous one stopped.

    Example: `for entry in LogTail(folder, (0, 0)).read()`.
    """

    def __init__(self, folder: Path, place: Position) -> None:
        """Starts at `place` in `folder`, which contains the segments."""
        self._folder = folder
        self.place: Position = place
        """Everything before this place was read or can't be read."""
        self._stuck: tuple[Position, int] | None = None
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
        for number in numbers:
            if number > self.place[0]:  # the next one, or compaction has dropped earlier ones
                self.place = (number, 0)
            path = segment_path(self._folder, number)
            if not path.is_file():
                yield LogGap(path, 0, "not a file")
                continue
            with path.open("rb") as file:
                yield from self._read_segment(path, file, is_last=number == numbers[-1])

    def _read_segment(self, path: Path, file: BinaryIO, *, is_last: bool) -> Iterator[LogEntry | LogGap]:
        number, begin = self.place
        scan = SegmentScan(path, file, number, begin=begin, skips_payloads=True)
        if (self.place, scan.size) == self._stuck:
            return
        try:
            yield from self._read_entries(scan)
            while scan.end not in {0, scan.size}:
                # The length of a skipped payload may be wrong, so what follows the last records is searched.
                begin = max(self.place[1], SEGMENT_HEADER.size)
                offset = next(scan.find_records(begin), scan.size)
                if offset == scan.size and is_last:
                    self._stuck = (self.place, scan.size)
                    return
                self.place = (number, offset)
                scan.end = offset
                yield LogGap(path, begin, "damaged")
                yield from self._read_entries(scan)
        except JournalError:  # its header is wrong
            self.place = (number, scan.size)
            yield LogGap(path, 0, f"not a segment of schema {SEGMENT_SCHEMA}")

    def _read_entries(self, scan: SegmentScan) -> Iterator[LogEntry]:
        number = self.place[0]
        for kind, data in scan.entries():
            if kind != PAYLOAD:
                self.place = (number, scan.end)
                yield LogEntry(kind, data, (number, scan.end - len(data) - ENTRY_HEAD.size))


def entry_at(folder: Path, place: Position) -> LogEntry | None:
    """Returns the entry that begins at a place; None if it is gone or damaged."""
    number, offset = place
    path = segment_path(folder, number)
    try:
        with open_segment(path) as file:
            scan = SegmentScan(
                path, file, number, begin=max(offset, SEGMENT_HEADER.size), skips_payloads=True
            )
            kind, data = next(scan.entries(), (PAYLOAD, b""))
    except OSError:
        return None
    return None if kind == PAYLOAD else LogEntry(kind, data, place)
