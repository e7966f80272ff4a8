"""The index of one run folder, which one process fills step by step from the journal.

    journal/segments  ->  episodes, groups, happenings, versions   (`Booker`)
    journal.sqlite    ->  which messages were kept, busy spans

The run folder is only read, except for its subfolder `view/`. If that folder isn't writable, the index is a
temporary file. Several processes may show the same run: the one that holds the lock fills the index, and all
of them read it.

Data that can't be read is left out, with a note. Damage in a run never raises an error here.
"""

import contextlib
import fcntl
import os
import sqlite3
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from astraflow.addons.view.advantages import Advantages
from astraflow.addons.view.booking import Booker
from astraflow.addons.view.groups import OpenGroups
from astraflow.addons.view.log_tail import LogEntry, LogGap, LogTail, Position, entry_at
from astraflow.addons.view.names import Names
from astraflow.addons.view.schema import INDEX_VERSION, create, open_to_fill, open_to_read
from astraflow.addons.view.tables_copy import TablesCopy
from astraflow.dataflow.journal.journal_db import DATABASE
from astraflow.dataflow.journal.reader import JournalTables
from astraflow.dataflow.journal.records import decode_plan, decode_records
from astraflow.dataflow.journal.segments import PLAN, RECORDS
from astraflow.errors import Error, JournalError
from astraflow.recipe.run_folder import RunFolder

__all__ = ["RunIndex", "run_id_of"]

_PAUSE_S = 0.2
"""Time between two checks of an index that another process is filling."""
_FLUSH_ROWS = 20_000
"""Number of rows per transaction."""


class RunIndex:
    """The index of a run folder.

    Example: `with RunIndex(Path("runs/quickstart")) as index: index.refresh(); index.reader()`.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = RunFolder(run_dir)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._own = self._place()
        self.path = self._own / "index.sqlite"
        self._filling: _Filling | None = None
        self.is_begun = False
        """Whether a `refresh` has returned. Before that, there is nothing to read."""

    def __enter__(self) -> "RunIndex":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the index and deletes it if it is temporary."""
        self._forget()
        if self._temporary is not None:
            self._temporary.cleanup()

    def reader(self) -> sqlite3.Connection:
        """Opens a connection that reads what is filled so far; close it after use. Raises: sqlite3.Error."""
        return open_to_read(self.path)

    def refresh(self, *, longest_s: float = float("inf")) -> bool:
        """Adds what is new and returns whether the index is complete.

        Returns False if `longest_s` was too short, or if another process is still filling the index.
        """
        try:
            return self._refresh_if_mine(time.monotonic() + longest_s)
        finally:
            self.is_begun = True

    def fill(self) -> None:
        """Fills the index completely, or waits until another process has."""
        while not self.refresh():
            time.sleep(_PAUSE_S)

    def _refresh_if_mine(self, deadline_s: float) -> bool:
        with self._lock() as is_mine:
            if not is_mine:
                self._forget()  # the other process changes the index, so the open one here becomes outdated
                return self.path.exists() and not self._is_behind()
            # A damaged or stale index is deleted and rebuilt. After two such attempts, the error is raised.
            for _ in range(2):
                try:
                    return self._refresh(deadline_s)
                except (sqlite3.DatabaseError, _StaleIndexError) as err:
                    self._forget()
                    code = getattr(err, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
                    if code & 0xFF in _TROUBLE:  # the machine is at fault rather than the index
                        raise
                    for ending in ("", "-wal", "-shm"):
                        Path(f"{self.path}{ending}").unlink(missing_ok=True)
            return self._refresh(deadline_s)

    def _refresh(self, deadline_s: float) -> bool:
        if self._filling is None:
            self._filling = _Filling(self.folder, self.path)
            if self._temporary is not None:
                self._filling.note("the run folder cannot be written, so the index is a temporary file")
        return self._filling.refresh(deadline_s)

    def _is_behind(self) -> bool:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self.reader()) as database:
            row = database.execute("SELECT value FROM meta WHERE key = 'is_complete'").fetchone()
            return row is None or row[0] != "1"
        return True

    def _forget(self) -> None:
        if self._filling is not None:
            self._filling.close()
            self._filling = None

    def _place(self) -> Path:
        """Returns the folder of the index: `view/` in the run folder or, if that isn't writable, a temporary
        folder."""
        own = self.folder.path / "view"
        try:
            own.mkdir(exist_ok=True)
            if os.access(own, os.W_OK | os.X_OK):
                return own
        except OSError:
            pass  # the folder is read-only, or belongs to another user
        self._temporary = tempfile.TemporaryDirectory(prefix="astraflow-view-")
        return Path(self._temporary.name)

    @contextmanager
    def _lock(self) -> Generator[bool]:
        """Tries to take the lock; yields whether this process may fill the index now."""
        # Opened for reading and writing, which doesn't block even if it is a pipe.
        with open(os.open(self._own / "lock", os.O_RDWR | os.O_CREAT, 0o644), "rb", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


class _StaleIndexError(Exception):
    """The index belongs to another version or run, or was made from another log."""


_TROUBLE = frozenset(
    [
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    ]
)
"""What a new index would meet as well, such as a full disk."""


class _Filling:
    """An index that is open for filling."""

    def __init__(self, folder: RunFolder, path: Path) -> None:
        self._folder = folder
        self._segments = folder.journal / "segments"
        self._database = open_to_fill(path)
        try:
            run_id = run_id_of(folder)
            if not self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                create(self._database, run_id)
            if self._meta("version") != str(INDEX_VERSION) or (run_id and self._meta("run_id") != run_id):
                raise _StaleIndexError
            self._tail = LogTail(self._segments, _place_of(self._meta("place")))
            self._check_place()
            groups = OpenGroups(self._database, partial(entry_at, self._segments))
            names = Names(self._database)
            self._booker = Booker(self._database, names, self._advantages(), groups)
            self._booker.last_seq = int(self._meta("last_seq") or 0)
            self._copy = TablesCopy(self._database, names, folder.journal)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        self._database.close()

    def note(self, text: str, source: str = "log") -> None:
        """Stores a line of text that the viewer shows with the run."""
        self._database.execute("INSERT OR IGNORE INTO notes VALUES (?, ?)", (text, source))

    def _note_now(self, source: str, texts: Sequence[str]) -> None:
        """Replaces the notes of a source.

        A problem may have been repaired, or may only have come from reading too early.
        """
        known = self._database.execute("SELECT text FROM notes WHERE source = ?", (source,)).fetchall()
        if {text for (text,) in known} != {*texts}:
            self._database.execute("DELETE FROM notes WHERE source = ?", (source,))
            for text in texts:
                self.note(text, source)

    def refresh(self, deadline_s: float) -> bool:
        """Adds what is new until the deadline; returns whether the index is complete."""
        is_complete = self._follow_log(deadline_s)
        if is_complete:
            self._note_now("tables", self._copy.take())
        if self._meta("is_complete") != str(int(is_complete)):
            self._set_meta("is_complete", str(int(is_complete)))
        return is_complete

    # --- the log ---

    def _follow_log(self, deadline_s: float) -> bool:
        start = self._tail.place
        first = start
        try:
            if self._tail.is_ahead:
                raise _StaleIndexError
            for item in self._tail.read():
                self._begin()
                self._take(item)
                first = item.begin if isinstance(item, LogEntry) else first
                if self._booker.num_waiting >= _FLUSH_ROWS:
                    self._flush(first)
                if time.monotonic() > deadline_s:
                    self._flush(first)
                    return False
        except OSError as err:
            self.note(f"the journal cannot be read: {err}")
        if self._tail.place != start or self._database.in_transaction:
            self._flush(first)
        return True

    def _take(self, item: LogEntry | LogGap) -> None:
        if isinstance(item, LogGap):
            self.note(item.text)
            return
        try:
            if item.kind == RECORDS:
                self._booker.book(item)
        except JournalError as err:
            self.note(f"records at byte {item.begin[1]} of segment {item.begin[0]} are left out: {err}")

    def _begin(self) -> None:
        """Begins a transaction, which `_flush` ends."""
        if not self._database.in_transaction:
            self._database.execute("BEGIN IMMEDIATE")

    def _flush(self, last_entry: Position) -> None:
        self._begin()
        try:
            self._booker.flush()
            self._set_meta("place", _text_of(self._tail.place))
            self._set_meta("last_entry", _text_of(last_entry))
            self._set_meta("last_seq", str(self._booker.last_seq))
            self._database.execute("COMMIT")
        finally:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def _check_place(self) -> None:
        """Checks that the log still has the last booked entry, unless compaction dropped its segment.

        Raises: _StaleIndexError.
        """
        last = _place_of(self._meta("last_entry"))
        is_kept = (self._segments / f"{last[0]:08d}.seg").exists()
        if last[1] > 0 and is_kept:
            entry = entry_at(self._segments, last)
            if entry is None or (entry.kind == RECORDS and self._seq_of(entry) > int(self._meta("last_seq"))):
                raise _StaleIndexError

    @staticmethod
    def _seq_of(entry: LogEntry) -> int:
        """Returns the number of an entry's first record; 0 if it has none."""
        records = decode_records(entry.data)
        return records[0].seq if records else 0

    def _advantages(self) -> dict[str, Advantages]:
        try:
            recipe = self._folder.load_recipe()
        except (Error, OSError) as err:
            self._note_now("recipe", [f"the recipe cannot be read, so advantages are unknown: {err}"])
            return {}
        self._note_now("recipe", [])
        return {name: Advantages(name, policy.table) for name, policy in recipe.trained.items()}

    # --- meta ---

    def _meta(self, key: str) -> str:
        row = self._database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else ""

    def _set_meta(self, key: str, value: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def _place_of(text: str) -> Position:
    segment, _, offset = (text or "0 0").partition(" ")
    return int(segment), int(offset)


def _text_of(place: Position) -> str:
    return f"{place[0]} {place[1]}"


def run_id_of(folder: RunFolder) -> str:
    """Returns the id of the run in a folder; empty if it can't be determined."""
    with contextlib.suppress(JournalError, OSError):
        # The log's first entry is the first plan, unless compaction has dropped it.
        for item in LogTail(folder.journal / "segments", (0, 0)).read():
            if isinstance(item, LogEntry):
                if item.kind == PLAN:
                    return decode_plan(item.data).run_id
                break
    with contextlib.suppress(JournalError, OSError):
        if (folder.journal / DATABASE).is_file():
            with JournalTables(folder.journal) as tables:
                return tables.meta("run_id")
    return ""
