"""Reads the log of a journal folder: all of it (`LogReader`), or as far as possible (`LogTail`).

`LogReader` fails if the log is damaged, because audits and restarts need all of it. `LogTail` is for people
who look at a run: it continues after damage and reports what it left out, and its next reading continues
where the last one stopped. Both go through the entries with `SegmentScan`, and neither reads payloads.

A live journal grows while it is read. If an entry is incomplete and no complete one follows, either it is
still being written or a crash cut it off. The next reading of a `LogTail` starts there again.
"""

import itertools
import os
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
    as_journal_error,
    damage_at,
    missing_segment,
    open_segment,
    segment_numbers,
    segment_path,
)
from astraflow.errors import JournalError

__all__ = ["LogEntry", "LogGap", "LogReader", "LogTail", "Position", "entry_at"]

Position = tuple[int, int]
"""(segment, offset in bytes)."""


class LogReader:
    """Reads the records and plans in the segments from a number on, as they are when it is opened.

    Payloads are skipped unread. The segments stay open, so compaction may delete them meanwhile.
    """

    def __init__(self, folder: Path, first: int) -> None:
        """Raises: JournalError if a segment is missing, or cannot be opened."""
        self._files: dict[int, BinaryIO] = {}
        self._sizes: dict[int, int] = {}
        self._entries: list[tuple[int, int, int, int]] = []
        """(kind, segment, offset, length) of each entry that was found so far."""
        self._folder = folder
        self._found = self._find_entries()
        self._error: JournalError | None = None
        numbers = [number for number in segment_numbers(folder) if number >= first]
        try:
            for number in range(first, max(numbers, default=-1) + 1):
                if number not in numbers:
                    raise missing_segment(segment_path(folder, number))
                file = open_segment(segment_path(folder, number))
                self._files[number] = file
                self._sizes[number] = os.fstat(file.fileno()).st_size
        except OSError as err:
            self.close()
            raise as_journal_error(folder, err) from err

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def entries(self, kind: int) -> Iterator[bytes]:
        """The entries of one kind, in order. Raises: JournalError if the log is damaged."""
        for idx in itertools.count():
            if idx == len(self._entries) and not self._find_next():
                return
            entry_kind, segment, offset, length = self._entries[idx]
            if entry_kind == kind:
                yield os.pread(self._files[segment].fileno(), length, offset)

    def _find_next(self) -> bool:
        """Adds the next entry to `_entries`, for all callers of `entries`. Returns whether there is one."""
        if self._error is not None:
            raise self._error
        try:
            return next(self._found, False)
        except OSError as err:
            self._error = as_journal_error(self._folder, err)
            raise self._error from err

    def _find_entries(self) -> Iterator[bool]:
        for number, file in self._files.items():
            path = segment_path(self._folder, number)
            scan = SegmentScan(path, file, number, size=self._sizes[number], skips_payloads=True)
            for kind, data in scan.synced_entries():
                if kind != PAYLOAD:
                    self._entries.append((kind, number, scan.end - len(data), len(data)))
                    yield True
            if number + 1 in self._files and scan.end != max(self._sizes[number], SEGMENT_HEADER.size):
                raise damage_at(path, scan.end)


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
        number, offset = self.place
        scan = SegmentScan(path, file, number, begin=offset, skips_payloads=True)
        if (self.place, scan.size) == self._stuck:
            return
        while True:
            try:
                for kind, data in scan.entries():
                    if kind != PAYLOAD:
                        offset = scan.end
                        self.place = (number, offset)
                        yield LogEntry(kind, data, (number, offset - len(data) - ENTRY_HEAD.size))
            except JournalError:  # its header is wrong
                self.place = (number, scan.size)
                yield LogGap(path, 0, f"not a segment of schema {SEGMENT_SCHEMA}")
                return
            if scan.end in {0, scan.size}:
                return
            # The length of a skipped payload may be wrong, so what follows the last records is searched.
            begin = max(offset, SEGMENT_HEADER.size)
            offset = next(scan.find_records(begin), -1)
            if offset < 0 and is_last:
                self._stuck = (self.place, scan.size)
                return
            self.place = (number, offset if offset >= 0 else scan.size)
            yield LogGap(path, begin, "damaged")
            if offset < 0:
                return
            scan.end = offset


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
