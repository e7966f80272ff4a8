"""`astraflow conformance` over real processes: our own services, and the substitutes among the examples."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from drivers.system_driver import ROOT, Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
OURS = f"{sys.executable} -m astraflow.cli.main"
NODE = shutil.which("node")


def verdicts(*arguments: str) -> dict[str, Any]:
    """What a kit says, as it says it to programs."""
    done = astraflow("conformance", *arguments, "--json", "--patience", "240")
    report = json.loads(done.stdout or "{}")
    assert report, done.stderr
    broken = [v for v in report["verdicts"] if v["outcome"] == "broken"]
    assert (done.returncode, broken) == (0, []), done.stderr
    return {v["rule"]: v["outcome"] for v in report["verdicts"]}


def not_kept(found: dict[str, Any]) -> set[str]:
    return {rule for rule, outcome in found.items() if outcome != "kept"}


def test_our_dataflow_keeps_the_rules_though_it_is_killed(runs: Runs) -> None:
    recipe = str(runs.recipe())
    found = verdicts("dataflow", f"{OURS} serve {{run_dir}} --port {{port}}", "--recipe", recipe, "--quick")
    assert not_kept(found) == {"D15", "D16", "D19", "D31"}  # waits; no evaluation set; no tokens


def test_a_candidate_that_is_no_service_fails(tmp_path: Path, runs: Runs) -> None:
    candidate = f"{sys.executable} -c pass"
    done = astraflow(
        "conformance", "trainer", candidate, "--recipe", str(runs.recipe()), "--patience", "3", "--json"
    )
    assert done.returncode == 1
    outcomes = {v["rule"]: v["outcome"] for v in json.loads(done.stdout)["verdicts"]}
    assert outcomes["T1"] == "broken"
    assert set(outcomes.values()) == {"broken", "not checked"}


def test_a_placeholder_that_does_not_exist_is_named(runs: Runs) -> None:
    done = astraflow("conformance", "trainer", "train {flavour}", "--recipe", str(runs.recipe()))
    assert done.returncode == 2
    assert "{run_dir}" in done.stderr
    assert "flavour" in done.stderr


@pytest.mark.long
def test_our_rollout_service_keeps_every_rule(runs: Runs) -> None:
    assert (
        not_kept(verdicts("rollout", f"{OURS} join {{url}} --name ours", "--recipe", str(runs.recipe())))
        == set()
    )


@pytest.mark.long
def test_our_trainer_keeps_every_rule(runs: Runs) -> None:
    command = f"{OURS} train {{run_dir}} --policy {{policy}} --url {{url}} --publisher {{publisher}}"
    assert not_kept(verdicts("trainer", command, "--recipe", str(runs.recipe()))) == set()


@pytest.mark.long
def test_the_plain_trainer_keeps_every_rule(runs: Runs) -> None:
    command = (
        f"{sys.executable} {ROOT}/examples/plain_trainer.py {{url}} {{policy}} {{model_dir}} {{checkpoints}}"
    )
    assert not_kept(verdicts("trainer", command, "--recipe", str(runs.recipe()))) == set()


@pytest.mark.long
@pytest.mark.skipif(NODE is None, reason="node is not installed here")
def test_the_rollout_service_in_node_keeps_every_rule(runs: Runs) -> None:
    command = f"{NODE} {ROOT}/examples/node-rollout/service.mjs {{url}} {{token}}"
    assert not_kept(verdicts("rollout", command, "--recipe", str(runs.recipe()))) == set()
