"""Runs one arm of a comparison: a recipe with changes and a seed, with all real services.

A result has the arm's curve, its figures, and where it was measured. `at_s` counts from the first lease to
the commit of the evaluated version. Rollouts, completions, and sampled tokens are those of finished training
episodes up to that commit. Waits leave out that of the first step, which begins before the first lease.
"""

import asyncio
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.addons.experiments.results import metric_rows
from astraflow.addons.export.saved_versions import SavedVersions
from astraflow.config import parse_config
from astraflow.dataflow.audit import audit
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.recipe.document import full_mapping
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.run.run import launch
from harness import OthersLoad
from services import Services, deliveries
from shaped_link import Link

__all__ = ["ROOT", "Arm", "Found", "Pool", "Result", "provenance", "reached", "run_arm"]

ROOT = Path(__file__).resolve().parent.parent
MODULES = (str(ROOT), str(ROOT / "benchmarks"))
Result = dict[str, Any]
"""What `run_arm` returns: `points`, `figures`, and the facts about the measurement."""


@dataclass(frozen=True)
class Pool:
    """A rollout service that the arm starts, behind a link if there is one."""

    name: str
    num_slots: int
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison."""

    name: str
    recipe: str
    """Name of the recipe that it changes, below `recipes/`."""
    changes: Mapping[str, Any]
    """Dotted keys of the recipe -> values."""
    policies: Mapping[str, Mapping[str, Any]] | None = None
    """If given, these policies replace the recipe's only one, each with its changes of that one."""
    pools: tuple[Pool, ...] = ()
    """If given, they replace the recipe's own services."""

    def recipe_of(self, seed: int, steps: int) -> Recipe:
        """Makes the recipe of a run; `steps` above 0 shortens it for a trial."""
        mapping: dict[str, Any] = full_mapping(ROOT / "recipes" / f"{self.recipe}.yaml", self.changes)
        mapping["seed"] = seed
        if self.pools:
            mapping["rollout"]["services"] = 0
        if self.policies is not None:
            (first,) = mapping["policies"].values()
            mapping["policies"] = {name: _merged(first, own) for name, own in self.policies.items()}
        for policy in mapping["policies"].values():
            policy["model"] = str(ROOT / policy["model"])
            if steps and "train" in policy:
                policy["train"]["steps"] = steps
        if steps:
            mapping["eval"]["every"] = steps
            for each in mapping["eval"]["sets"].values():
                each["num_tasks"] = min(8, each["num_tasks"])
        return parse_config(mapping, Recipe)


def _merged(mapping: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy with dotted keys set; None removes a key."""
    made = deepcopy(dict(mapping))
    for dotted, value in changes.items():
        *folders, last = dotted.split(".")
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        place.pop(last, None)
        if value is not None:
            place[last] = value
    return made


def make_model(folder: Path) -> None:
    """Makes or fetches a model of `recipes/models` that is missing."""
    if folder.is_dir():
        return
    spec = ROOT / "recipes" / "models" / f"{folder.name}.yaml"
    words = ("fetch", folder.name) if "package:" in spec.read_text() else ("init", str(spec))
    argv = [sys.executable, "-m", "astraflow.cli.main", "model", *words, "--out", str(folder)]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=sys.stderr)


def run_arm(arm: Arm, seed: int, work: Path, *, steps: int = 0) -> Result:
    """Makes a run in an empty folder, and returns its result. Raises: RuntimeError if it doesn't finish."""
    sys.path += [folder for folder in MODULES if folder not in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join(MODULES)  # for the services of pools
    recipe = arm.recipe_of(seed, steps)
    for policy in recipe.policies.values():
        make_model(policy.model_dir)
    measured = provenance()  # before the run, during which somebody may commit
    load = OthersLoad()
    began_s = time.monotonic()
    asyncio.run(_train(arm, recipe, work))
    minutes = (time.monotonic() - began_s) / 60
    return measured | {
        "minutes": round(minutes, 1),
        "others_load": round(load.lap(), 2),
        **_read(arm, recipe, work),
    }


async def _train(arm: Arm, recipe: Recipe, work: Path) -> None:
    async with launch(recipe, work / "run", module_path=MODULES) as run:
        services = Services(run, work)
        try:
            for pool in arm.pools:
                await services.start(
                    pool.name,
                    engine={"num_slots": pool.num_slots},
                    rollout={"max_episodes": pool.num_slots},
                    link=pool.link,
                )
            async for step in run.steps(next(iter(recipe.trained))):
                if arm.pools and step.step < next(iter(recipe.trained.values())).train.steps - 1:
                    await services.look()
            state = await run.wait()
        finally:
            await services.close()
    if state != "finished":
        raise RuntimeError(f"{arm.name}: the run ended as {state}; its logs are in {work / 'run' / 'logs'}")


def provenance() -> dict[str, Any]:
    """Says where and when something is measured."""
    git = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    return {
        "commit": git.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {processor}",
    }


# --- what a run reached ---------------------------------------------------------------------------


def _read(arm: Arm, recipe: Recipe, work: Path) -> dict[str, Any]:
    folder = RunFolder(work / "run")
    rows = metric_rows(folder)
    steps = [row for row in rows if row["kind"] == "step"]
    names = list(recipe.trained)
    first = [row for row in steps if row["policy"] == names[0]]
    found = audit(folder.journal)
    evals = [row for row in rows if row["kind"] == "eval" and row["policy"] == names[0]]
    points = [_point(row, first, found.first_lease_s) for row in evals]
    wall_s = max(row["at_s"] for row in steps) - found.first_lease_s
    dropped = sum(row["num_discarded_groups"] for row in steps)
    figures: dict[str, Any] = {
        "wall_s": wall_s,
        "tokens_per_s": _total(first, "sampled_tokens") / wall_s,
        "wait_frac": sum(row["batch_wait_s"] for row in steps if row["step"] > 1) / wall_s / len(names),
        "staleness_mean": statistics.fmean(row["staleness_mean"] for row in steps),
        "staleness_max": max(row["staleness_max"] for row in steps),
        "dropped_frac": dropped / (dropped + sum(row["num_groups"] for row in steps)),
        "audit_holds": json.loads(folder.summary.read_text())["audit_ok"],
    }
    if recipe.weights.delta:
        figures |= _sizes(folder, names[0])
    if arm.pools:
        figures |= _shares(arm.pools, folder)
    return {"points": points, "figures": figures}


def _point(row: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], began_s: float) -> dict[str, Any]:
    """Returns an evaluation with what had been spent on its version."""
    done = [step for step in steps if step["step"] <= row["step"]]
    point = {
        "set": row["eval_set"],
        "step": row["step"],
        "at_s": done[-1]["at_s"] - began_s if done else 0.0,
        "rollouts": _total(done, ""),
        "completions": _total(done, "turns"),
        "tokens": _total(done, "sampled_tokens"),
        "score": row["score_mean"],
        "stderr": row["score_stderr"],
    }
    extra = ("first_score", "proposal_score", "best_score", "unreadable", "all")
    return point | {name: row[f"episode/{name}"] for name in extra if f"episode/{name}" in row}


def _total(steps: Sequence[Mapping[str, Any]], metric: str) -> float:
    """Returns the sum of a metric over the episodes of some steps, or their number.

    A step without a new episode has no such columns.
    """
    own = [step for step in steps if "episodes" in step]
    return sum(step["episodes"] * (step[f"episode/{metric}"] if metric else 1) for step in own)


def _sizes(folder: RunFolder, policy: str) -> dict[str, float]:
    """Measures the versions that a run kept: bytes as a delta and in full, and the changed weights."""
    stored = SavedVersions(folder.weights / policy, policy)
    changed: list[float] = []
    deltas: list[int] = []
    full = 0
    for old, new in itertools.pairwise(map(stored.read, stored.versions())):
        full = sum(tensor.data.nbytes for tensor in new.tensors)
        own = new.manifest.shortcut or new.manifest
        deltas.append(sum(chunk.num_bytes for chunk in own.chunks))
        differs = sum(
            int(np.count_nonzero(a.data.view(np.uint16) != b.data.view(np.uint16)))
            for a, b in zip(old.tensors, new.tensors, strict=True)
        )
        changed.append(2 * differs / full)
    return {
        "full_mb": full / 1e6,
        "delta_mb": statistics.fmean(deltas) / 1e6,
        "changed_frac": statistics.fmean(changed),
    }


def _shares(pools: Sequence[Pool], folder: RunFolder) -> dict[str, float]:
    """Compares the far services' share of the episodes with their share of the slots.

    Also measures the seconds in which each service fetches and installs a version.
    """
    episodes = Counter(each.service for each in deliveries(folder.journal) if not each.is_dropped)
    far = [pool for pool in pools if pool.link is not None]
    figures = {
        "far_episodes_frac": sum(episodes[pool.name] for pool in far) / episodes.total(),
        "far_slots_frac": sum(pool.num_slots for pool in far) / sum(pool.num_slots for pool in pools),
    }
    with JournalReader(folder.journal) as reader:
        loads = [(row.source, row.span) for row in reader.telemetry() if row.span.kind == "load"]
    for pool in pools:
        seconds = [span.end_s - span.start_s for source, span in loads if source == pool.name]
        figures[f"{pool.name}_load_s"] = statistics.median(seconds)
    return figures


# --- several runs ---------------------------------------------------------------------------------


class Found:
    """The results of a row: arm -> one per seed."""

    def __init__(self, results: Mapping[str, Sequence[Result]]) -> None:
        self.results = results

    def mean(self, arm: str, figure: str) -> float:
        """Returns the mean of a figure over seeds."""
        return statistics.fmean(result["figures"][figure] for result in self.results[arm])

    def curve(self, arm: str, axis: str, eval_set: str = "") -> list[list[tuple[float, float]]]:
        """Returns (spent, score) pairs per seed. `eval_set`: empty for the set that was evaluated first."""
        return [
            [
                (point[axis], point["score"])
                for point in result["points"]
                if point["set"] == (eval_set or result["points"][0]["set"]) and point["score"] is not None
            ]
            for result in self.results[arm]
        ]

    def final(self, arm: str, eval_set: str = "") -> float:
        """Returns the mean of the last scores."""
        return statistics.fmean(curve[-1][1] for curve in self.curve(arm, "step", eval_set))

    def spent(self, arm: str, axis: str, target: float) -> float:
        """Returns the median of what reaching a score took; infinite if most seeds didn't reach it."""
        return statistics.median(reached(curve, target) for curve in self.curve(arm, axis))

    def after(self, arm: str, axis: str, budget: float) -> float:
        """Returns the mean score once this much was spent, between evaluations by a straight line."""
        found: list[float] = []
        for curve in self.curve(arm, axis):
            places = [place for place in itertools.pairwise(curve) if place[0][0] <= budget <= place[1][0]]
            (x0, y0), (x1, y1) = places[-1] if places else (curve[-1], curve[-1])
            found.append(y0 + (y1 - y0) * (budget - x0) / (x1 - x0) if x1 > x0 else y1)
        return statistics.fmean(found)

    def least(self, axis: str, arms: Sequence[str]) -> float:
        """Returns the largest budget that every run of some arms has spent."""
        return min(curve[-1][0] for arm in arms for curve in self.curve(arm, axis))


def reached(curve: Sequence[tuple[float, float]], target: float) -> float:
    """Returns what was spent at the second of two evaluations in a row that reach a score; else infinity."""
    return next((b[0] for a, b in itertools.pairwise(curve) if min(a[1], b[1]) >= target), math.inf)
