"""100 steps of the quickstart with `exact: true`: no token's logprob differs between engine and trainer."""

import json
from pathlib import Path

import pytest

from drivers.system_driver import ROOT, Runs, astraflow

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(3600)]

NUM_STEPS = 100


def test_the_quickstart_has_no_gap_over_all_of_its_steps(quickstart_model: Path, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tmp_path)
    try:
        # Every token is of the version that is trained: of older versions the gap would be real.
        on_policy = ("policies.actor.table.max_staleness=0", "policies.actor.table.engine_lag=0")
        model = f"policies.actor.model={quickstart_model}"
        run = runs.start(ROOT / "recipes" / "quickstart.yaml", model, "exact=true", *on_policy)
        assert run.finish() == 0, run.report()
    finally:
        runs.close()
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert {row["staleness_max"] for row in steps} == {0.0}
    assert {row["behavior_gap_max"] for row in steps} == {0.0}
    assert {row["logprob_mismatch_max"] for row in steps} == {0.0}
    audit = astraflow("audit", str(run.run_dir))
    assert audit.returncode == 0, audit.stdout
