"""What `astraflow audit` and `astraflow run` end with when a run's accounting does not hold."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from astraflow.dataflow.journal.journal_db import make_insert
from drivers.system_driver import Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def falsify(journal: Path) -> None:
    """Says that a group was closed which was never drawn: nothing a run notices while it goes on."""
    row = make_insert("fates", ("actor", 1 << 40, "trained", 0, 0, 9, 1, 9))
    with contextlib.closing(sqlite3.connect(journal / "journal.sqlite", timeout=30)) as database, database:
        database.execute(*row)


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
    assert "the table holds 1 fates of closed groups, 0 were closed" in " ".join(audited.stdout.split())

    again = ("run", str(recipe), "--run-dir", str(run.run_dir), "--plain")
    assert astraflow(*again).returncode == 1  # With the summary that is there,
    (run.run_dir / "summary.json").unlink()
    assert astraflow(*again).returncode == 1  # and with one that is made now.
