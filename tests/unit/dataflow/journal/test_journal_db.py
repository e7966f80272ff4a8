"""A journal of an older schema is upgraded when it is opened, in one transaction; a newer one is refused."""

import sqlite3
from pathlib import Path

import pytest

from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.journal.journal_db import DATABASE, JOURNAL_SCHEMA, open_database
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.errors import JournalError

SCHEMA_2 = """
PRAGMA journal_mode=WAL;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE records (seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, commands BLOB NOT NULL,
    events BLOB NOT NULL, chain BLOB NOT NULL);
CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE fates (policy TEXT NOT NULL, group_id INTEGER NOT NULL, fate TEXT NOT NULL,
    step INTEGER NOT NULL, staleness INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (policy, group_id)) WITHOUT ROWID;
CREATE TABLE plans (seq INTEGER NOT NULL, at_s REAL NOT NULL, plan BLOB NOT NULL);
CREATE TABLE steps (seq INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE evals (seq INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE telemetry (source TEXT NOT NULL, kind TEXT NOT NULL, start_s REAL, end_s REAL);
CREATE TABLE samples (kind TEXT NOT NULL, group_id INTEGER NOT NULL, task_id TEXT NOT NULL,
    policy TEXT NOT NULL, version INTEGER NOT NULL, score REAL NOT NULL, segment INTEGER NOT NULL,
    offset INTEGER NOT NULL, length INTEGER NOT NULL);
INSERT INTO meta VALUES ('schema', '2'), ('run_id', 'r'), ('written', '0 0');
INSERT INTO fates VALUES ('actor', 7, 'failed', -1, 0, 12);
INSERT INTO samples VALUES ('eval', 1, 't', 'actor', 0, 1.0, 0, 16, 8);
"""


def make_old(folder: Path) -> None:
    database = sqlite3.connect(folder / DATABASE)
    database.executescript(SCHEMA_2)
    database.close()


def schema_of(folder: Path) -> str:
    with JournalReader(folder) as reader:
        return reader.meta("schema")


async def test_an_older_journal_is_upgraded_when_it_is_opened(tmp_path: Path) -> None:
    make_old(tmp_path)
    journal = Journal(tmp_path)
    await journal.close()
    assert (journal.run_id, schema_of(tmp_path)) == ("r", str(JOURNAL_SCHEMA))
    with JournalReader(tmp_path) as reader:
        (fate,) = reader.fates()
        assert (fate.group_id, fate.tokens, fate.trained_tokens) == (7, 12, 0)
        assert reader.transcripts("eval")[0].data == b""
        assert reader.compacted == 0
    await Journal(tmp_path).close()


def test_an_older_journal_can_be_read_without_an_upgrade(tmp_path: Path) -> None:
    make_old(tmp_path)
    with JournalReader(tmp_path) as reader:
        assert [row.fate for row in reader.fates()] == ["failed"]
        assert (reader.books(), list(reader.payloads()), len(reader.transcripts("eval"))) == ([], [], 1)
    assert schema_of(tmp_path) == "2"


def test_an_upgrade_that_fails_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    make_old(tmp_path)
    database = sqlite3.connect(tmp_path / DATABASE)
    database.execute("CREATE VIEW books AS SELECT 1")
    database.execute("CREATE TABLE payloads_taken (x)")
    database.execute("CREATE INDEX payloads ON payloads_taken (x)")
    database.close()
    with pytest.raises(sqlite3.Error):
        open_database(tmp_path / DATABASE)
    assert schema_of(tmp_path) == "2"
    with JournalReader(tmp_path) as reader:
        assert len(reader.transcripts("eval")) == 1


@pytest.mark.parametrize("schema", [1, JOURNAL_SCHEMA + 1])
def test_a_newer_or_forgotten_schema_is_refused(tmp_path: Path, schema: int) -> None:
    make_old(tmp_path)
    database = sqlite3.connect(tmp_path / DATABASE)
    database.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(schema),))
    database.commit()
    database.close()
    with pytest.raises(JournalError, match=f"has schema {schema}; this version of AstraFlow writes"):
        Journal(tmp_path)
    assert schema_of_raw(tmp_path) == str(schema)


def schema_of_raw(folder: Path) -> str:
    database = sqlite3.connect(folder / DATABASE)
    (value,) = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    database.close()
    return str(value)
