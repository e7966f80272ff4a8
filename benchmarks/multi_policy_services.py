"""Runs schedules of `schedules.py` with real services and the real clock, to measure what the virtual clock
leaves out.

All processes, protocols, versions, leases, and batches are real. Only the models are `paced`: completions
take the time that they would take on a device, and training steps sleep. Emulated time runs `scale` times
faster than the clock, and a token here stands for 16 tokens, so that two cores can keep up. Seconds below are
emulated.

A trainer-centered loop has one trainer, so the run of a schedule in lockstep also has one; its second policy
is frozen.
"""

import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from astraflow.addons.lending.uses import find_problems, read_uses
from astraflow.dataflow.core.commands import LeaseIssued
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_commands, decode_events
from astraflow.recipe.run_folder import RunFolder
from schedules import ENV_S, ENV_SIGMA, NUM_SLOTS, POLICIES, SPARE, Schedule, Work

__all__ = ["Services", "run_services"]

TOKEN = 16
"""Number of tokens that one token of the run stands for."""


@dataclass(frozen=True)
class Services:
    """The result of a run with real services."""

    wall_s: float
    """Emulated seconds from the first lease to the last commit."""
    staleness_mean: float
    staleness_max: int
    audit_ok: bool
    switch_s: float
    """Emulated seconds that a device needs to go from generation to training, on average; 0 without lending.
    The way back takes no time."""


def recipe_of(
    schedule: Schedule, work: Work, *, steps: int, seed: int, scale: float, model: Path
) -> dict[str, Any]:
    """Makes the recipe of a schedule."""
    step_s = schedule.step_s(work)
    names = POLICIES[:1] if schedule.is_lockstep else POLICIES
    num_devices = schedule.num_generating(work)
    table = schedule.table_of(work)
    policies: dict[str, Any] = {}
    for idx, name in enumerate(POLICIES):
        backend = {"name": "paced", "step_s": step_s[min(idx, len(step_s) - 1)], "time_scale": scale}
        policies[name] = {
            "model": str(model),
            "role": "trained" if name in names else "frozen",
            "sampling": {"max_tokens": work.max_tokens[idx] // TOKEN},
            "table": {
                "group_size": table.group_size,
                "groups_per_batch": table.groups_per_batch,
                **schedule.table,
            },
            "train": {"steps": steps, "backend": backend, "checkpoint_every": 1000},
        }
    speed = {name: value / TOKEN for name, value in work.speed().items()}
    engine = {
        "name": "paced",
        "num_slots": NUM_SLOTS,
        "max_context": 2 * max(work.max_tokens) // TOKEN,
        "mean_tokens": work.mean_tokens[0] / TOKEN,
        "sigma": work.sigma,
        "time_scale": scale,
        **speed,
    }
    # If a batch does not fill the devices, each takes its share of it.
    held = (
        min(NUM_SLOTS + SPARE, math.ceil(work.episodes / num_devices))
        if schedule.is_lockstep
        else NUM_SLOTS + SPARE
    )
    return {
        "name": "multi-policy",
        "seed": seed,
        "tasks": {
            "sources": {"sums": {"name": "reasoning_gym", "dataset": "basic_arithmetic", "size": 20000}}
        },
        "workflow": {"name": "paced", "env_s": ENV_S, "env_sigma": ENV_SIGMA, "time_scale": scale},
        "policies": policies,
        "rollout": {"services": num_devices, "engine": engine, "max_episodes": held},
        "dataflow": {"retain": 0, "snapshot_every": 10_000_000, "admission": schedule.admission},
        "cluster": {"lend": schedule.lends},
    }


def run_services(
    schedule: Schedule, work: Work, *, steps: int, seed: int, scale: float, model: Path, folder: Path
) -> Services:
    """Runs a schedule, unless its folder holds a finished run. Raises: CalledProcessError if it fails."""
    summary = folder / "run" / "summary.json"
    if not summary.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path = folder / "recipe.yaml"
        recipe = recipe_of(schedule, work, steps=steps, seed=seed, scale=scale, model=model)
        path.write_text(yaml.safe_dump(recipe))
        argv = [sys.executable, "-m", "astraflow.cli.main", "run", str(path), "--plain"]
        print(f"+ {schedule.name}, real services, seed {seed}", file=sys.stderr, flush=True)
        subprocess.run([*argv, "--run-dir", str(folder / "run")], check=True, stdout=sys.stderr)
    return _read(folder / "run", json.loads(summary.read_text()), scale)


def _read(run_dir: Path, summary: Mapping[str, Any], scale: float) -> Services:
    """Reads a finished run's journal."""
    begun = list[float]()
    with JournalReader(RunFolder(run_dir).journal) as journal:
        for record in journal.records():
            for _, events in zip(decode_commands(record), decode_events(record), strict=True):
                begun += [record.at_s for event in events if isinstance(event, LeaseIssued)]
        last_s = max(step.at_s for step in journal.steps())
    uses = read_uses(run_dir / "lending.jsonl")
    switches = [(use.end_ns - use.begin_ns) / 1e9 for use in uses if use.use == "switch"]
    return Services(
        wall_s=(last_s - min(begun)) * scale,
        staleness_mean=summary["staleness_mean"],
        staleness_max=summary["staleness_max"],
        audit_ok=summary["audit_ok"] and not find_problems(uses),
        switch_s=statistics.fmean(switches) * scale if switches else 0.0,
    )
