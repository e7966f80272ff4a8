import asyncio
import contextlib
import logging
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from astraflow.dataflow.core.commands import AddTasks, AddWorker, Command, Decision, FateDecided
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.journal.journal_db import Compacted
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.table_writer import TableRows, insert_rows
from astraflow.errors import JournalError, RefusedError
from astraflow.types import BusySpan
from drivers.log_driver import plan_of


class Counter:
    """A core that counts workers; each is a fate."""

    def __init__(self, names: tuple[str, ...] = (), *, offset: int = 0) -> None:
        self.names = list(names)
        self.offset = offset

    def apply(self, command: Command, now_s: float) -> Decision:
        assert isinstance(command, AddWorker)
        if command.name == "bad":
            raise RefusedError("bad")
        self.names.append(command.name)
        group = len(self.names) + self.offset
        return Decision(events=(FateDecided(policy="p", group_id=group, fate="failed"),))

    def snapshot_parts(self) -> Iterator[bytes]:
        return iter([",".join(self.names).encode()])

    def eval_deadlines(self) -> tuple[tuple[int, float], ...]:
        return ()

    def groups_for_replay(self) -> frozenset[int]:
        return frozenset()


def add(name: str) -> AddWorker:
    return AddWorker(worker_id=name, name=name, hosts=())


def restored(state: bytes) -> Counter:
    return Counter(tuple(state.decode().split(",")))


def record(journal: Journal, core: Counter, *names: str) -> int:
    commands = [add(name) for name in names]
    return journal.append(commands, [core.apply(command, 1.0).events for command in commands], at_s=1.0)


async def test_a_restart_replays_what_was_durable(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    core = journal.recover(new=Counter, restore=restored)
    for name in "abc":
        seq = record(journal, core, name)
    await journal.wait_durable(seq)
    run_id = journal.run_id
    await journal.close()
    again = Journal(tmp_path)
    assert (again.run_id, again.seq) == (run_id, 3)
    assert again.recover(new=Counter, restore=restored).names == ["a", "b", "c"]
    await again.close()


async def test_a_snapshot_shortens_the_replay(tmp_path: Path) -> None:
    journal = Journal(tmp_path, snapshot_every=2)
    core = Counter()
    for name in "abcde":
        record(journal, core, name)
        journal.snapshot_if_due(core)
        await journal.wait_flushed()
    await journal.close()
    again = Journal(tmp_path)
    never = Counter(("must not be used",))
    recovered = again.recover(new=lambda: never, restore=restored)
    assert recovered.names == list("abcde")
    await again.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        assert [row[0] for row in database.execute("SELECT seq FROM snapshots ORDER BY seq")] == [4]
    database.close()


async def test_commands_of_one_record_count_each_for_the_next_snapshot(tmp_path: Path) -> None:
    """What compaction holds in memory grows with commands, however many a record has."""
    journal, core = Journal(tmp_path, snapshot_every=3), Counter()
    record(journal, core, "a", "b")
    journal.snapshot_if_due(core)
    record(journal, core, "c", "d")
    journal.snapshot_if_due(core)
    await journal.wait_flushed()
    await journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        assert [row[0] for row in database.execute("SELECT seq FROM snapshots")] == [2]
    database.close()


async def test_a_replay_with_other_events_names_the_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    core = Counter()
    record(journal, core, "a")
    record(journal, core, "b")
    await journal.close()
    again = Journal(tmp_path)
    with pytest.raises(JournalError, match="record 1: replaying"):
        again.recover(new=lambda: Counter(offset=1), restore=restored)
    await again.close()


async def test_a_command_that_is_refused_in_the_replay_names_the_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([add("bad")], [()], at_s=1.0)
    await journal.close()
    again = Journal(tmp_path)
    with pytest.raises(JournalError, match="record 1 was accepted but is refused"):
        again.recover(new=Counter, restore=restored)
    await again.close()


async def test_a_second_process_is_told_who_holds_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match=r"in use by process \d+"):
        Journal(tmp_path)
    await journal.close()
    await Journal(tmp_path).close()


async def test_a_missing_payload_is_noticed_at_open(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.store(b"payload")
    await journal.wait_durable(journal.append([add("a")], [()], at_s=1.0))
    await journal.close()
    segment = tmp_path / "segments" / "00000000.seg"
    segment.write_bytes(segment.read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"payloads .* are missing"):
        Journal(tmp_path)


async def test_payloads_are_durable_with_their_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    ref = journal.store(b"payload")
    await journal.wait_durable(journal.append([add("a")], [()], at_s=1.0))
    assert journal.read_all((ref,))[0] == b"payload"
    await journal.close()


async def test_records_of_one_moment_share_a_flush_and_keep_their_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    core = Counter()
    seqs = [record(journal, core, str(idx)) for idx in range(100)]
    await journal.wait_durable(seqs[50])
    await journal.wait_durable(seqs[-1])
    await journal.wait_flushed()
    with journal.reader() as reader:
        assert [row.seq for row in reader.records()] == list(range(1, 101))
    await journal.close()


def lock_database(folder: Path) -> sqlite3.Connection:
    """Another process writes to the tables, until the connection is closed."""
    database = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    return database


async def test_a_record_that_is_durable_can_be_read_while_the_tables_are_locked(tmp_path: Path) -> None:
    journal, core = Journal(tmp_path), Counter()
    database = lock_database(tmp_path)
    journal.note_spans("w0", (BusySpan("generate", 1.0, 2.0),))
    async with asyncio.timeout(4):
        for name in "abc":
            await journal.wait_durable(record(journal, core, name))
    with journal.reader() as reader:
        assert [row.seq for row in reader.records()] == [1, 2, 3]
        assert not reader.telemetry()
    database.close()
    await journal.wait_flushed()
    with journal.reader() as reader:
        assert len(reader.telemetry()) == 1
    await journal.close()


async def test_a_reader_shows_one_moment(tmp_path: Path) -> None:
    journal, core = Journal(tmp_path, segment_bytes=300), Counter()
    for name in "abc":
        await journal.wait_durable(record(journal, core, name))
    with journal.reader() as reader:
        for name in "defghijk":
            await journal.wait_durable(record(journal, core, name))
        begun = reader.records()
        assert next(begun).seq == 1
        assert [row.seq for row in reader.records()] == [1, 2, 3]
        assert [row.seq for row in begun] == [2, 3]
    await journal.close()


class Disk:
    """Puts rows into the tables while there is room."""

    def __init__(self) -> None:
        self.is_full = False

    def insert(self, database: sqlite3.Connection, rows: TableRows) -> None:
        if self.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        insert_rows(database, rows)


async def test_tables_that_cannot_be_written_refuse_commands_until_they_can(tmp_path: Path) -> None:
    disk = Disk()
    journal, core = Journal(tmp_path, insert=disk.insert), Counter()
    disk.is_full = True
    journal.note_spans("w0", (BusySpan("generate", 1.0, 2.0),))
    await journal.wait_durable(record(journal, core, "a"))
    with pytest.raises(JournalError, match="disk is full"):
        await journal.wait_flushed()
    with pytest.raises(JournalError, match="disk is full"):
        journal.check()
    assert not journal.is_broken
    disk.is_full = False
    async with asyncio.timeout(10):
        while journal.failure is not None:
            await asyncio.sleep(0.05)
            with contextlib.suppress(JournalError):
                journal.check()
    await journal.wait_durable(record(journal, core, "b"))
    await journal.close()
    with JournalReader(tmp_path) as reader:
        assert [row.seq for row in reader.records()] == [1, 2]


class Ending:
    """A process that ends when its journal is broken."""

    def __init__(self, journal: Journal) -> None:
        self.num_calls = 0
        journal.on_broken = self.end

    def end(self) -> None:
        self.num_calls += 1


def faults(caplog: pytest.LogCaptureFixture) -> list[type[BaseException]]:
    """What was logged as critical, with its trace."""
    critical = [entry for entry in caplog.records if entry.levelno == logging.CRITICAL]
    return [entry.exc_info[0] for entry in critical if entry.exc_info and entry.exc_info[0]]


async def test_a_table_writer_that_fails_by_a_fault_of_its_own_breaks_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(*_: object) -> None:
        raise ZeroDivisionError

    journal, core = Journal(tmp_path, insert=faulty), Counter()
    ending = Ending(journal)
    journal.note_spans("w0", (BusySpan("generate", 1.0, 2.0),))
    await journal.wait_durable(record(journal, core, "a"))
    with pytest.raises(JournalError, match="because of a bug \\(ZeroDivisionError"):
        await journal.wait_flushed()
    assert (journal.is_broken, ending.num_calls, faults(caplog)) == (True, 1, [ZeroDivisionError])
    with pytest.raises(JournalError):
        await journal.close()
    again = Journal(tmp_path)
    assert again.seq == 1
    await again.close()


@pytest.mark.parametrize("name", ["journal flush", "journal tables"])
async def test_a_journal_closes_though_its_tasks_were_cancelled_with_all_of_a_loop(
    name: str, tmp_path: Path
) -> None:
    journal, core = Journal(tmp_path), Counter()
    await journal.wait_durable(record(journal, core, "a"))
    journal.note_spans("w0", (BusySpan("generate", 1.0, 2.0),))
    await asyncio.sleep(0)
    (task,) = (each for each in asyncio.all_tasks() if each.get_name() == name)
    task.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(JournalError, match="What was acknowledged is safe"):
            await journal.close()
    again = Journal(tmp_path)
    assert again.seq == 1
    await again.close()


class Unreadable(Counter):
    """A core whose state cannot be encoded to its end."""

    def snapshot_parts(self) -> Iterator[bytes]:
        yield b"a"
        raise ZeroDivisionError


async def test_a_compaction_that_fails_by_a_fault_of_its_own_breaks_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, core = Journal(tmp_path, snapshot_every=1), Unreadable()
    ending = Ending(journal)
    await journal.wait_durable(record(journal, core, "a"))
    journal.snapshot_if_due(core)
    async with asyncio.timeout(10):
        with pytest.raises(JournalError, match="because of a bug \\(ZeroDivisionError"):
            await journal.wait_flushed()
    assert (journal.is_broken, ending.num_calls, faults(caplog)) == (True, 1, [ZeroDivisionError])
    with pytest.raises(JournalError):
        await journal.close()
    again = Journal(tmp_path)
    assert again.recover(new=Counter, restore=restored).names == ["a"]
    await again.close()


async def test_spans_and_plans_are_kept_without_a_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note_plan(plan_of("one"))
    await journal.wait_flushed()
    journal.note_plan(plan_of("one"))
    journal.note_plan(plan_of("two"))
    journal.note_spans("w0", (BusySpan("generate", 1.0, 2.0),))
    await journal.close()
    with JournalReader(tmp_path) as reader:
        assert [plan.recipe for _, plan in reader.plans()] == ["one", "two"]
        assert [(row.source, row.span.end_s) for row in reader.telemetry()] == [("w0", 2.0)]


async def test_a_database_that_lost_all_rows_costs_no_record(tmp_path: Path) -> None:
    """A power loss takes the newest transactions: here all that came after the folder was made."""
    await Journal(tmp_path / "run").close()
    empty = (tmp_path / "run" / "journal.sqlite").read_bytes()
    journal = Journal(tmp_path / "run", segment_bytes=300)
    core = journal.recover(new=Counter, restore=restored)
    for name in "abcdef":
        journal.store(name.encode() * 50)
        await journal.wait_durable(record(journal, core, name))
    await journal.close()
    (tmp_path / "run" / "journal.sqlite").write_bytes(empty)
    again = Journal(tmp_path / "run", segment_bytes=300)
    assert again.seq == 6
    assert again.recover(new=Counter, restore=restored).names == list("abcdef")
    await again.wait_durable(record(again, core, "g"))
    await again.close()


async def test_every_cut_of_the_log_opens_to_whole_records(tmp_path: Path) -> None:
    await Journal(tmp_path / "run").close()
    empty = (tmp_path / "run" / "journal.sqlite").read_bytes()
    journal = Journal(tmp_path / "run")
    core, ends = Counter(), list[int]()
    segment = tmp_path / "run" / "segments" / "00000000.seg"
    for name in "ab":
        await journal.wait_durable(record(journal, core, name))
        ends.append(segment.stat().st_size)
    await journal.close()
    data = segment.read_bytes()
    for end in range(0, len(data) + 1, 11):
        segment.write_bytes(data[:end])
        (tmp_path / "run" / "journal.sqlite").write_bytes(empty)
        again = Journal(tmp_path / "run")
        assert again.seq == sum(end >= whole for whole in ends)
        await again.close()


async def test_a_database_of_another_run_is_refused(tmp_path: Path) -> None:
    for folder, names in (("run", "abc"), ("other", "z")):
        journal, core = Journal(tmp_path / folder), Counter()
        journal.note_plan(plan_of("one"))
        for name in names:
            await journal.wait_durable(record(journal, core, name))
        await journal.close()
    shutil.copy(tmp_path / "other" / "journal.sqlite", tmp_path / "run" / "journal.sqlite")
    with pytest.raises(JournalError, match=r"database of another run"):
        Journal(tmp_path / "run")


async def test_a_database_that_was_moved_away_is_made_again_from_the_segments(tmp_path: Path) -> None:
    journal, core = Journal(tmp_path, segment_bytes=300), Counter()
    journal.note_plan(plan_of("one"))
    for name in "abcdef":
        await journal.wait_durable(record(journal, core, name))
    await journal.close()
    (tmp_path / "journal.sqlite").unlink()
    again = Journal(tmp_path, segment_bytes=300)
    assert (again.run_id, again.seq) == (journal.run_id, 6)
    with again.reader() as reader:
        assert [plan.recipe for _, plan in reader.plans()] == ["one"]
        assert len(list(reader.records())) == 6
    await again.close()


async def test_another_schema_is_refused(tmp_path: Path) -> None:
    await Journal(tmp_path).close()
    database = sqlite3.connect(tmp_path / "journal.sqlite")
    database.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    database.commit()
    database.close()
    with pytest.raises(JournalError, match="schema 99"):
        Journal(tmp_path)
    with pytest.raises(JournalError, match="schema 99"):
        JournalReader(tmp_path)


async def test_a_closed_journal_refuses(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    await journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.check()


async def test_a_reader_that_cannot_be_opened_leaves_no_file_open(tmp_path: Path) -> None:
    class TornReader(JournalReader):
        """The tables can't be read anymore once the log is open."""

        num_reads = 0

        def _read_compacted(self) -> Compacted:
            self.num_reads += 1
            if self.num_reads > 1:
                raise JournalError("torn")
            return super()._read_compacted()

    journal = Journal(tmp_path)
    await journal.wait_durable(record(journal, Counter(), "a", "b"))
    await journal.close()
    before = len(psutil.Process().open_files())
    with pytest.raises(JournalError, match="torn") as failed:
        TornReader(tmp_path)
    assert len(psutil.Process().open_files()) == before  # while the error, and thus its frames, are kept
    del failed


def test_a_folder_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="holds no journal"):
        JournalReader(tmp_path)


async def test_a_command_round_trips_through_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([AddTasks(tasks=())], [()], at_s=2.5)
    await journal.wait_flushed()
    with journal.reader() as reader:
        (row,) = reader.records()
    assert row.at_s == 2.5
    await journal.close()
