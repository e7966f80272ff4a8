"""The limits of memory in both versions of control groups, and why a process was killed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from astraflow.service.memory import MemoryReading, MemoryRecord, control_groups, read_memory

GB = 10**9
CALM = MemoryReading(limit=8 * GB, available=4 * GB, own_kills=2, all_kills=5)


def record(*readings: MemoryReading) -> MemoryRecord:
    upcoming: Iterator[MemoryReading] = iter(readings)
    return MemoryRecord(lambda: next(upcoming))


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        (
            replace(CALM, own_kills=3, all_kills=6),
            "killed by the kernel for lack of memory; it used 3.5 GB; x",
        ),
        (
            replace(CALM, own_kills=None, all_kills=6),
            "probably killed by the kernel for lack of memory; it used 3.5 GB; x",
        ),
        (
            replace(CALM, available=GB // 2),
            "probably killed for lack of memory, because only 0.5 of 8.0 GB were left; it used 3.5 GB; x",
        ),
        (CALM, "killed by signal 9 (SIGKILL), which AstraFlow didn't send; it used 3.5 GB"),
        (
            replace(CALM, own_kills=None),
            "killed by signal 9 (SIGKILL), which AstraFlow didn't send; it used 3.5 GB",
        ),
    ],
)
def test_the_cause_of_a_kill_is_as_certain_as_its_evidence(after: MemoryReading, cause: str) -> None:
    memory = record(CALM, after)
    memory.look(10.0)
    assert memory.cause(10.5, 3_500_000_000, "x") == cause


def test_memory_that_the_kill_has_freed_is_still_remembered_as_used() -> None:
    memory = record(CALM, replace(CALM, available=GB // 10), CALM)
    memory.look(10.0)
    memory.look(10.5)
    assert memory.cause(11.0, 0, "").startswith("probably killed for lack of memory, because only 0.1 of 8.0")


def test_a_kill_of_another_process_long_before_is_not_the_cause() -> None:
    later = replace(CALM, own_kills=3, all_kills=6)
    memory = record(CALM, *[later] * 40)
    for half_second in range(40):
        memory.look(half_second / 2)
    assert memory.cause(20.0, 0, "x") == "killed by signal 9 (SIGKILL), which AstraFlow didn't send"


def test_the_groups_of_both_versions_are_found_from_the_inside_out(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/job/step\n1:cpu,cpuacct:/job\n0::/user.slice/run.scope\n")
    for folder in ("memory/job/step", "user.slice/run.scope"):
        (tmp_path / folder).mkdir(parents=True)
    groups = [str(group.relative_to(tmp_path)) for group in control_groups("memory", tmp_path, own)]
    assert groups == ["memory/job/step", "memory/job", "memory", "user.slice/run.scope", "user.slice", "."]


def test_a_container_that_shows_the_path_of_its_host_has_the_group_at_the_root(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/docker/4f3c\n")
    assert list(control_groups("memory", tmp_path, own)) == [tmp_path]


def test_this_machine_has_a_limit_and_some_memory_left() -> None:
    reading = read_memory()
    assert 0 < reading.available <= reading.limit
