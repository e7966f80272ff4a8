"""The reason of a run's end, in words."""

import asyncio
import signal
from pathlib import Path

import pytest

from astraflow.errors import ServiceError
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.report.ending import interruption, known_end, reason_of


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGINT, "Ctrl-C"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGHUP, "terminal was closed"),
        (signal.SIGUSR1, "SIGUSR1"),
    ],
)
def test_each_signal_is_a_reason(number: signal.Signals, word: str) -> None:
    assert word in interruption(number)


def test_errors_of_ours_speak_for_themselves_and_others_with_their_class() -> None:
    assert reason_of(ServiceError("trainer-a failed")) == "trainer-a failed"
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert "cancelled" in reason_of(asyncio.CancelledError())


def test_a_long_reason_is_cut() -> None:
    assert len(reason_of(ServiceError("x" * 100_000))) < 5_000


def running(folder: RunFolder) -> RunRecord:
    record = RunRecord(name="n", state="running", launcher_pid=77, active=((1.0, 2.0),))
    folder.save_record(record)
    return record


def test_a_run_whose_launcher_was_killed_is_stopped_and_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    running(folder)
    end = known_end(folder)
    assert end.state == "stopped"
    assert "its launcher (process 77) is gone" in end.reason
    assert folder.load_record().state == "running", "only the launcher writes run.json"


def test_a_run_whose_launcher_has_its_folder_goes_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    record = running(folder)
    with folder.lock():
        assert known_end(folder) == record


def test_what_a_launcher_wrote_at_its_end_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    record = RunRecord(name="n", state="failed", reason="because")
    folder.save_record(record)
    assert known_end(folder) == record
