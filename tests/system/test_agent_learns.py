"""An unmodified agent of a library learns through the gateway; a program of its own process runs."""

import json
import sys

import pytest
import yaml

from drivers.system_driver import ROOT, Runs, Started, astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def heldout(run: Started) -> list[tuple[int, float, int]]:
    """(step, score, tasks) of each evaluation."""
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["score_mean"], line["num_tasks"]) for line in lines if line["kind"] == "eval"]


@pytest.mark.long
def test_a_library_agent_improves_by_a_fifth_on_tasks_it_never_saw(runs: Runs) -> None:
    model = runs.folder / "agent"
    made = astraflow("model", "init", "recipes/models/agent.yaml", "--out", str(model))
    assert made.returncode == 0, made.stderr
    run = runs.start(ROOT / "examples" / "sum_agent.yaml", f"policies.actor.model={model}")
    assert run.finish() == 0, run.report()
    assert run.summary()["audit_ok"]
    first, last = heldout(run)[0], heldout(run)[-1]
    assert (first[0], first[2] >= 128) == (0, True)
    assert last[1] - first[1] >= 0.2, heldout(run)
    assert run.summary()["wall_s"] < 180


def test_a_program_of_its_own_process_is_trained(runs: Runs) -> None:
    command = [sys.executable, str(ROOT / "examples" / "07_agent_unmodified.py")]
    workflow = {"name": "agent", "run": {"name": "program", "command": command}}
    path = runs.recipe(steps=1, workflow=workflow)
    recipe = yaml.safe_load(path.read_text())
    recipe["policies"]["actor"]["table"] = {"group_size": 2, "groups_per_batch": 2}
    recipe["rollout"]["max_episodes"] = 4
    path.write_text(yaml.safe_dump(recipe))
    run = runs.start(path)
    assert run.finish() == 0, run.report()
    assert run.summary()["audit_ok"]
