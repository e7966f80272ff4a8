"""Says where a test hangs, and ends one that its timeout can't end: a pytest plugin.

pytest-timeout raises an exception once, and shows where the main thread is. In an async test, that is the
event loop, so the report of a test that has timed out also lists where each of the loop's tasks waits.

The exception is lost in code that waits in C or in a finalizer, and nothing ends a teardown that hangs after
it. Then the test, and all of CI, would wait forever. So each phase of a test is given `GRACE_S` beyond the
test's timeout. After that, the process writes every thread's stack, and ends: under pytest-xdist the test
fails, another worker goes on with the rest, and the summary shows the stacks, as
it does after a crash.
"""

import asyncio
import faulthandler
import inspect
import os
import tempfile
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

__all__ = ["GRACE_S"]

GRACE_S = 120.0
_FOLDER_VARIABLE = "ASTRAFLOW_STACKS_OF_TESTS"
"""The folder into which the workers of a session write stacks, if there are any workers."""
_target = pytest.StashKey[int]()


def limit_s(item: pytest.Item) -> float:
    """The test's timeout, by its mark or by the setting, in seconds."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark else item.config.getini("timeout"))


@pytest.hookimpl(trylast=True)  # after pytest's own plugin, which would send the stacks of crashes to stderr
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_target] = config.stash[fault_handler_stderr_fd_key]  # descriptor 2 is being captured
    if worker := getattr(config, "workerinput", None):
        path = Path(os.environ[_FOLDER_VARIABLE]) / worker["workerid"]
        config.stash[_target] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        faulthandler.enable(config.stash[_target])
    else:
        os.environ[_FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="stacks-")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if hasattr(terminalreporter.config, "workerinput"):  # a worker has a summary, too, which nobody sees
        return
    folder = Path(os.environ[_FOLDER_VARIABLE])
    for path in sorted(folder.iterdir()):
        if text := path.read_text(errors="replace"):
            terminalreporter.section(f"stacks of {path.name}, which hung or crashed")
            terminalreporter.write_line(text)
        path.unlink()
    folder.rmdir()


def ended_if_hung(item: pytest.Item) -> Generator[None, object, object]:
    faulthandler.dump_traceback_later(limit_s(item) + GRACE_S, exit=True, file=item.config.stash[_target])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from ended_if_hung(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from ended_if_hung(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from ended_if_hung(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    has_timed_out = call.excinfo is not None and str(call.excinfo.value).startswith("Timeout (>")
    if has_timed_out and inspect.iscoroutinefunction(getattr(item, "function", None)):
        report.sections.append(("where tasks wait", "\n\n".join(waits())))
    return report


def waits() -> Iterator[str]:
    """Where each task of the current event loop waits: the lines of its coroutines, from the outermost."""
    for task in asyncio.all_tasks(asyncio.get_event_loop()):
        yield "\n".join([f"{task.get_name()}:", *lines_of(task.get_coro())])


def lines_of(awaited: Any) -> Iterator[str]:
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if isinstance(frame, types.FrameType):
            yield f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
