"""A training loop in the verbs of the Tinker API drives a run of our services, and goes on after a kill."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.models.loading import load_causal_lm
from drivers.system_driver import ROOT, Runs, Started

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
EXAMPLE = ROOT / "examples" / "06_own_loop.yaml"


def metrics(run: Started, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def on_quickstart(quickstart_model: Path, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(quickstart_model.parent, tmp_path)
    yield made
    made.close()


@pytest.mark.long
def test_the_quickstart_is_learnt_through_the_verbs(on_quickstart: Runs, quickstart_model: Path) -> None:
    run = on_quickstart.start(
        EXAMPLE,
        f"policies.actor.model={quickstart_model}",
        "policies.actor.train.steps=20",
        "policies.actor.train.checkpoint_every=4",
        "eval.every=20",
    )
    run.read_until("actor step ")
    killed = run.pid_of("trainer-actor")
    os.kill(killed, signal.SIGKILL)
    assert run.finish() == 0, run.report()

    assert run.summary()["audit_ok"]
    assert run.pid_of("trainer-actor") != killed
    first, last = (line["score_mean"] for line in metrics(run, "eval"))
    assert last > first + 0.1, run.report()
    steps = metrics(run, "step")
    assert {step["step"] for step in steps} == {*range(1, 21)}
    assert steps[0]["behavior_gap"] < 1e-5  # the services' logprobs are the trainer's
    assert all(0 < found["behavior_gap"] < 0.2 and found["grad_norm"] > 0 for found in steps[1:])
    assert steps[-1]["version"] >= 20  # each step was published
    log = (run.run_dir / "logs" / "trainer-actor.log").read_text()
    assert "378 + 937: " in log  # sampled by an engine of the trainer's process
    load_causal_lm(run.run_dir / "checkpoints" / "actor" / "step-00000020")
    assert (run.run_dir / "checkpoints" / "actor" / "states" / "final" / "model.safetensors").is_file()
