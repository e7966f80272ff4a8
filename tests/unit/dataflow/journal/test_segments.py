import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.journal.records import Record, encode_records
from astraflow.dataflow.journal.segments import RECORDS, LogReader, SegmentReader, SegmentStore
from astraflow.errors import JournalError


def test_written_payloads_read_back_over_several_segments(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path, segment_bytes=400)
    payloads = [bytes([idx]) * (idx * 7) for idx in range(30)]
    refs = [store.append(payload) for payload in payloads]
    store.write(store.take())
    assert store.read_all(refs) == payloads
    assert len(list(tmp_path.glob("*.seg"))) == refs[-1].segment + 1 > 3
    store.close()


def test_payloads_are_read_together_in_any_order(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path, segment_bytes=100_000)
    payloads = [bytes([idx]) * (idx * 1500) for idx in range(30)]
    refs = [store.append(payload) for payload in payloads]
    store.add(RECORDS, b"between")
    store.write(store.take())
    order = [7, 3, 29, 0, 3, 11]
    assert [bytes(data) for data in store.read_all([refs[idx] for idx in order])] == [
        payloads[idx] for idx in order
    ]
    store.close()


def logged(folder: Path, first: int = 0) -> list[bytes]:
    log = LogReader(folder, first)
    try:
        return list(log.entries(RECORDS))
    finally:
        log.close()


def test_records_are_found_from_a_segment_on(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path, segment_bytes=120)
    assert logged(tmp_path) == []
    store.add(RECORDS, b"one")
    store.append(b"payload" * 5)
    store.add(RECORDS, b"two" * 20)
    store.add(RECORDS, b"three")
    store.write(store.take())
    assert logged(tmp_path) == [b"one", b"two" * 20, b"three"]
    assert logged(tmp_path, 1) == [b"two" * 20, b"three"]
    (tmp_path / "00000000.seg").unlink()
    with pytest.raises(JournalError, match=r"00000000\.seg is missing"):
        logged(tmp_path)
    store.close()


def test_damaged_records_are_not_passed_over(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path)
    store.add(RECORDS, encode_records([Record(1, 0.0, b"", b"", b"")]))
    store.add(RECORDS, encode_records([Record(2, 0.0, b"", b"", b"")]))
    store.add(RECORDS, encode_records([Record(3, 0.0, b"", b"", b"")]))
    store.write(store.take())
    path = tmp_path / "00000000.seg"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(bytes(data))
    log = LogReader(tmp_path, 0)
    for _ in range(2):
        with pytest.raises(JournalError, match="the entry at 16 is damaged"):
            list(log.entries(RECORDS))
    log.close()
    store.close()


def test_a_payload_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path, segment_bytes=100)
    refs = [store.append(b"a"), store.append(b"b" * 1000), store.append(b"c")]
    store.write(store.take())
    assert [ref.segment for ref in refs] == [0, 1, 2]
    assert store.read_all((refs[1],))[0] == b"b" * 1000
    store.close()


def test_more_buffers_than_one_vectored_write_takes(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path)
    refs = [store.append(str(idx).encode()) for idx in range(2000)]
    store.write(store.take())
    assert store.read_all(refs) == [str(idx).encode() for idx in range(2000)]
    store.close()


def test_large_payloads_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, pwritev = list[int](), os.pwritev

    def spied(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return pwritev(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", spied)
    store = SegmentStore(tmp_path)
    payloads = [os.urandom(size) for size in (3_000_000, 1, 524_288, 100_000, 0, 700_000)]
    refs = [store.append(payload) for payload in payloads]
    store.write(store.take())
    assert store.read_all(refs) == payloads
    assert max(sizes) == 512 * 1024
    assert sum(sizes) == store.end[1]
    store.close()


def test_a_torn_tail_is_cut_and_writing_goes_on_there(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path)
    first = store.append(b"whole")
    store.write(store.take())
    end = store.end
    store.close()
    with (tmp_path / "00000000.seg").open("ab") as file:
        file.write(b"\x05\x00\x00\x00garbage")
    again = SegmentStore(tmp_path)
    assert again.end == end
    second = again.append(b"next")
    again.write(again.take())
    assert again.read_all((first, second)) == [b"whole", b"next"]
    again.close()


def test_a_torn_header_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "00000003.seg").write_bytes(b"AFS")
    store = SegmentStore(tmp_path)
    ref = store.append(b"x")
    store.write(store.take())
    assert (ref.segment, store.read_all((ref,))[0]) == (3, b"x")
    store.close()


def test_a_changed_byte_is_found_on_reading(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path)
    ref = store.append(b"payload")
    store.write(store.take())
    store.close()
    path = tmp_path / "00000000.seg"
    data = bytearray(path.read_bytes())
    data[ref.offset] ^= 1
    path.write_bytes(bytes(data))
    reader = SegmentReader(tmp_path)
    with pytest.raises(JournalError, match="damaged"):
        reader.read(ref)
    reader.close()


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"00000007\.seg"):
        SegmentReader(tmp_path).read(PayloadRef(segment=7, offset=28, length=3))


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "00000000.seg").write_bytes(b"something else entirely")
    with pytest.raises(JournalError, match="is not segment"):
        SegmentStore(tmp_path)


def test_writing_the_same_list_again_changes_nothing(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path)
    ref = store.append(b"twice")
    writes = store.take()
    store.write(writes)
    size = (tmp_path / "00000000.seg").stat().st_size
    store.write(writes)
    assert store.read_all((ref,))[0] == b"twice"
    assert (tmp_path / "00000000.seg").stat().st_size == size
    store.close()
