"""What `astraflow audit` and `astraflow run` end with when a run's accounting does not hold."""

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest

from drivers.system_driver import Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

_NUM_TRAINED = "SELECT count(*) FROM fates WHERE fate = 'trained'"
_FALSIFY = "UPDATE fates SET fate = 'filtered' WHERE fate = 'trained'"


def falsify(journal: Path) -> None:
    """Says of groups that are trained that they were filtered: nothing a run notices while it goes on."""
    deadline = time.monotonic() + 60
    with contextlib.closing(sqlite3.connect(journal / "journal.sqlite", timeout=30)) as database:
        while not database.execute(_NUM_TRAINED).fetchone()[0]:
            assert time.monotonic() < deadline, "no group is trained in the tables"
            time.sleep(0.05)
        database.execute(_FALSIFY)
        database.commit()


def test_a_run_whose_audit_fails_ends_with_1_however_it_is_asked(runs: Runs) -> None:
    recipe = runs.recipe(steps=6)
    run = runs.start(recipe)
    run.read_until("step 1")
    falsify(run.run_dir / "journal")
    assert run.finish() == 1, run.report()
    summary = run.summary()
    assert (summary["state"], summary["audit_ok"]) == ("finished", False)

    audited = astraflow("audit", str(run.run_dir))
    assert audited.returncode == 1, audited.stdout + audited.stderr
    assert "DOES NOT HOLD" in audited.stdout
    assert "is filtered, step" in audited.stdout

    again = ("run", str(recipe), "--run-dir", str(run.run_dir), "--plain")
    assert astraflow(*again).returncode == 1  # With the summary that is there,
    (run.run_dir / "summary.json").unlink()
    assert astraflow(*again).returncode == 1  # and with one that is made now.
