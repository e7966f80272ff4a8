"""The quickstart in bad weather for at least 8 minutes; see `chaos_driver`.

`pytest -m long tests/long/test_chaos.py --log-cli-level=INFO` shows the figures.
"""

from pathlib import Path

import pytest

from drivers.chaos_driver import run_in_chaos

LEAST_S, LEAST_KILLS = 480.0, 30
PAUSE_S = 5.0
"""Pause of each of 51,200 episodes, at most 512 at once: 500 s in all, plus what the kills cost."""


@pytest.mark.long
@pytest.mark.timeout(4000)
def test_a_run_in_bad_weather_ends_by_itself_and_loses_nothing(
    quickstart_model: Path, tmp_path: Path
) -> None:
    outcome = run_in_chaos(quickstart_model, tmp_path, seed=0, pause_s=PAUSE_S, deadline_s=3600)
    assert not outcome.problems, outcome.report()
    assert outcome.wall_s >= LEAST_S, outcome.row()
    assert outcome.num_kills >= LEAST_KILLS, outcome.row()
    assert len(outcome.kills) == 5, outcome.row()
    assert outcome.num_joined >= 5, outcome.row()
    assert outcome.num_removed >= 2, outcome.row()
    assert min(outcome.num_cuts, outcome.num_slowed, outcome.num_acknowledged) >= 100, outcome.row()
