"""Settings of all tests, their order, and the quickstart's own model.

Every process that a test starts has one CPU thread: on few cores, more of them only slow each other. The
model takes half a minute to warm-start, so it is built once and kept in pytest's cache.
"""

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

from drivers.system_driver import Runs, astraflow, made_once

pytest_plugins = ["drivers.hung_tests", "drivers.left_over", "drivers.strict_skips"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# An example that the machine starved for a moment is no failure; pytest's timeout ends a test that hangs.
settings.register_profile("astraflow", deadline=None)
settings.load_profile("astraflow")

# The libraries that the tests import make half a million objects that stay. Python's own thresholds have the
# garbage collector look through them again and again.
gc.set_threshold(50_000, 20, 100)

_LONGEST_FIRST = ("system", "timed", "long", "integration", "property")
"""Folders of tests that take seconds each, the slowest first; what takes milliseconds comes last.

`timed` is not a folder: it is the group of the system tests that say how fast a run must stop or be reported.
They follow one another on one worker, after the other long ones, so that no other run is active.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, so that at the end, when no more are left to start, no worker waits long
    for another. `--no-loadscope-reorder` keeps this order; within a folder it stays random."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    groups = [str(mark.args[0]) for mark in item.iter_markers("xdist_group")]
    names = [*groups, *item.nodeid.partition("::")[0].split("/")]
    return max(
        (place for place, name in enumerate(_LONGEST_FIRST) if name in names), default=len(_LONGEST_FIRST)
    )


class _ByFile(LoadGroupScheduling):
    """Gives a worker the tests of a file or of a group: what they import and set up, one worker does."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if scope == nodeid else scope


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadGroupScheduling | None:
    return _ByFile(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_finish() -> None:
    """What is imported and collected stays until the end, so nobody needs to look for garbage in it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def runs(models: Path, tmp_path: Path) -> Iterator[Runs]:
    """Runs that leave nothing behind; `models` is the folder's own fixture."""
    made = Runs(models, tmp_path)
    yield made
    made.close()


# --- where the time goes ----------------------------------------------------------------------------

_NUM_FILES = 25
_LEAST_S = 60.0
"""A session of less processor time than this has no table."""
_began_cpu_s = pytest.StashKey[float]()


def _cpu_s() -> float:
    """Processor seconds of this process and of those that it started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_began_cpu_s] = _cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown" and _began_cpu_s in item.stash:
        report.user_properties.append(("cpu_s", _cpu_s() - item.stash[_began_cpu_s]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The folders and files whose tests take the most processor time, which makes CI slow on few cores."""
    cpu_s, wall_s = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in (each for each in reports if isinstance(each, pytest.TestReport)):
            file = report.nodeid.partition("::")[0]
            wall_s[file] += report.duration
            cpu_s[file] += sum(float(value) for name, value in report.user_properties if name == "cpu_s")
    if cpu_s.total() < _LEAST_S:
        return
    folders = Counter[str]()
    for file, seconds in cpu_s.items():
        folders["/".join(file.split("/")[:2])] += seconds
    terminalreporter.section("processor minutes, by folder")
    for folder, seconds in folders.most_common():
        terminalreporter.write_line(f"{seconds / 60:7.1f}  {folder}")
    terminalreporter.section("processor seconds, seconds, by file")
    for file, seconds in [*cpu_s.most_common(_NUM_FILES), ("all files", cpu_s.total())]:
        terminalreporter.write_line(f"{seconds:7.1f} {wall_s.get(file, wall_s.total()):7.1f}  {file}")


# --- models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def quickstart_model(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that `make quickstart` starts from; built again when its spec or its code changed."""
    assert pytestconfig.cache is not None, "pytest's cache is off"
    out = pytestconfig.cache.mkdir("models") / "quickstart"

    def make(_: Path) -> None:
        done = astraflow("model", "init", "recipes/models/quickstart.yaml", "--out", str(out))
        assert done.returncode == 0, done.stdout + done.stderr

    made_once(tmp_path_factory, "quickstart-model", make)
    return out
