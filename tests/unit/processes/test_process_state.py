"""What is known of a process from outside: whether it runs, and whether it gets a processor."""

import subprocess
import sys
import time

import pytest

from astraflow.processes.process_state import CpuUse, Starvation, cpu_use


def starvation(uses: list[CpuUse | None]) -> str:
    """What is said after a look every half second."""
    found = Starvation()
    for number, use in enumerate(uses):
        found.look(number / 2, use)
    return found.text


def test_a_process_that_is_ready_and_gets_no_processor_is_starved() -> None:
    uses = [CpuUse(5.0 + 0.01 * number, is_ready=True) for number in range(11)]
    assert starvation(uses) == "it is ready to run, and got 2% of a core"
    sleeps_now_and_then = [CpuUse(5.0, is_ready=number % 3 > 0) for number in range(11)]
    assert starvation(sleeps_now_and_then) == "it is ready to run, and got 0% of a core"


@pytest.mark.parametrize(
    "uses",
    [
        [CpuUse(5.0, is_ready=False)] * 11,
        [CpuUse(5.0 + 0.5 * number, is_ready=True) for number in range(11)],
        [CpuUse(5.0, is_ready=number % 3 == 0) for number in range(11)],
        [None] * 11,
        [CpuUse(5.0, is_ready=True)],
    ],
    ids=["it sleeps", "it runs in a loop", "it wakes now and then", "nothing is known", "a single look"],
)
def test_a_process_that_hangs_is_not_starved(uses: list[CpuUse | None]) -> None:
    assert starvation(uses) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list threads as files")
def test_a_process_that_sleeps_is_not_ready_and_one_in_a_loop_is() -> None:
    code = "input()\nwhile True: pass"
    argv = [sys.executable, "-S", "-E", "-c", code]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            until_s = time.monotonic() + 10
            while (use := cpu_use(process.pid)) is None or use.is_ready:  # it starts
                assert time.monotonic() < until_s
            process.stdin.write(b"\n")
            process.stdin.flush()
            while (now := cpu_use(process.pid)) is None or not (now.is_ready and now.used_s > use.used_s):
                assert time.monotonic() < until_s
        finally:
            process.kill()
    assert cpu_use(process.pid) is None
