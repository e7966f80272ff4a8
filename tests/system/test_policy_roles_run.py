"""Whole runs of several policies: trained, frozen, and one that follows another with a lag."""

import re

import pytest
import yaml

from astraflow.dataflow.audit import audit
from astraflow.dataflow.journal.reader import JournalReader
from drivers.system_driver import Runs

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def test_a_frozen_policy_and_a_follower_take_part_and_only_one_policy_trains(runs: Runs) -> None:
    debate = {"name": "debate", "num_debaters": 3, "debate_prompt": "{prompt}"}
    path = runs.recipe(policies=("actor", "verifier"), steps=8, workflow=debate)
    recipe = yaml.safe_load(path.read_text())
    recipe["policies"]["verifier"]["role"] = "frozen"
    model = recipe["policies"]["actor"]["model"]
    past = {"model": model, "sampling": {"max_tokens": 8}, "role": "follower", "follows": "actor", "lag": 3}
    recipe["policies"]["past"] = past
    path.write_text(yaml.safe_dump(recipe))
    run = runs.start(path)
    assert run.finish() == 0, run.report()
    summary = run.summary()
    assert summary["audit_ok"], summary["audit_problems"]
    assert [policy["name"] for policy in summary["policies"]] == ["actor"]
    log = (run.run_dir / "logs" / "rollout-0.log").read_text()
    served = {
        policy: [int(v) for v in re.findall(rf"policy {policy} serves version (\d+) \(live\)", log)]
        for policy in ("actor", "past", "verifier")
    }
    assert served["verifier"] == [0]
    assert served["past"][0] == 0
    assert 1 <= served["past"][-1] <= 5
    assert served["actor"][-1] >= served["past"][-1] + 3


def test_the_engines_of_a_service_share_its_device(runs: Runs) -> None:
    scale = 5.0
    names = ("actor", "verifier")
    engine = {"name": "paced", "num_slots": 1, "tokens_per_s": 100.0, "mean_tokens": 50.0, "sigma": 0.0}
    path = runs.recipe(
        policies=names,
        steps=1,
        workflow={"name": "paced", "time_scale": scale},
        rollout={"max_episodes": 16, "engine": {**engine, "time_scale": scale}},
    )
    settings = {
        "sampling.max_tokens": 50,
        "train.backend": f"{{name: paced, step_s: 0, time_scale: {scale}}}",
    }
    run = runs.start(
        path, *(f"policies.{name}.{key}={value}" for name in names for key, value in settings.items())
    )
    assert run.finish() == 0, run.report()
    journal = run.run_dir / "journal"
    with JournalReader(journal) as reader:
        ended_s = max(step.at_s for step in reader.steps())
    alone_s = 16 * 50 / 100.0  # of each policy's completions, one after the other
    assert scale * (ended_s - audit(journal).first_lease_s) >= 2 * alone_s
