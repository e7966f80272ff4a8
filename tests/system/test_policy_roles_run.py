"""A whole run with one trained policy, one that follows it with a lag, and a frozen one."""

import re

import pytest
import yaml

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
