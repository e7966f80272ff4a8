"""A journal cut or altered at any byte opens to the last acknowledged state, or says what is damaged."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow.dataflow.core.commands import AddTasks, Command, Decision
from astraflow.dataflow.journal.journal import Journal
from astraflow.errors import JournalError
from astraflow.types import Task


class Tasks:
    """A core that remembers task ids."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def apply(self, command: Command, now_s: float) -> Decision:
        assert isinstance(command, AddTasks)
        self.ids += [task.id for task in command.tasks]
        return Decision()


def push(name: str) -> AddTasks:
    return AddTasks(tasks=(Task(id=name, source="", prompt="p", answer="a"),))


@dataclass
class Crashed:
    """A folder as a crash left it, and how long its segment was when each record was acknowledged."""

    folder: Path
    ends: list[int]


NAMES = ("a", "b", "c", "d")


@pytest.fixture
async def crashed(tmp_path: Path) -> Crashed:
    """Four records; the database's newest transactions are in its log only."""
    journal, core = Journal(tmp_path / "live"), Tasks()
    segment, ends = tmp_path / "live" / "segments" / "00000000.seg", list[int]()
    for name in NAMES:
        journal.store(name.encode() * 10)
        await journal.wait_durable(
            journal.append([push(name)], [core.apply(push(name), 1.0).events], at_s=1.0)
        )
        ends.append(segment.stat().st_size)
    await journal.wait_flushed()
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await journal.close()
    return Crashed(tmp_path / "crashed", ends)


async def reopened(crashed: Crashed, damage: tuple[Path, bytes]) -> list[str]:
    """The ids after a restart from a copy in which one file has other bytes."""
    folder = crashed.folder.with_name("again")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(crashed.folder, folder)
    path, data = damage
    (folder / path.relative_to(crashed.folder)).write_bytes(data)
    journal = Journal(folder)
    try:
        core: Tasks = journal.recover(new=Tasks, restore=lambda _: Tasks())  # type: ignore[type-var]
        await journal.wait_durable(journal.append([push("e")], [()], at_s=2.0))
    finally:
        await journal.close()
    return core.ids


@pytest.mark.timeout(120)
async def test_the_databases_log_may_be_cut_at_any_byte(crashed: Crashed) -> None:
    """The segments are the log: nothing is lost, whatever the database lost."""
    log = crashed.folder / "journal.sqlite-wal"
    data = log.read_bytes()
    assert len(data) > 10_000
    for end in sorted({*range(0, len(data), 509), *range(len(data) - 40, len(data) + 1)}):
        assert await reopened(crashed, (log, data[:end])) == list(NAMES), end


@pytest.mark.timeout(120)
async def test_a_byte_of_the_databases_log_may_flip(crashed: Crashed) -> None:
    log = crashed.folder / "journal.sqlite-wal"
    data = bytearray(log.read_bytes())
    for at in range(0, len(data), 997):
        data[at] ^= 0x40
        assert await reopened(crashed, (log, bytes(data))) == list(NAMES), at
        data[at] ^= 0x40


@pytest.mark.timeout(120)
async def test_the_segment_may_be_cut_at_any_byte_that_was_not_acknowledged(crashed: Crashed) -> None:
    """Cut into what was acknowledged, the journal says so; it never opens to less."""
    segment = crashed.folder / "segments" / "00000000.seg"
    data = segment.read_bytes()
    assert len(data) == crashed.ends[-1]
    for end in range(0, len(data), 7):
        with pytest.raises(JournalError, match="are missing"):
            await reopened(crashed, (segment, data[:end]))
    for torn in (b"\x05", b"\x05\x00\x00\x00garbage", data[16:60], data[16:-1]):
        assert await reopened(crashed, (segment, data + torn)) == list(NAMES)


@pytest.mark.timeout(120)
async def test_with_the_databases_log_lost_a_flipped_byte_is_named(crashed: Crashed) -> None:
    """Only the newest flush, which looks like one that a crash interrupted, cannot be told from it."""
    (crashed.folder / "journal.sqlite-wal").unlink()
    segment = crashed.folder / "segments" / "00000000.seg"
    data = bytearray(segment.read_bytes())
    for at in range(0, len(data), 5):
        data[at] ^= 0x40
        if at < crashed.ends[-2]:
            with pytest.raises(JournalError, match=r"damaged|has schema|is not segment|does not follow"):
                await reopened(crashed, (segment, bytes(data)))
        else:
            assert await reopened(crashed, (segment, bytes(data))) == list(NAMES[:-1])
        data[at] ^= 0x40
