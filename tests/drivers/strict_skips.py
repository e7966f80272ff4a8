"""Fails what skips where `CI=true`, apart from what `tests/skips.txt` allows: a pytest plugin.

A missing program hides the tests that need it: a run that skips them looks as green as one that passes them.
"""

import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest

__all__ = ["ALLOWED"]

ALLOWED = Path(__file__).parents[1] / "skips.txt"


def is_allowed(file: str, reason: str) -> bool:
    """Whether a line of the list names this file and matches the beginning of this reason."""
    lines = (line.partition(": ") for line in ALLOWED.read_text().splitlines() if not line.startswith("#"))
    return any(file == named and re.match(pattern, reason) for named, _, pattern in lines if named)


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Lets a report fail if it skips and may not."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = said.removeprefix("Skipped: ")
    if not is_allowed(report.nodeid.partition("::")[0], reason):
        report.outcome = "failed"
        report.longrepr = f"skipped where CI=true, and {ALLOWED.name} doesn't allow it: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    judge(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    judge(report)
    return report
