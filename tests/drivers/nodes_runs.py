"""Runs whose trainer spans several nodes, and single-node runs to compare them with."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType] - numpy's types

from drivers.quickstart_elsewhere import GOOD
from drivers.system_driver import ROOT, Place, Runs, Started, num_steps, wait_until

ALIKE_STEPS = 3
ALIKE = (
    # One episode at a time and no staleness, so every run of the recipe samples the same tokens.
    "rollout.max_episodes=1",
    "policies.actor.table.max_staleness=0",
    "policies.actor.table.engine_lag=0",
    "policies.actor.train.checkpoint_every=1",
    "policies.actor.train.keep_checkpoints=9",
)
_BACK_S = 300.0
"""Time limit for all ranks to recover and take some steps."""
_STEPS_BETWEEN = 8


def first_steps(run: Started) -> tuple[list[tuple[float, float]], dict[str, bytes]]:
    """Loss and gradient norm of each of the first steps, and the weights after them."""
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] <= ALIKE_STEPS]
    checkpoint = run.run_dir / "checkpoints" / "actor" / f"step-{ALIKE_STEPS:08d}"
    weights = load_file(checkpoint / "model.safetensors")
    found = {name: tensor.tobytes() for name, tensor in weights.items()}
    return [(row["loss"], row["grad_norm"]) for row in rows], found


def train_through_failures(
    runs: Runs, model: Path, failures: Sequence[Callable[[], object]], *arguments: str, place: Place
) -> Started:
    """Trains the whole quickstart on two nodes, and causes a failure every few steps. Returns the
    finished run."""
    copied = shutil.copytree(model, runs.folder / "quickstart-model")
    run = runs.start(
        ROOT / "recipes" / "quickstart.yaml",
        f"policies.actor.model={copied}",
        "policies.actor.train.ranks=4",
        "policies.actor.train.nodes=2",
        "policies.actor.train.checkpoint_every=5",
        "rollout.services=1",
        *arguments,
        place=place,
    )
    for fail in failures:
        wanted = num_steps(run) + _STEPS_BETWEEN
        wait_until(run, lambda wanted=wanted: num_steps(run) >= wanted, timeout_s=_BACK_S)
        fail()
    assert run.finish() == 0, run.report()
    summary = run.summary()
    assert summary["audit_ok"], summary["audit_problems"]
    assert summary["heldout_after"] >= GOOD, run.report()
    return run
