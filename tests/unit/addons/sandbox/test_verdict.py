"""Verdicts: how the end of a program is judged, and which programs are taken."""

import pytest

from astraflow.addons.sandbox.verdict import BoxLimits, Kind, Program, ProgramReport, verdict_of
from astraflow.errors import ConfigError, LateScoreError, RolloutError


def judged(
    *, code: int = 0, is_late: bool = False, is_full: bool = False, cpu_s: float = 0.1
) -> tuple[Kind, str]:
    ended = ProgramReport(
        code=code, is_late=is_late, is_full=is_full, cpu_s=cpu_s, wall_s=cpu_s, peak_bytes=1
    )
    verdict = verdict_of(ended, BoxLimits(cpu_s=2.0, wall_s=5.0, output_bytes=100), b"out", b"err")
    assert (verdict.stdout, verdict.stderr) == ("out", "err")
    return verdict.kind, verdict.reason


def test_exit_codes_and_signals_are_told_apart() -> None:
    assert judged() == (Kind.PASSED, "exit code 0")
    assert judged(code=3) == (Kind.FAILED, "exit code 3")
    assert judged(code=-11) == (Kind.CRASH, "SIGSEGV")
    assert judged(code=-31)[0] is Kind.REFUSED
    assert judged(code=251)[0] is Kind.MEMORY
    assert judged(code=252)[0] is Kind.OUTPUT


def test_the_cause_of_a_kill_is_named_and_not_the_signal() -> None:
    assert judged(code=-9, is_late=True) == (Kind.TIMEOUT, "5 s are over")
    assert judged(code=-9, is_full=True) == (Kind.OUTPUT, "an output has more than 100 bytes")
    assert judged(code=-9, cpu_s=2.5)[0] is Kind.TIMEOUT
    assert judged(code=-9) == (Kind.MEMORY, "the machine had no more memory")


@pytest.mark.parametrize(
    ("cpu_s", "slowdown", "fault"),
    [
        (1.1, 4.0, "the machine was busy: 1.10 s of CPU time in 5 s"),
        (0.1, 4.0, ""),  # it slept
        (1.1, 1.0, ""),  # it slept on an idle machine
        (2.5, 4.0, ""),  # it used up its CPU time
    ],
)
def test_a_program_that_is_late_on_a_busy_machine_is_to_blame_only_if_it_did_not_compute(
    cpu_s: float, slowdown: float, fault: str
) -> None:
    ended = ProgramReport(
        code=-9, is_late=True, is_full=False, cpu_s=cpu_s, wall_s=5.0, peak_bytes=1, slowdown=slowdown
    )
    verdict = verdict_of(ended, BoxLimits(cpu_s=2.0, wall_s=5.0), b"", b"")
    assert verdict.kind is Kind.TIMEOUT
    assert verdict.fault == fault
    if fault:
        with pytest.raises(LateScoreError, match="not run to its end: the machine was busy"):
            verdict.raise_fault("a case")
    else:
        verdict.raise_fault("a case")


def test_a_program_that_used_more_memory_than_allowed_is_to_blame() -> None:
    limits = BoxLimits(memory_bytes=100 << 20, wall_s=5.0)
    most = limits.memory_bytes
    for code, is_over, peak_bytes in ((-9, True, 1), (-9, False, most + 1), (0, False, most + 1)):
        ended = ProgramReport(code, False, False, 0.1, 0.1, peak_bytes, is_over_memory=is_over)
        verdict = verdict_of(ended, limits, b"", b"")
        assert (verdict.kind, verdict.fault) == (Kind.MEMORY, "")
        assert verdict.reason == f"it used more than {most} bytes of memory"
    assert verdict_of(ProgramReport(0, False, False, 0.1, 0.1, most), limits, b"", b"").kind is Kind.PASSED


def test_a_program_that_the_kernel_killed_for_memory_is_not_to_blame() -> None:
    ended = ProgramReport(code=-9, is_late=False, is_full=False, cpu_s=0.1, wall_s=0.1, peak_bytes=1)
    verdict = verdict_of(ended, BoxLimits(cpu_s=2.0, wall_s=5.0), b"", b"")
    with pytest.raises(RolloutError, match="no more memory") as failure:
        verdict.raise_fault("a case")
    assert failure.value.is_retryable


def test_a_program_that_ends_well_after_its_cpu_time_is_too_slow() -> None:
    kind, reason = judged(cpu_s=2.01)
    assert kind is Kind.TIMEOUT
    assert "2 s are allowed" in reason


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "main.py", "a\0b", "x" * 300, "."])
def test_files_stay_in_the_folder_of_the_program(name: str) -> None:
    with pytest.raises(ConfigError, match="relative path"):
        Program.of("", {name: ""}, "", BoxLimits())


def test_what_the_caller_gives_is_bounded() -> None:
    with pytest.raises(ConfigError, match=r"limits\.disk_bytes = 10"):
        Program.of("", {"a": "x" * 6, "b": "x" * 6}, "", BoxLimits(disk_bytes=10))
    with pytest.raises(ConfigError, match="65 files"):
        Program.of("", {str(number): "" for number in range(65)}, "", BoxLimits())
    with pytest.raises(ConfigError, match="stdin has"):
        Program.of("", {}, b"x" * (64 << 20) + b"x", BoxLimits())


def test_a_program_that_is_too_long_is_refused_and_no_error() -> None:
    program = Program.of("#" * ((1 << 20) + 1), {}, "", BoxLimits())
    assert "at most 1048576" in program.refusal
    assert not Program.of("#" * (1 << 20), {}, "", BoxLimits()).refusal


@pytest.mark.parametrize(
    ("name", "value"),
    [("cpu_s", 0.0), ("wall_s", float("nan")), ("memory_bytes", 1 << 20), ("num_processes", 1000)],
)
def test_limits_are_bounded(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"limits\.{name}"):
        BoxLimits(**{name: value})  # type: ignore[arg-type]
