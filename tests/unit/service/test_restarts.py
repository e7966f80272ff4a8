import signal
from pathlib import Path

from astraflow.service.memory import MemoryReading, MemoryRecord
from astraflow.service.restarts import Backoff, end_text, last_lines


def test_delays_double_up_to_the_longest_and_end_at_the_limit() -> None:
    backoff = Backoff(limit=4, first_s=1.0, longest_s=5.0)
    assert [backoff.next_delay_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, None]


def test_progress_forgets_earlier_crashes() -> None:
    backoff = Backoff(limit=1, first_s=1.0)
    assert backoff.next_delay_s() == 1.0
    backoff.reset()
    assert backoff.next_delay_s() == 1.0


def test_a_process_without_crashes_starts_at_once_and_one_without_a_limit_always_again() -> None:
    backoff = Backoff(first_s=2.0, longest_s=300.0)
    assert backoff.delay_s == 0.0
    for _ in range(5000):
        backoff.next_delay_s()
    assert backoff.delay_s == 300.0


def test_an_end_is_told_by_its_exit_code_or_its_signal() -> None:
    assert end_text(3) == "ended with exit code 3"
    assert end_text(-signal.SIGSEGV) == "was killed by signal 11 (SIGSEGV)"
    assert end_text(-99) == "was killed by signal 99"


def test_a_kill_for_lack_of_memory_is_told_with_the_advice() -> None:
    readings = iter([MemoryReading(10**9, 10**9, own_kills=kills, all_kills=None) for kills in (0, 1)])
    memory = MemoryRecord(lambda: next(readings))
    memory.look(0.0)
    assert end_text(137, memory, "use less") == "was killed by the kernel for lack of memory; use less"


def test_the_last_lines_of_a_log_leave_out_blank_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log, 2) == "  (no log)"
    log.write_text("one\n\ntwo\nthree\n \n")
    assert last_lines(log, 2) == "  two\n  three"


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"too far back\n" + b"\n" * 100_000 + b"the cause\r\nthe end\n")
    assert last_lines(log, 3) == "  the cause\n  the end"
