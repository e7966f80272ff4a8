"""Compares a run with pools of different sizes, two of them far away, with the same run with one local pool.

    one pool       a rollout service of 448 slots on the dataflow's machine
    three pools    services of 64, 128 and 256 slots (1x, 2x, 4x); the first is local, the other two reach
                   dataflow and publisher through 4 Gbit/s and 300 ms each way (a proxy in this process)

Both runs use the quickstart's model and tasks, with real engines, training, and weights. They have the same
settings, seeds, and numbers of steps. The allowed staleness must cover the link: a version is announced by a
long poll that takes 600 ms to return, and a step here takes a few tenths of a second, so `max_staleness` is
16 and engines may be 8 versions behind. A step of a large model takes minutes, so the same link costs it
nothing.

    python benchmarks/learning_pools.py [--seeds 0 1 2] [--steps 120] [--picture FILE]
"""

import argparse
import asyncio
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.run import launch
from harness import report, show_table
from plots import draw_curves
from services import Services, deliveries
from shaped_link import Link

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "quickstart.yaml"
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
LINK = Link(delay_s=0.3, bits_per_s=4e9)
TARGET = 0.75


@dataclass(frozen=True)
class Pool:
    """A rollout service."""

    name: str
    num_slots: int
    is_far: bool = False


SYSTEMS: Mapping[str, Sequence[Pool]] = {
    "one pool": (Pool("local-7x", 448),),
    "three pools": (Pool("local-1x", 64), Pool("far-2x", 128, is_far=True), Pool("far-4x", 256, is_far=True)),
}


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    points: list[tuple[int, float, float]]
    """(step, seconds since the first evaluation, held-out accuracy)."""
    episodes: Mapping[str, int]
    """Pool -> number of accepted episodes."""
    staleness_mean: float
    staleness_max: int
    audit_ok: bool

    @property
    def accuracy(self) -> float:
        """Mean of the last two evaluations."""
        return statistics.fmean(accuracy for *_, accuracy in self.points[-2:])

    @property
    def reached_s(self) -> float:
        """Seconds until `TARGET`; infinite if it was not reached."""
        return next((at_s for _, at_s, accuracy in self.points if accuracy >= TARGET), math.inf)


def recipe_of(model: Path, *, seed: int, steps: int) -> Recipe:
    """Makes the quickstart's recipe without its own services, and with enough staleness for the link."""
    changes = {
        "seed": seed,
        "rollout.services": 0,
        "model": str(model),
        "table.max_staleness": 16,
        "table.engine_lag": 8,
        "steps": steps,
        "eval.every": max(1, steps // 8),
    }
    return load_recipe(RECIPE, changes)


async def train(pools: Sequence[Pool], recipe: Recipe, folder: Path) -> None:
    """Makes a whole run. Raises: RuntimeError that names a pool that ended too early."""
    async with launch(recipe, folder / "run") as run:
        services = Services(run, folder)
        try:
            for pool in pools:
                link = LINK if pool.is_far else None
                rollout = {"max_episodes": pool.num_slots}
                await services.start(
                    pool.name, engine={"num_slots": pool.num_slots}, rollout=rollout, link=link
                )
            async for step in run.steps("actor"):
                if step.step < recipe.policies["actor"].train.steps - 1:
                    await services.look()
        finally:
            await services.close()


def read(folder: Path) -> Outcome:
    """Reads a finished run."""
    run_dir = folder / "run"
    summary = json.loads((run_dir / "summary.json").read_text())
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = [r for r in records if r["kind"] == "eval" and r["score_mean"] is not None]
    episodes = Counter(each.service for each in deliveries(run_dir / "journal"))
    return Outcome(
        points=[(r["step"], r["at_s"] - evals[0]["at_s"], r["score_mean"]) for r in evals],
        episodes=episodes,
        staleness_mean=summary["staleness_mean"],
        staleness_max=summary["staleness_max"],
        audit_ok=summary["audit_ok"],
    )


def main(seeds: Sequence[int], steps: int, out: Path, image: Path | None) -> None:
    """Makes both runs with all seeds, one after the other."""
    model = out / "model"
    if not model.is_dir():
        argv = [sys.executable, "-m", "astraflow.cli.main", "model", "init", str(SPEC), "--out", str(model)]
        subprocess.run(argv, check=True, stdout=sys.stderr)
    found: dict[str, list[Outcome]] = {system: [] for system in SYSTEMS}
    for seed in seeds:
        for system, pools in SYSTEMS.items():
            folder = out / f"{system.replace(' ', '-')}-{seed}"
            if not (folder / "run" / "summary.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                print(f"+ {system}, seed {seed}", file=sys.stderr, flush=True)
                recipe = recipe_of(model, seed=seed, steps=steps)
                asyncio.run(train(pools, recipe, folder))
            found[system].append(read(folder))
    rows = [
        (system, seed, o.points[0][-1], o.accuracy, o.reached_s, o.staleness_mean, o.staleness_max,
         ", ".join(f"{name} {num / o.episodes.total():.0%}" for name, num in sorted(o.episodes.items())),
         "holds" if o.audit_ok else "BROKEN")
        for system, runs in found.items()
        for seed, o in zip(seeds, runs, strict=True)
    ]  # fmt: skip
    header = (
        "system",
        "seed",
        "before",
        "after",
        f"s to {TARGET}",
        "staleness",
        "max",
        "episodes by",
        "audit",
    )
    show_table(f"{steps} steps, held-out accuracy", header, rows)
    if image is not None:
        curves = {
            system: [[(step, accuracy) for step, _, accuracy in run.points] for run in runs]
            for system, runs in found.items()
        }
        draw_curves(curves, image, over="steps", lowest=0.0)
    means = {system: statistics.fmean(o.accuracy for o in runs) for system, runs in found.items()}
    medians = {system: statistics.median(o.reached_s for o in runs) for system, runs in found.items()}
    ratio = medians["three pools"] / medians["one pool"]
    report(
        {
            "num_seeds": len(seeds),
            "one_pool_accuracy": means["one pool"],
            "three_pools_accuracy": means["three pools"],
            "accuracy_gap": means["one pool"] - means["three pools"],
            "seconds_ratio": ratio if math.isfinite(ratio) else None,
            "far_frac": statistics.fmean(
                sum(num for name, num in o.episodes.items() if name.startswith("far")) / o.episodes.total()
                for o in found["three pools"]
            ),
            "audits_hold": all(o.audit_ok for runs in found.values() for o in runs),
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, help="run folders; finished ones are read, not made again")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="astraflow-pools-") as scratch:
        main(given.seeds, given.steps, (given.out or Path(scratch)).resolve(), given.picture)
