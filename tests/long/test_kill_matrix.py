"""Every part of the quickstart killed at seeded moments, each in a run of its own, and all in one.

`pytest tests/long/test_kill_matrix.py --log-cli-level=INFO` shows the figures of every run.
"""

from pathlib import Path

import pytest

from drivers.kill_driver import TARGETS, run_with_kills

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

_CASES = {target: (target,) for target in TARGETS} | {"everything": TARGETS}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", _CASES)
def test_a_run_survives(case: str, seed: int, quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / case.replace(" ", "-")
    outcome = run_with_kills(quickstart_model, run_dir, _CASES[case], seed=seed, deadline_s=1000)
    assert not outcome.problems, outcome.report()
