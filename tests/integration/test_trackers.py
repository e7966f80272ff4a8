"""Trackers in processes of their own: good ones, and ones that fail, hang or die."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from astraflow.addons.trackers.tracking import Trackers
from drivers.tracker_driver import TESTS, TrackedFolder, example, key_of, make_eval, make_step
from drivers.view_runs import RunWriter

NOTEBOOK = key_of("Notebook")


def steps_of(tracked: TrackedFolder, key: str) -> list[int]:
    return [json.loads(line)["step"] for line in tracked.kept(key, "rows")]


def test_a_tracker_gets_every_row_of_metrics_jsonl_and_is_closed(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path / "first", example("Notebook", prefix="mine: "))
    tracked.run(make_eval(0), *(make_step(step) for step in range(3)), make_eval(3, score=None))
    assert tracked.kept(NOTEBOOK, "rows") != []
    assert [json.loads(line) for line in tracked.kept(NOTEBOOK, "rows")] == [
        json.loads(line) for line in tracked.folder.metrics.read_text().splitlines()
    ]
    assert re.fullmatch(r"mine: demo first \w{8}", tracked.kept(NOTEBOOK, "opened")[0])
    assert tracked.kept(NOTEBOOK, "closed") == ["closed"]
    assert tracked.notes == []


def test_a_resumed_run_continues_the_same_run_of_the_tracker(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, example("Notebook"))
    tracked.run(make_step(0))
    tracked.run(make_step(1))
    assert steps_of(tracked, NOTEBOOK) == [1, 2]
    first, second = tracked.kept(NOTEBOOK, "opened")
    assert first == second


def test_a_tracker_that_is_named_at_a_resume_gets_what_came_before(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path)
    tracked.run(make_step(0))
    tracked.name(example("Notebook"))
    tracked.run(make_step(1))
    assert steps_of(tracked, NOTEBOOK) == [1, 2]


def test_one_that_cannot_be_opened_is_said_and_the_others_work(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, example("Failing"), example("Notebook"))
    tracked.start()
    tracked.write(make_step(0))
    wait_for(lambda: tracked.notes)
    tracked.close()
    assert steps_of(tracked, NOTEBOOK) == [1]
    assert (
        "drivers.tracker_examples-Failing ended with exit code 1: PermissionError: the key is not valid"
        in tracked.notes[0]
    )
    assert "the run continues" in tracked.notes[0]
    assert "drivers.tracker_examples-Failing did not process 1 rows" in tracked.notes[-1]


def test_one_that_hangs_slows_nobody_and_what_it_did_not_take_is_counted(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, example("Hanging"))
    tracked.start()
    tracked.write(make_step(0))
    wait_for(lambda: steps_of(tracked, key_of("Hanging")))
    began = time.monotonic()
    tracked.write(*(make_step(step) for step in range(1, 2001)))
    for process in psutil.Process().children():
        if process.status() == psutil.STATUS_ZOMBIE:  # one of another test, which has no command line
            continue
        if "astraflow.addons.trackers.tracker_process" in process.cmdline():
            process.suspend()
    for _ in range(1 << 17):  # more than the pipe of a stopped process holds
        tracked.wake()
    wrote_s = time.monotonic() - began
    tracked.close(deadline_s=1.0)
    assert time.monotonic() - began - wrote_s < 5.0
    assert wrote_s < 5.0
    assert tracked.notes == [tracked.notes[0]]
    assert "drivers.tracker_examples-Hanging did not process 2000 rows within 1 s" in tracked.notes[0]


def test_one_that_does_not_close_is_ended(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, example("HangingAtTheEnd"))
    tracked.start()
    tracked.write(make_step(0))
    wait_for(lambda: steps_of(tracked, key_of("HangingAtTheEnd")))
    tracked.close(deadline_s=1.0)
    assert tracked.notes == [
        "tracker drivers.tracker_examples-HangingAtTheEnd processed all rows, but did not close within 1 s"
    ]


def test_one_that_takes_nothing_for_long_is_started_again(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, example("Hanging"))
    tracked.start(longest_silence_s=1.0)
    tracked.write(make_step(0))
    wait_for(lambda: steps_of(tracked, key_of("Hanging")))
    tracked.write(make_step(1))
    wait_for(lambda: len(tracked.notes) > 0)
    assert "has processed no row for 1 s and is restarted" in tracked.notes[0]
    wait_for(lambda: len(tracked.kept(key_of("Hanging"), "opened")) > 1)
    tracked.close(deadline_s=0.5)


def test_a_run_that_fails_before_it_starts_its_trackers_ends(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, example("Notebook"))
    Trackers(tracked.recipe, tracked.folder, tracked.notes.append).close(1.0)
    assert tracked.notes == []


def test_one_that_dies_gets_its_rows_again(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, example("Dying"))
    tracked.start()
    tracked.write(make_step(0))
    wait_for(lambda: steps_of(tracked, key_of("Dying")))
    tracked.close()
    assert steps_of(tracked, key_of("Dying")) == [1]
    assert "ended with exit code 11" in tracked.notes[0]


def test_one_that_asks_a_question_gets_no_answer(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, example("Asking"))
    tracked.start()
    tracked.write(make_step(0))
    wait_for(lambda: tracked.notes)
    tracked.close()
    assert "EOFError" in tracked.notes[0]


def test_a_process_outlives_a_killed_launcher_only_to_hand_over_the_rest(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, example("Notebook"))
    script = (
        "import os, pathlib\nfrom drivers import tracker_driver as t\n"
        f"run = t.TrackedFolder(pathlib.Path({str(tmp_path)!r}), t.example('Notebook'))\n"
        "run.start(); run.write(t.make_step(0), t.make_step(1))\n"
        "while not run.kept(t.key_of('Notebook'), 'rows'): pass\n"
        "os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "PYTHONPATH": TESTS}
    assert subprocess.run([sys.executable, "-c", script], env=env, timeout=60).returncode == -9
    wait_for(lambda: tracked.kept(NOTEBOOK, "closed"))
    assert steps_of(tracked, NOTEBOOK) == [1, 2]
    tracked.run(make_step(2))
    assert steps_of(tracked, NOTEBOOK) == [1, 2, 3]


def wait_for(holds: Callable[[], object], timeout_s: float = 50.0) -> None:
    """Waits for what another process does to files."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_tracker_that_shows_episodes_gets_those_of_each_evaluation_once_they_are_known(
    tmp_path: Path,
) -> None:
    album = key_of("Album")
    tracked = TrackedFolder(tmp_path, example("Album"), example("Notebook"))
    journal = RunWriter(tmp_path)
    tracked.start()
    tracked.write(make_eval(3))  # its episodes are not in the tables yet
    for idx in range(20):
        journal.transcript(idx, 0.5, f"question {idx}", "answer", kind="eval", task=f"heldout/{idx}")
    journal.transcript(20, 1.0, "another set", kind="eval", task="other/1")
    journal.close()
    tracked.write(make_step(3))
    tracked.close()
    ((step, eval_set, episodes),) = [json.loads(line) for line in tracked.kept(album, "episodes")]
    assert (step, eval_set, len(episodes)) == (3, "heldout", 16)
    assert episodes[-1] == {
        "task": "heldout/19", "score": 0.5, "version": 3, "text": "user: question 19\nuser: answer",
    }  # fmt: skip
    assert steps_of(tracked, album) == [3, 4]
    assert steps_of(tracked, NOTEBOOK) == [3, 4]
