"""Solver and verifier of `recipes/math-multi-agent/tiny.yaml` learn together, by all real services."""

import json

import pytest

from drivers.system_driver import ROOT, Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(3600)]


def test_both_improve_and_the_system_beats_the_solver_alone(runs: Runs) -> None:
    overrides: list[str] = []
    for name in ("solver", "verifier"):
        model = runs.folder / name
        made = astraflow("model", "init", f"recipes/models/math-{name}.yaml", "--out", str(model))
        assert made.returncode == 0, made.stderr
        overrides.append(f"policies.{name}.model={model}")
    run = runs.start(ROOT / "recipes" / "math-multi-agent" / "tiny.yaml", *overrides)
    assert run.finish() == 0, run.report()
    assert run.summary()["audit_ok"], run.summary()["audit_problems"]
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = sorted((line for line in lines if line["kind"] == "eval"), key=lambda line: line["step"])
    before, after = evals[0], evals[-1]
    steps = {line["policy"]: line["step"] for line in lines if line["kind"] == "step"}
    assert set(steps) == {"solver", "verifier"}
    assert after["episode/first_score"] - before["episode/first_score"] >= 0.3, evals
    gained = [after[name] - before[name] for name in ("episode/approves_right", "episode/rejects_wrong")]
    assert sum(gained) / 2 >= 0.1, evals
    assert after["score_mean"] > after["episode/first_score"], evals
