"""Runs in which trainers lend emulated devices: their recipe, kills of their parts, and what must hold."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astraflow.addons.lending.uses import DeviceUse, find_problems, read_uses
from astraflow.dataflow.core.commands import AttemptFailed
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_events
from drivers.system_driver import Runs, Started, astraflow, num_steps, wait_until

__all__ = ["TARGETS", "check", "failed_attempts", "lending_recipe", "overrides", "run_with_kills", "uses_of"]

SCALE = 20.0
STEP_S = 6.0
TARGETS = ("trainer-actor", "rollout-1", "launcher")
"""Both tenants of the lent device, and the process with the arbiter."""
_LONGEST_WAIT_S = 120.0
_TOLERANCE_S = 0.05


def lending_recipe(runs: Runs, **sections: Any) -> Path:
    """One policy and two services; the device of the second one is the trainer's. Two turns of 10 emulated
    seconds each are half a second."""
    engine = {
        "name": "paced", "num_slots": 8, "tokens_per_s": 20.0, "mean_tokens": 200.0, "sigma": 0.5,
        "max_context": 4096, "time_scale": SCALE,
    }  # fmt: skip
    return runs.recipe(
        workflow={"name": "paced", "turns": 2, "time_scale": SCALE},
        rollout={"services": 2, "max_episodes": 8, "engine": engine},
        cluster={"lend": True},
        **sections,
    )


def overrides(*, steps: int) -> tuple[str, ...]:
    """What else differs from the recipe of `Runs`."""
    settings = {
        "sampling.max_tokens": 600,
        "train.backend": f"{{name: paced, step_s: {STEP_S}, time_scale: {SCALE}}}",
        "train.steps": steps,
    }
    return tuple(f"policies.actor.{key}={value}" for key, value in settings.items())


def run_with_kills(runs: Runs, targets: Sequence[str], *, seed: int, steps: int) -> Started:
    """Runs to the end. Kills each target a random time after the first step that follows the kill before."""
    rng = random.Random(seed)
    recipe = lending_recipe(runs)
    run = runs.start(recipe, *overrides(steps=steps))
    for target in targets:
        done = num_steps(run)
        wait_until(run, lambda run=run, done=done: num_steps(run) > done, timeout_s=_LONGEST_WAIT_S)
        time.sleep(rng.uniform(0.0, 1.5))
        if target == "launcher":
            os.kill(run.process.pid, signal.SIGKILL)
            run.finish()
            run = runs.start(recipe, *overrides(steps=steps))
        else:
            os.kill(run.pid_of(target), signal.SIGKILL)
    assert run.finish() == 0, run.report()
    return run


def uses_of(run: Started) -> list[DeviceUse]:
    """The uses of all devices."""
    return read_uses(run.run_dir / "lending.jsonl")


def failed_attempts(run: Started) -> Counter[str]:
    """How many attempts failed, by class."""
    with JournalReader(run.run_dir / "journal") as reader:
        events = [event for record in reader.records() for group in decode_events(record) for event in group]
    return Counter(event.error_class for event in events if isinstance(event, AttemptFailed))


def misplaced_spans(run: Started) -> list[str]:
    """What the journal says of the tenants' work and `lending.jsonl` of the device, where they disagree: a
    trainer that works while it doesn't have the device, or a rollout service that works while the trainer
    has it."""
    with JournalReader(run.run_dir / "journal") as reader:
        rows = reader.telemetry()
    rollout = max(row.source for row in rows if row.source.startswith("rollout-"))
    wrong: list[str] = []
    for use in uses_of(run):
        trains = use.use == "train"
        worker, kind = (rollout, "generate") if trains else ("trainer actor", "train")
        for row in rows:
            end_s = min(row.span.end_s, use.end_ns / 1e9)
            overlap_s = end_s - max(row.span.start_s, use.begin_ns / 1e9)
            if (row.source, row.span.kind) == (worker, kind) and overlap_s > _TOLERANCE_S:
                wrong.append(f"{worker}: {kind} for {overlap_s:.3f} s of {use}")
    return wrong


def check(run: Started) -> None:
    """Checks the audit of a finished run, that each second of its devices has one use, and that the tenants
    worked only in their turns."""
    assert find_problems(uses_of(run)) == []
    assert misplaced_spans(run) == []
    audit = astraflow("audit", str(run.run_dir))
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "device of actor: " in audit.stdout
    assert run.summary()["audit_ok"], run.report()
