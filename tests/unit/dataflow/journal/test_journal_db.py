"""A journal of another schema is refused."""

import sqlite3
from pathlib import Path

import pytest

from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.journal.journal_db import DATABASE, JOURNAL_SCHEMA
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.errors import JournalError


@pytest.mark.parametrize("schema", [JOURNAL_SCHEMA - 1, JOURNAL_SCHEMA + 1])
async def test_a_journal_of_another_schema_is_refused(tmp_path: Path, schema: int) -> None:
    await Journal(tmp_path).close()
    database = sqlite3.connect(tmp_path / DATABASE)
    database.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(schema),))
    database.commit()
    database.close()
    with pytest.raises(JournalError, match=f"has schema {schema}; this version of AstraFlow writes"):
        Journal(tmp_path)
    with pytest.raises(JournalError, match=f"has schema {schema}; this version reads {JOURNAL_SCHEMA}"):
        JournalReader(tmp_path)
