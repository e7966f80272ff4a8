"""The real quickstart survives the death of every one of its processes, still learns, and says how well."""

import json
from pathlib import Path

import pytest

from drivers.kill_driver import TARGETS, Outcome, run_with_kills
from drivers.system_driver import astraflow

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_the_quickstart_survives_a_kill_of_each_part_in_one_run(
    quickstart_model: Path, tmp_path: Path
) -> None:
    outcome = run_with_kills(quickstart_model, tmp_path / "everything", TARGETS, seed=0, deadline_s=700)
    assert not outcome.problems, outcome.report()
    check_agreement(outcome, tmp_path / "exported")


def check_agreement(outcome: Outcome, model: Path) -> None:
    """The run's last evaluation and that of the exported model lie in each other's 95 % interval."""
    lines = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]
    record = [line for line in lines if line["kind"] == "eval"][-1]
    assert outcome.summary["heldout_after"] == pytest.approx(record["pass@1"], abs=1e-6)

    recipe = str(outcome.run_dir / "recipe.yaml")
    for command in (
        ("export", str(outcome.run_dir), str(model), "--version", str(record["version"])),
        ("eval", str(model), "--recipe", recipe, "--json"),
    ):
        done = astraflow(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    of_model = json.loads(done.stdout)["sets"][0]["pass_at_1"]
    assert of_model["low"] <= record["pass@1"] <= of_model["high"], (record, of_model)
    assert record["pass@1_low"] <= of_model["mean"] <= record["pass@1_high"], (record, of_model)
