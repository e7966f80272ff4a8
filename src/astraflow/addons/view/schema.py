"""The index of a run: its tables, its version, and how it is opened.

The index is a SQLite file in the run folder, `view/index.sqlite`. Everything in it comes from the journal, so
you can delete it at any time. It is rebuilt if it is damaged, or if it belongs to another version of
AstraFlow or to another run.
"""

import sqlite3
from pathlib import Path

__all__ = ["EVAL", "INDEX_VERSION", "TRAIN", "create", "open_to_fill", "open_to_read"]

INDEX_VERSION = 6
"""Increase this number whenever the tables or their contents change."""

TRAIN = 0
EVAL = 1
"""`TRAIN` and `EVAL` are the kinds of episodes in the column `kind`."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE notes (text TEXT NOT NULL, source TEXT NOT NULL, PRIMARY KEY (text, source)) WITHOUT ROWID;
CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE seen (name TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (name, value)) WITHOUT ROWID;
CREATE TABLE tasks (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE groups (id INTEGER PRIMARY KEY, task INTEGER NOT NULL, drawn_s REAL NOT NULL);
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, group_id INTEGER NOT NULL, episode_idx INTEGER NOT NULL,
    attempt INTEGER NOT NULL, part INTEGER NOT NULL, at_s REAL NOT NULL, duration_s REAL, task INTEGER,
    policy INTEGER, role INTEGER, worker INTEGER, reward REAL, score REAL, advantage REAL, tokens INTEGER,
    trained_tokens INTEGER, turns INTEGER, oldest INTEGER, newest INTEGER, finish INTEGER, error INTEGER,
    fate INTEGER, step INTEGER, staleness INTEGER, segment INTEGER, offset INTEGER, length INTEGER,
    log_segment INTEGER NOT NULL, log_offset INTEGER NOT NULL, sample INTEGER);
CREATE INDEX episodes_group ON episodes (group_id);
CREATE INDEX episodes_task ON episodes (task);
CREATE TABLE happenings (
    id INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL, who TEXT NOT NULL, step INTEGER,
    version INTEGER, text TEXT NOT NULL);
CREATE INDEX happenings_kind ON happenings (kind);
CREATE TABLE versions (
    policy TEXT NOT NULL, version INTEGER NOT NULL, step INTEGER NOT NULL, at_s REAL NOT NULL,
    kind TEXT NOT NULL, base INTEGER NOT NULL, fetched_bytes INTEGER NOT NULL, full_bytes INTEGER NOT NULL,
    shortcut_bytes INTEGER NOT NULL, chunks INTEGER NOT NULL, PRIMARY KEY (policy, version)) WITHOUT ROWID;
CREATE TABLE spans (
    id INTEGER PRIMARY KEY, source TEXT NOT NULL, kind TEXT NOT NULL, start_s REAL NOT NULL,
    end_s REAL NOT NULL);
CREATE INDEX spans_start ON spans (start_s);
CREATE INDEX spans_length ON spans (end_s - start_s);
CREATE INDEX happenings_at ON happenings (at_s);
CREATE TABLE texts (id INTEGER PRIMARY KEY, body TEXT NOT NULL);
"""
_CACHE_KIB = 32 * 1024
_BUSY_TIMEOUT_S = 5.0


def open_to_fill(path: Path) -> sqlite3.Connection:
    """Opens an index for filling. A missing file is created without tables. Raises: sqlite3.Error."""
    database = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        # A power loss may damage the index, but then it is rebuilt.
        database.execute("PRAGMA synchronous=OFF")
        database.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    except sqlite3.Error:
        database.close()
        raise
    return database


def create(database: sqlite3.Connection, run_id: str) -> None:
    """Creates the tables of a new index. Raises: sqlite3.Error."""
    database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
    database.executemany(
        "INSERT INTO meta VALUES (?, ?)", [("version", str(INDEX_VERSION)), ("run_id", run_id)]
    )
    database.execute("COMMIT")


def open_to_read(path: Path) -> sqlite3.Connection:
    """Opens an existing index for reading. Raises: sqlite3.Error."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    # Only one thread at a time uses the connection, but any free thread may continue a download.
    database = sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
    database.row_factory = sqlite3.Row
    return database
