"""Says where a test hangs, and ends one that its timeout can't end: a pytest plugin.

pytest-timeout raises an exception once, and shows where the main thread is. In an async test, that is the
event loop, so the report of a test that has timed out also lists where each of the loop's tasks waits.

The exception is lost in code that waits in C or in a finalizer, and nothing ends a teardown that hangs after
it. Then the test, and all of CI, would wait for ever. So each phase of a test is given `GRACE_S` beyond the
test's timeout. After that, every thread's stack is printed, and the process ends: under pytest-xdist the test
fails, and another worker goes on with the rest.
"""

import asyncio
import faulthandler
import inspect
import types
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

__all__ = ["GRACE_S"]

GRACE_S = 120.0


def limit_s(item: pytest.Item) -> float:
    """The test's timeout, by its mark or by the setting, in seconds."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark else item.config.getini("timeout"))


def ended_if_hung(item: pytest.Item) -> Generator[None, object, object]:
    # pytest's own copy of stderr, as descriptor 2 is being captured
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit_s(item) + GRACE_S, exit=True, file=stderr)
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
