"""Events of a long run: each has its step, and those of the end are shown, too."""

import sqlite3

from astraflow.addons.view.schema import create
from astraflow.addons.view.timeline import between, newest_happenings

NUM_STEPS = 2000


def long_run() -> sqlite3.Connection:
    """A service joins, many steps are taken, and it restarts in the last one."""
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    create(database, "run-1")
    rows = [(0.0, "join", "rollout-0", None)]
    rows += [(float(step), "take", "actor", step) for step in range(1, NUM_STEPS + 1)]
    rows += [(NUM_STEPS + 1.0, "restart", "rollout-0", None)]
    insert = "INSERT INTO happenings (at_s, kind, who, step, text) VALUES (?, ?, ?, ?, '')"
    database.executemany(insert, rows)
    return database


def test_an_event_belongs_to_the_step_before_it() -> None:
    events = newest_happenings(long_run())
    assert [(event["kind"], event["step"]) for event in events] == [("restart", NUM_STEPS), ("join", None)]


def test_a_long_run_is_shown_to_its_end() -> None:
    events = between(long_run(), None, None)["happenings"]
    assert [events[0]["kind"], events[-1]["kind"]] == ["join", "restart"]
    steps = [event["step"] for event in events if event["kind"] == "take"]
    assert 300 < len(steps) < 600
    assert steps[-1] > NUM_STEPS - 10
