"""Whole runs of several policies: trained, frozen, and one that follows another with a lag."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml

from astraflow.dataflow.audit import audit
from astraflow.dataflow.journal.reader import JournalReader
from drivers.system_driver import Runs, Started, astraflow

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


def tables_of(run: Started, policy: str) -> dict[str, set[str]]:
    """The names of the tensors of what a policy's publisher keeps, by the policy of the manifest."""
    folder = run.run_dir / "weights" / policy / "manifests"
    found: dict[str, set[str]] = {}
    for path in folder.glob("*/*.json"):
        tensors = json.loads(path.read_text())["tensors"]
        found.setdefault(path.parent.name, set()).update(tensor["name"] for tensor in tensors)
    return found


def test_roles_that_train_adapters_of_one_model_share_its_base(runs: Runs, tmp_path: Path) -> None:
    debate = {"name": "debate", "num_debaters": 2, "debate_prompt": "{prompt}"}
    path = runs.recipe(policies=("actor", "verifier"), steps=8, workflow=debate, weights={"delta": True})
    recipe = yaml.safe_load(path.read_text())
    for rank, policy in enumerate(recipe["policies"].values(), start=2):
        policy["model"] = recipe["policies"]["actor"]["model"]
        policy["train"]["backend"] = {"name": "torch", "lora": {"rank": rank}}
    path.write_text(yaml.safe_dump(recipe))
    assert "actor, verifier: train adapters of one base" in astraflow("run", str(path), "--dry-run").stderr
    run = runs.start(path)
    run.read_until("verifier step ")
    os.kill(run.pid_of("trainer-verifier"), signal.SIGKILL)
    assert run.finish() == 0, run.report()
    summary = run.summary()
    assert summary["audit_ok"], summary["audit_problems"]
    assert [policy["steps"] for policy in summary["policies"]] == [8, 8]
    bases: set[str] = set()
    for policy in recipe["policies"]:
        tables = tables_of(run, policy)
        assert all(".lora_" in name for name in tables.pop(policy))
        ((base, names),) = tables.items()
        assert not any(".lora_" in name for name in names)
        bases.add(base)
        assert (
            f"policy {policy} is served by the engine of {base}"
            in (run.run_dir / "logs" / "rollout-0.log").read_text()
        )
        done = astraflow("export", str(run.run_dir), str(tmp_path / policy), "--policy", policy)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / policy / "adapter" / "adapter_config.json").is_file()
    assert len(bases) == 1


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
