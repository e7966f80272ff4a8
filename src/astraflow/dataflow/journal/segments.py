"""The journal's append-only files: encoded trajectories, messages and the log of records.

A segment is a file `NNNNNNNN.seg`. When it reaches a certain size, the next one starts. It consists of a
16-byte header (magic, schema version, number) and entries. An entry consists of a 13-byte head (length, kind,
xxh3-64) and its bytes: a payload, the records of one flush, or a plan. A `PayloadRef` points to a payload's
bytes.

`append` assigns positions in memory; `write` writes what was appended to disk, in order, and syncs it. Synced
bytes never change. A torn end (a crash interrupted a write) is cut off when the store is opened. Damage
before the newest flush is an error, for which `verify_segments` checks all kept segments. Every read compares
checksums.


Threads: `append` and `take` belong to the event loop, `write` to the one thread that flushes, `read` to
anyone once the bytes are written.
"""

import itertools
import os
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import xxhash

from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.journal.records import decode_records
from astraflow.errors import JournalError

__all__ = [
    "ENTRY_HEAD",
    "PAYLOAD",
    "PLAN",
    "RECORDS",
    "SEGMENT_BYTES",
    "SEGMENT_HEADER",
    "SEGMENT_MAGIC",
    "SEGMENT_SCHEMA",
    "LogReader",
    "PendingWrite",
    "SegmentReader",
    "SegmentScan",
    "SegmentStore",
    "open_segment",
    "segment_numbers",
    "segment_path",
    "verify_segments",
]

SEGMENT_SCHEMA = 2
SEGMENT_BYTES = 256 * 1024 * 1024
"""Size at which the next segment starts. Space is freed by whole segments, so they must not be too large.
Each is an open file of a reader, so they must not be too many."""
SEGMENT_HEADER = struct.Struct("<4sHxxQ")
"""Magic, schema and number at the beginning of a segment."""
SEGMENT_MAGIC = b"AFSG"
ENTRY_HEAD = struct.Struct("<IBQ")
"""Length, kind and checksum, which precede the bytes of an entry."""
_LENGTH_BYTES = 4
"""Bytes of an entry that precede its kind."""
PAYLOAD = 0
RECORDS = 1
PLAN = 2
"""The largest number of the three kinds of entries."""
_MAX_BUFFERS = 512
"""Buffers in one vectored write. The kernel's limit is 1024."""
_MAX_WRITE_BYTES = 512 * 1024
"""For larger writes, Linux uses pages of up to 2 MiB, which it must find first: 10 times slower."""
_GAP_BYTES = 16 * 1024
"""Payloads with at most this gap are read at once, which is cheaper than another call."""
_RUN_BYTES = 16 * 1024 * 1024
"""Largest read."""
_SMALL_BYTES = 4096
"""Buffers of a smaller average size are joined before they are written."""
_WINDOW_BYTES = 64 * 1024
"""Bytes that are read at once, entry by entry."""
_SEARCH_BYTES = 4 * 1024 * 1024
"""Bytes that are read at once in search of intact records after damage."""
_LIST_OF_RECORDS = re.compile(rb"(?:[\x90-\x9f]|\xdc..|\xdd....)\x95", re.DOTALL)
"""How a list of records begins in msgpack: a list whose first item is a list of five items. Other bytes that
look like the head of an entry are rejected by this, without a checksum over megabytes."""
_PEEK_BYTES = 6


@dataclass(slots=True)
class PendingWrite:
    """Contiguous bytes that have a position in a segment but are not on disk yet."""

    segment: int
    offset: int
    buffers: list[bytes] = field(default_factory=list[bytes])


def segment_path(folder: Path, segment: int) -> Path:
    """The file of a segment."""
    return folder / f"{segment:08d}.seg"


class SegmentReader:
    """Reads payloads. Keeps one open file per segment. Also works on the live journal of another process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    def read(self, ref: PayloadRef) -> bytes:
        """The payload at `ref`. Raises: JournalError if it is missing or its checksum is wrong."""
        return bytes(self.read_all((ref,))[0])

    def read_all(self, refs: Sequence[PayloadRef]) -> list[memoryview]:
        """The payloads in the order of `refs`. Neighbors on disk are read at once. Raises: like `read`."""
        order = sorted(range(len(refs)), key=lambda idx: (refs[idx].segment, refs[idx].offset))
        payloads: dict[int, memoryview] = {}
        run: list[int] = []
        for idx in order:
            if run:
                first = refs[run[0]]
                last = refs[run[-1]]
                gap = refs[idx].offset - last.offset - last.length
                size = refs[idx].offset + refs[idx].length - first.offset
                if refs[idx].segment != first.segment or gap > _GAP_BYTES or size > _RUN_BYTES:
                    self._read_run(refs, run, payloads)
                    run = []
            run.append(idx)
        if run:
            self._read_run(refs, run, payloads)
        return [payloads[idx] for idx in range(len(refs))]

    def _read_run(self, refs: Sequence[PayloadRef], run: list[int], into: dict[int, memoryview]) -> None:
        """Reads the neighbors `run` (indices in `refs`) at once, into `into` by index."""
        first = refs[run[0]]
        last = refs[run[-1]]
        start = first.offset - ENTRY_HEAD.size
        try:
            raw = memoryview(os.pread(self._file(first.segment), last.offset + last.length - start, start))
        except OSError as err:
            raise JournalError(f"{segment_path(self._folder, first.segment)}: cannot be read: {err}") from err
        for idx in run:
            ref = refs[idx]
            begin = ref.offset - start
            data = raw[begin : begin + ref.length]
            is_whole = begin + ref.length <= len(raw)
            if not is_whole or ENTRY_HEAD.unpack_from(raw, begin - ENTRY_HEAD.size) != _make_head(
                PAYLOAD, data
            ):
                path = segment_path(self._folder, ref.segment)
                raise JournalError(
                    f"{path}: the payload of {ref.length} bytes at {ref.offset} "
                    "is damaged (checksum or length is wrong); restore the file from a copy"
                )
            into[idx] = data

    def close(self) -> None:
        """Closes all files."""
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files.clear()

    def forget(self, segment: int) -> None:
        """Closes one file."""
        with self._lock:
            if (file := self._files.pop(segment, None)) is not None:
                os.close(file)

    def _file(self, segment: int) -> int:
        with self._lock:
            if segment not in self._files:
                path = segment_path(self._folder, segment)
                self._files[segment] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # doesn't wait at a pipe
            return self._files[segment]


class SegmentStore:
    """The writing side. Example: `ref = store.append(b"..."); store.write(store.take())`."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Opens or creates the folder, and cuts off a torn end. Raises: JournalError."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._pending: list[PendingWrite] = []
        self._file = -1
        """The file that is being written; -1 if none is open."""
        self._file_segment = -1
        """The number of its segment."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            numbers = segment_numbers(folder)
            self._segment = numbers[-1] if numbers else 0
            self._offset = _cut_torn_end(segment_path(folder, self._segment), self._segment) if numbers else 0
        except OSError as err:
            raise JournalError(f"{folder}: cannot be opened: {err}") from err
        self._has_header = self._offset >= SEGMENT_HEADER.size
        self._offset = max(self._offset, SEGMENT_HEADER.size)
        self._reader = SegmentReader(folder)

    @property
    def end(self) -> tuple[int, int]:
        """Segment and offset of the next entry."""
        return self._segment, self._offset

    def append(self, payload: bytes) -> PayloadRef:
        """Assigns a payload its position. It is on disk once the result of the next `take` is written."""
        offset = self.add(PAYLOAD, payload)
        return PayloadRef(self._segment, offset, len(payload))

    def take(self) -> list[PendingWrite]:
        """Returns what was appended since the last call, in order."""
        pending = self._pending
        self._pending = []
        return pending

    def write(self, writes: Sequence[PendingWrite]) -> None:
        """Writes and syncs. After a failure, the same list may be written again. Raises: OSError."""
        for idx, write in enumerate(writes):
            self._open_for_writing(write.segment)
            _write_buffers(self._file, write)
            if idx + 1 == len(writes) or writes[idx + 1].segment != write.segment:
                os.fdatasync(self._file)

    def read_all(self, refs: Sequence[PayloadRef]) -> list[memoryview]:
        """Written payloads in the order of `refs`. Raises: JournalError."""
        return self._reader.read_all(refs)

    def drop(self, first: int) -> None:
        """Deletes the segments before `first`, which must no longer be needed. Raises: OSError."""
        for segment in [
            number for number in segment_numbers(self._folder) if number < min(first, self._segment)
        ]:
            self._reader.forget(segment)
            segment_path(self._folder, segment).unlink()

    def close(self) -> None:
        """Closes all files without writing anything."""
        self._reader.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._file_segment = -1

    def add(self, kind: int, data: bytes) -> int:
        """Appends an entry: a payload, records (after the payloads to which they refer), or a plan.

        Returns the offset of its bytes.
        """
        size = ENTRY_HEAD.size + len(data)
        if self._offset + size > self._segment_bytes and self._offset > SEGMENT_HEADER.size:
            self._segment += 1
            self._offset = SEGMENT_HEADER.size
            self._has_header = False
        if not self._has_header:
            header = SEGMENT_HEADER.pack(SEGMENT_MAGIC, SEGMENT_SCHEMA, self._segment)
            self._pending.append(PendingWrite(self._segment, 0, [header]))
            self._has_header = True
        elif not self._pending:
            self._pending.append(PendingWrite(self._segment, self._offset))
        self._pending[-1].buffers += (ENTRY_HEAD.pack(*_make_head(kind, data)), data)
        self._offset += size
        return self._offset - len(data)

    def _open_for_writing(self, segment: int) -> None:
        if self._file_segment == segment:
            return
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._file_segment = -1
        self._file = os.open(segment_path(self._folder, segment), os.O_RDWR | os.O_CREAT, 0o644)
        self._file_segment = segment
        # Otherwise, a power loss could remove the name of a file whose bytes are synced.
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _make_head(kind: int, data: bytes | memoryview) -> tuple[int, int, int]:
    """Length, kind and checksum of an entry. The checksum covers the kind too."""
    return len(data), kind, xxhash.xxh3_64_intdigest(data, kind)


def _write_buffers(file: int, write: PendingWrite) -> None:
    """Writes all buffers, in as many calls as the limits require. Raises: OSError."""
    buffers = write.buffers
    position = write.offset
    if sum(map(len, buffers)) < len(buffers) * _SMALL_BYTES:
        buffers = [b"".join(buffers)]
    for part in _split_buffers(buffers):
        rest = part
        while rest:
            written = os.pwritev(file, rest, position)
            position += written
            rest = _drop_written(rest, written)


def _split_buffers(buffers: Sequence[bytes]) -> Iterator[list[memoryview]]:
    """Splits the buffers, in order, into pieces for one write each."""
    part: list[memoryview] = []
    room = _MAX_WRITE_BYTES
    for buffer in map(memoryview, buffers):
        first = 0
        while first < len(buffer):
            piece = buffer[first : first + room]
            part.append(piece)
            first += len(piece)
            room -= len(piece)
            if room == 0 or len(part) == _MAX_BUFFERS:
                yield part
                part = []
                room = _MAX_WRITE_BYTES
    if part:
        yield part


def _drop_written(buffers: list[memoryview], written: int) -> list[memoryview]:
    """The buffers that remain after a vectored write of `written` bytes."""
    for idx, buffer in enumerate(buffers):
        if written < len(buffer):
            return [buffer[written:], *buffers[idx + 1 :]]
        written -= len(buffer)
    return []


def verify_segments(folder: Path, first: int) -> tuple[int, int]:
    """Reads every segment from number `first` on. Returns segment and offset after the last intact entry.

    Raises: JournalError if one is missing or damaged. The remains of a crash after the last flush are not
    damage.
    """
    try:
        numbers = [number for number in segment_numbers(folder) if number >= first]
        if not numbers:
            return first, SEGMENT_HEADER.size
        for number in range(first, numbers[-1]):
            path = segment_path(folder, number)
            if number not in numbers:
                raise JournalError(f"{path} is missing; restore the file from a copy")
            end = _find_whole_end(path, number)
            if end == 0 or end != path.stat().st_size:
                raise JournalError(f"{path}: the entry at {end} is damaged; restore the file from a copy")
        return numbers[-1], max(
            SEGMENT_HEADER.size, _find_whole_end(segment_path(folder, numbers[-1]), numbers[-1])
        )
    except OSError as err:
        raise _as_journal_error(folder, err) from err


def _as_journal_error(folder: Path, error: OSError) -> JournalError:
    """The error for segments that cannot be read. A JournalError, which is an OSError, stays as it is."""
    return error if isinstance(error, JournalError) else JournalError(f"{folder}: cannot be read: {error}")


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
                    path = segment_path(folder, number)
                    raise JournalError(f"{path} is missing; restore the file from a copy")
                file = open_segment(segment_path(folder, number))
                self._files[number] = file
                self._sizes[number] = os.fstat(file.fileno()).st_size
        except OSError as err:
            self.close()
            raise _as_journal_error(folder, err) from err

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
            self._error = _as_journal_error(self._folder, err)
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
                raise JournalError(
                    f"{path}: the entry at {scan.end} is damaged; restore the file from a copy"
                )


def segment_numbers(folder: Path) -> list[int]:
    """The numbers of the segments in a folder, in order."""
    return sorted(int(path.stem) for path in folder.glob("*.seg") if path.stem.isdecimal())


def open_segment(path: Path) -> BinaryIO:
    """Opens a segment for reading. Raises: OSError; JournalError if it isn't a file, for example a pipe."""
    if os.path.lexists(path) and not path.is_file():
        raise JournalError(f"{path} is not a file; restore it from a copy")
    return path.open("rb")


def _cut_torn_end(path: Path, segment: int) -> int:
    """Truncates a segment after its last intact entry. Returns its new length; 0 without an intact header."""
    end = _find_whole_end(path, segment)
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
            file.flush()
            os.fsync(file.fileno())
    return end


def _find_whole_end(path: Path, segment: int) -> int:
    """The end of the last intact entry of a segment; 0 if not even its header is complete.

    Raises: as `SegmentScan.synced_entries`.
    """
    with open_segment(path) as file:
        scan = SegmentScan(path, file, segment)
        for _ in scan.synced_entries():
            pass
    return scan.end


class SegmentScan:
    """Goes through the entries of a segment, from any of them on."""

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        segment: int,
        *,
        begin: int = 0,
        size: int | None = None,
        skips_payloads: bool = False,
    ) -> None:
        """`begin`: where an entry begins; 0 for the header. `size`: only so many bytes of the file count."""
        self._path = path
        self._file = file
        self._segment = segment
        self._skips_payloads = skips_payloads
        self.size = os.fstat(file.fileno()).st_size if size is None else size
        self.end = begin
        """Where the last intact entry ended; 0 if not even the header is complete."""
        self._begin = 0
        self._window = b""
        """Bytes of the file from `_begin` on."""

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """(kind, bytes) of each entry up to the first one that isn't intact. Skipped payloads have no bytes.

        Raises: JournalError if the file is no segment.
        """
        if self.end == 0:
            header = self._bytes_at(0, SEGMENT_HEADER.size)
            if len(header) < SEGMENT_HEADER.size:
                return
            self._check_header(header)
            self.end = SEGMENT_HEADER.size
        while (entry := self._entry_at(self.end)) is not None:
            kind, length, data = entry
            self.end += ENTRY_HEAD.size + length
            yield kind, data

    def synced_entries(self) -> Iterator[tuple[int, bytes]]:
        """The same. Raises: JournalError also if the bytes after the last intact entry were once intact too,
        so that they are damaged, not torn by a crash."""
        last_records = b""
        for kind, data in self.entries():
            if kind == RECORDS:
                last_records = data
            yield kind, data
        if self.end < self.size and self._was_synced(last_records):
            raise JournalError(
                f"{self._path}: the entry at {self.end} is damaged, and records that came later are whole; "
                "restore the file from a copy"
            )

    def find_records(self, first: int) -> Iterator[int]:
        """Where intact entries of records begin from an offset on. They may be at any offset, because the
        length of a broken entry is unknown."""
        head_bytes = ENTRY_HEAD.size
        for begin in range(first, self.size, _SEARCH_BYTES):
            # The pieces overlap by one head, for an entry that begins at the end of a piece.
            piece = os.pread(self._file.fileno(), _SEARCH_BYTES + head_bytes, begin)
            kind_at = piece.find(RECORDS, _LENGTH_BYTES)
            while 0 <= kind_at < len(piece) - (head_bytes - _LENGTH_BYTES):
                offset = begin + kind_at - _LENGTH_BYTES
                if offset + head_bytes <= self.size and self._are_records(offset):
                    yield offset
                kind_at = piece.find(RECORDS, kind_at + 1)

    def _are_records(self, offset: int) -> bool:
        """Checks whether an intact entry of records begins at an offset."""
        head = os.pread(self._file.fileno(), ENTRY_HEAD.size + _PEEK_BYTES, offset)
        length, kind, checksum = ENTRY_HEAD.unpack_from(head)
        offset += ENTRY_HEAD.size
        if not 0 < length <= self.size - offset or not _LIST_OF_RECORDS.match(head, ENTRY_HEAD.size):
            return False
        return xxhash.xxh3_64_intdigest(os.pread(self._file.fileno(), length, offset), kind) == checksum

    def _was_synced(self, last_records: bytes) -> bool:
        """Whether the bytes after a broken entry prove that the entry was synced once.

        They do if they contain a later flush, because a flush starts only after the previous one is synced. A
        flush ends with its records, in one entry. Two such entries therefore belong to two flushes. A single
        one belongs to a later flush if it does not continue the last intact records.
        """
        places = list(itertools.islice(self.find_records(self.end), 2))
        if len(places) == 1 and last_records:
            entry = self._entry_at(places[0])
            assert entry is not None  # it was read a moment ago, and written bytes never change
            return decode_records(entry[2])[0].seq > decode_records(last_records)[-1].seq + 1
        return len(places) > 1

    def _check_header(self, header: bytes) -> None:
        magic, schema, number = SEGMENT_HEADER.unpack(header)
        is_segment = magic == SEGMENT_MAGIC and number == self._segment
        if not is_segment or header != SEGMENT_HEADER.pack(magic, schema, number):
            raise JournalError(
                f"{self._path} is not segment {self._segment} of a journal; do not edit the journal folder"
            )
        if schema != SEGMENT_SCHEMA:
            raise JournalError(
                f"{self._path} has schema {schema}; this version reads schema {SEGMENT_SCHEMA}"
            )

    def _entry_at(self, offset: int) -> tuple[int, int, bytes] | None:
        """Kind, length and bytes of the entry at an offset; None if it isn't intact."""
        head = self._bytes_at(offset, ENTRY_HEAD.size)
        if len(head) < ENTRY_HEAD.size:
            return None
        length, kind, checksum = ENTRY_HEAD.unpack(head)
        offset += ENTRY_HEAD.size
        if offset + length > self.size or kind > PLAN:
            return None
        if kind == PAYLOAD and self._skips_payloads:
            return kind, length, b""
        data = self._bytes_at(offset, length)
        if len(data) < length or xxhash.xxh3_64_intdigest(data, kind) != checksum:
            return None
        return kind, length, data

    def _bytes_at(self, offset: int, length: int) -> bytes:
        """`length` bytes, or fewer at the end of the file."""
        first = offset - self._begin
        if first < 0 or first + length > len(self._window):
            self._window = os.pread(self._file.fileno(), max(length, _WINDOW_BYTES), offset)
            self._begin = offset
            first = 0
        return self._window[first : first + length]
