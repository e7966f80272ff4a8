import subprocess
import sys
import threading
import time

import pytest

from astraflow.addons.math.cpu_limit import OutOfTimeError, within_cpu_time


def use_cpu(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def outcome_of(work: object, *, cpu_s: float = 0.05, wall_s: float = 60.0) -> str:
    assert callable(work)
    try:
        within_cpu_time(work, cpu_s=cpu_s, wall_s=wall_s)
    except OutOfTimeError:
        return "out of time"
    return "done"


def in_a_thread(work: object, *, cpu_s: float = 0.05, wall_s: float = 60.0) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(outcome_of(work, cpu_s=cpu_s, wall_s=wall_s)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("run", [outcome_of, in_a_thread])
def test_a_function_that_computes_too_long_is_ended_in_any_thread(run: object) -> None:
    assert callable(run)
    assert run(lambda: use_cpu(30.0)) == "out of time"
    assert run(lambda: use_cpu(0.001), cpu_s=10.0) == "done"


def test_time_in_which_others_have_the_processor_does_not_count() -> None:
    # The function waits for longer than its limit of CPU time, as on a busy machine or a slow disk.
    assert outcome_of(lambda: threading.Event().wait(0.2), cpu_s=0.1) == "done"
    # The CPU time of other threads does not count either.
    other = threading.Thread(target=use_cpu, args=[0.3])
    assert outcome_of(lambda: (other.start(), other.join()), cpu_s=0.25) == "done"


def test_a_function_that_waits_forever_is_ended_by_the_wall_clock() -> None:
    def waits() -> None:
        while True:
            threading.Event().wait(0.01)

    assert outcome_of(waits, cpu_s=30.0, wall_s=0.05) == "out of time"


def test_a_library_that_catches_everything_gets_the_exception_again() -> None:
    num_caught = 0

    def catches() -> None:
        nonlocal num_caught
        while True:
            try:
                use_cpu(30.0)
            except BaseException:
                num_caught += 1
                if num_caught == 2:
                    raise

    assert outcome_of(catches) == "out of time"
    assert num_caught == 2


def test_nothing_is_raised_after_the_function() -> None:
    outcomes = [outcome_of(lambda: use_cpu(0.001), cpu_s=0.001) for _ in range(100)]
    use_cpu(0.05)
    assert set(outcomes) <= {"done", "out of time"}
    assert not [thread for thread in threading.enumerate() if thread.name == "cpu limit" and stays(thread)]


def test_a_process_can_be_traced_after_a_limit() -> None:
    # CPython 3.11 hangs in the first traced function after an asynchronous exception was taken back, and no
    # signal ends that. Hence a process of its own.
    program = """
import sys
from astraflow.addons.math.cpu_limit import OutOfTimeError, within_cpu_time

def compute():
    while True:
        pass

within_cpu_time(lambda: 1, cpu_s=1, wall_s=1)
try:
    within_cpu_time(compute, cpu_s=0.01, wall_s=1)
except OutOfTimeError:
    pass
sys.setprofile(lambda *event: None)
(lambda: 1)()
sys.setprofile(None)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def stays(thread: threading.Thread) -> bool:
    thread.join(timeout=5)
    return thread.is_alive()
