"""Ends what a test left running: a pytest plugin for tests that start real processes.

Each process that such a test starts, directly or through others, inherits a variable with the test's own
value. So they are found wherever they are: in other process groups and sessions, and after their parents
have ended. A test that passes fails if a process does not end by itself. After a test that failed, such as
by its timeout, nobody waits: what is left is killed at once.
"""

import contextlib
import os
import secrets
from collections.abc import Generator, Iterator

import psutil
import pytest

from drivers.process_mark import MARK

__all__ = ["ENDS_WITHIN_S", "command_of", "end_processes", "nothing_is_left_running", "processes_with"]

ENDS_WITHIN_S = 30.0
"""A process that is ending may need this long on a busy machine. Only a test that leaves one waits for it."""
_STARTERS = ("system", "long")
"""Marks of tests that start real processes."""
_has_failed = pytest.StashKey[bool]()


def processes_with(value: str) -> list[psutil.Process]:
    """The processes that run, but for this one, whose variable has the value."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_other = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_other and process.environ().get(MARK) == value:
                found.append(process)
    return found


def end_processes(value: str, *, within_s: float) -> list[str]:
    """Kills those that do not end in time, and what they start meanwhile; returns their command lines."""
    psutil.wait_procs(processes_with(value), timeout=within_s)
    killed: list[str] = []
    while left := processes_with(value):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                killed.append(" ".join(process.cmdline()))
                process.kill()
        psutil.wait_procs(left, timeout=5.0)
    return killed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_has_failed] = True
    return report


@pytest.fixture(autouse=True)
def nothing_is_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before the test's other fixtures, so that what they end has ended."""
    if not any(request.node.get_closest_marker(name) for name in _STARTERS):
        yield
        return
    value = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, value)
        yield
    has_failed = request.node.stash.get(_has_failed, False)
    killed = end_processes(value, within_s=0.0 if has_failed else ENDS_WITHIN_S)
    if killed and not has_failed:
        pytest.fail("the test left processes running:\n" + "\n".join(killed))


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
