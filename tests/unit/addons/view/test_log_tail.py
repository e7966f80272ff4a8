import shutil
from collections.abc import Sequence
from pathlib import Path

from astraflow.addons.view.log_tail import LogEntry, LogGap, LogTail, entry_at
from astraflow.dataflow.journal.records import decode_records
from astraflow.dataflow.journal.segments import ENTRY_HEAD, RECORDS
from drivers.view_runs import RunWriter


def seqs(items: Sequence[LogEntry | LogGap]) -> list[int]:
    entries = [item for item in items if isinstance(item, LogEntry) and item.kind == RECORDS]
    return [record.seq for entry in entries for record in decode_records(entry.data)]


def write_groups(run: RunWriter, first: int, last: int) -> None:
    for group in range(first, last):
        run.group(group, [0.0, 1.0])
        run.flush()


def test_what_is_appended_is_read_once_over_several_segments(tmp_path: Path) -> None:
    run = RunWriter(tmp_path, segment_bytes=2000)
    tail = LogTail(run.segments, (0, 0))
    write_groups(run, 0, 4)
    first = list(tail.read())
    assert list(tail.read()) == []
    write_groups(run, 4, 8)
    second = list(tail.read())
    assert len(list(run.segments.glob("*.seg"))) > 2
    assert seqs([*first, *second]) == list(range(1, 34))
    assert not tail.is_ahead
    run.close()


def test_a_torn_end_is_waited_for(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    write_groups(run, 0, 3)
    run.close()
    path = run.segments / "00000000.seg"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    tail = LogTail(run.segments, (0, 0))
    before = list(tail.read())
    assert list(tail.read()) == []
    path.write_bytes(whole)
    assert seqs([*before, *tail.read()]) == list(range(1, 14))


def test_reading_goes_on_behind_damage_and_says_where_it_is(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    write_groups(run, 0, 3)
    run.close()
    entries = [item for item in LogTail(run.segments, (0, 0)).read() if isinstance(item, LogEntry)]
    damaged = entries[2]
    path = run.segments / "00000000.seg"
    data = bytearray(path.read_bytes())
    data[damaged.begin[1] + 30] ^= 0xFF
    path.write_bytes(data)
    items = list(LogTail(run.segments, (0, 0)).read())
    (gap,) = [item for item in items if isinstance(item, LogGap)]
    assert "00000000.seg: damaged from byte" in gap.text
    after = items[items.index(gap) + 1]
    assert isinstance(after, LogEntry)
    assert gap.begin <= damaged.begin[1] < after.begin[1]
    lost = seqs(entries[2:3])
    assert seqs(items) == [seq for seq in range(1, 14) if seq not in lost]
    assert entry_at(run.segments, damaged.begin) is None
    assert entry_at(run.segments, entries[3].begin) == entries[3]


def test_a_damaged_length_of_a_payload_hides_no_records_behind_it(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    write_groups(run, 0, 3)
    run.close()
    entries = [item for item in LogTail(run.segments, (0, 0)).read() if isinstance(item, LogEntry)]
    path = run.segments / "00000000.seg"
    data = bytearray(path.read_bytes())
    payload_at = entries[1].begin[1] + ENTRY_HEAD.size + len(entries[1].data)
    data[payload_at + 1] ^= 0x02  # the payload now seems to be 512 bytes longer
    path.write_bytes(data)
    items = list(LogTail(run.segments, (0, 0)).read())
    assert seqs(items)[-4:] == [10, 11, 12, 13]
    assert any(isinstance(item, LogGap) for item in items)


def test_dropped_segments_are_passed_over(tmp_path: Path) -> None:
    run = RunWriter(tmp_path, segment_bytes=2000)
    write_groups(run, 0, 8)
    run.close()
    (run.segments / "00000000.seg").unlink()
    items = list(LogTail(run.segments, (0, 0)).read())
    assert not any(isinstance(item, LogGap) for item in items)
    assert seqs(items)[-1] == 33
    assert seqs(items)[0] > 1


def test_a_shorter_log_is_noticed(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    write_groups(run, 0, 3)
    run.close()
    tail = LogTail(run.segments, (0, 0))
    list(tail.read())
    path = run.segments / "00000000.seg"
    path.write_bytes(path.read_bytes()[:-1])
    assert tail.is_ahead
    shutil.rmtree(run.segments)
    run.segments.mkdir()
    assert tail.is_ahead


def test_a_file_that_is_no_segment_is_said(tmp_path: Path) -> None:
    (tmp_path / "00000000.seg").write_bytes(b"not a segment, but long enough for a header")
    (gap,) = list(LogTail(tmp_path, (0, 0)).read())
    assert isinstance(gap, LogGap)
    assert "not a segment of schema 2" in gap.text
