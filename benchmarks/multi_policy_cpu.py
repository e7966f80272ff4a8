"""Compares ways to train a solver and a larger verifier on this machine's cores, without emulation.

The trainers don't wait, meet at a barrier, or train one batch at a time. The benchmark runs
`recipes/math-multi-agent/tiny.yaml` in five ways, and measures how long each takes to reach one accuracy:

    astraflow      as the recipe says: two trainers that never wait for each other
    barrier        the same, but no policy begins a step before the other has done the same number of steps
    one step off   a batch is generated for both, while both train on the previous one
    partial        25 % more groups than a batch are started, and those that it leaves over go on in the next
    in turn        a batch is generated for both by the newest weights, then both train on it at the same time

The last three are the synchronous schedules of `multi_policy.py`, made of the same parts. Both policies meet
at the beginning and at the end of each step. Over-sampling that cancels episodes is left out: groups here are
as long as their longest episode, so it would waste most of what it starts. Cores have no owner, so generation
always has those that no trainer uses.

The policies have unequal sizes: the verifier's layers are twice as wide (`--width 128`), which makes its step
about twice as slow (the measured ratio is printed). `--width 64` makes both equal.

The clock starts with the evaluation of the first weights, when all services are ready. Further evaluations
follow every 5 steps of each policy, on 512 held-out tasks; all ways pay for them. A run reaches the target at
the second of two consecutive evaluations of the system (solve, verify, solve again) at 0.85 or more.

    python benchmarks/multi_policy_cpu.py [--seeds 0 1 2] [--width 64] [--systems NAME ...] [--out runs/turns]
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness import Runs, report, show_table
from schedules import OVER
from turns import with_turns

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "math-multi-agent" / "tiny.yaml"
MODELS = ("math-solver", "math-verifier")
POLICIES = ("solver", "verifier")
SYNCHRONOUS = ("one step off", "partial", "in turn")
SYSTEMS = ("astraflow", "barrier", *SYNCHRONOUS)
TABLES: Mapping[str, Mapping[str, Any]] = {
    "one step off": {"max_staleness": 1, "sampler": {"name": "sweep"}},
    "partial": {
        "sampler": {"name": "sweep"},
        "limiter": {"name": "use", "use": "schedules:InFlight", "args": {"over": OVER}},
    },
    "in turn": {"max_staleness": 0, "sampler": {"name": "on_policy"}},
}
"""What differs from the recipe's table. One step off has tickets for two batches, in turn for one."""
TARGET = 0.85


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    reached_s: float
    """Infinite if the run did not reach the target."""
    wall_s: float
    staleness_mean: float
    staleness_max: int
    score: float
    audit_ok: bool
    cost_ratio: float
    """Seconds of a step of the verifier's trainer, divided by the solver's."""


def astraflow(*arguments: str) -> None:
    """Runs a command. Its output goes to standard error, so the last line on standard output is the
    figures."""
    argv = [sys.executable, "-m", "astraflow.cli.main", *arguments]
    # The current folder is this one, so that the trainers find TurnsBackend.
    subprocess.run(argv, cwd=Path(__file__).parent, check=True, stdout=sys.stderr)


def recipe_of(system: str, models: Path, folder: Path) -> dict[str, Any]:
    """Makes the recipe of a system."""
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["eval"]["every"] = 5
    for name, model in zip(POLICIES, MODELS, strict=True):
        policy = recipe["policies"][name]
        policy["model"] = str(models / model)
        if system == "astraflow":
            continue
        backend = with_turns({"name": "torch"}, name, POLICIES, folder, ends_together=system in SYNCHRONOUS)
        policy.setdefault("train", {})["backend"] = backend
        policy["table"] |= TABLES.get(system, {})
    return recipe


def run(system: str, seed: int, models: Path, out: Path) -> Outcome:
    """Runs a system, unless its folder holds a finished run. Raises: CalledProcessError if it fails."""
    folder = out / f"{system.replace(' ', '-')}-{seed}"
    if not (folder / "run" / "summary.json").is_file():
        (folder / "turns").mkdir(parents=True)
        path = folder / "recipe.yaml"
        content = recipe_of(system, models, folder / "turns")
        path.write_text(yaml.safe_dump(content))
        print(f"+ {system}, seed {seed}", file=sys.stderr, flush=True)
        astraflow("run", str(path), "--run-dir", str(folder / "run"), "--plain", f"seed={seed}")
    return read(folder / "run")


def read(run_dir: Path) -> Outcome:
    """Reads a finished run's summary and metrics."""
    summary = json.loads((run_dir / "summary.json").read_text())
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = [r for r in records if r["kind"] == "eval" and r["policy"] == POLICIES[0]]
    points = [(r["at_s"] - evals[0]["at_s"], r["score_mean"]) for r in evals if r["score_mean"] is not None]
    hits = [b[0] for a, b in itertools.pairwise(points) if min(a[1], b[1]) >= TARGET]
    return Outcome(
        reached_s=hits[0] if hits else math.inf,
        wall_s=evals[-1]["at_s"] - evals[0]["at_s"],
        staleness_mean=statistics.fmean(p["staleness_mean"] for p in summary["policies"]),
        staleness_max=max(p["staleness_max"] for p in summary["policies"]),
        score=points[-1][1] if points else math.nan,
        audit_ok=summary["audit_ok"],
        cost_ratio=_train_s(records, "verifier") / _train_s(records, "solver"),
    )


def _train_s(records: Sequence[Mapping[str, Any]], policy: str) -> float:
    """Returns the median seconds of a training step."""
    return statistics.median(r["train_s"] for r in records if r["kind"] == "step" and r["policy"] == policy)


def make_models(width: int, folder: Path) -> None:
    """Makes both models, unless they are there."""
    for model, size in zip(MODELS, (64, width), strict=True):
        if (folder / model).is_dir():
            continue
        spec = str(ROOT / "recipes" / "models" / f"{model}.yaml")
        sizes = (f"architecture.hidden_size={size}", f"architecture.mlp_size={2 * size}")
        astraflow("model", "init", spec, *sizes, "--out", str(folder / model))


def main(given: argparse.Namespace, out: Path) -> None:
    """Runs the systems with all seeds. The systems alternate, so that other load affects all equally."""
    models = out / f"models-{given.width}"
    make_models(given.width, models)
    found: dict[str, list[Outcome]] = {system: [] for system in given.systems}
    for seed in given.seeds:
        for system in given.systems:
            found[system].append(run(system, seed, models, out / f"runs-{given.width}"))
    rows = [
        (system, seed, o.reached_s, o.wall_s, o.score, o.staleness_mean, o.staleness_max,
         o.cost_ratio, "holds" if o.audit_ok else "BROKEN")
        for system, runs in found.items()
        for seed, o in zip(given.seeds, runs, strict=True)
    ]  # fmt: skip
    header = (
        "system",
        "seed",
        f"s to {TARGET}",
        "s in all",
        "at the end",
        "staleness",
        "max",
        "cost",
        "audit",
    )
    show_table("solver and verifier, held-out accuracy of both together", header, rows)
    report(figures(found) | {"num_seeds": len(given.seeds), "width": given.width})


def figures(found: Mapping[str, Sequence[Outcome]]) -> dict[str, object]:
    """Returns the seconds of each system, divided by AstraFlow's. The best synchronous schedule is chosen
    for each seed, after it was run. One that never reached the target counts with the seconds of its whole
    run."""
    ours = found["astraflow"]
    seconds = {
        system: [min(o.reached_s, o.wall_s) for o in runs]
        for system, runs in found.items()
        if system != "astraflow"
    }
    answer: dict[str, object] = {
        f"cpu_speedup_vs_{system.replace(' ', '_')}": _ratios(each, [o.reached_s for o in ours])
        for system, each in seconds.items()
    }
    if synchronous := [system for system in SYNCHRONOUS if system in found]:
        best = [min(each) for each in zip(*(seconds[system] for system in synchronous), strict=True)]
        walls = zip(*([o.wall_s for o in found[system]] for system in synchronous), strict=True)
        answer["cpu_speedup_vs_sync"] = _ratios(best, [o.reached_s for o in ours])
        answer["wall_speedup_vs_sync"] = _ratios([min(each) for each in walls], [o.wall_s for o in ours])
    return answer | {
        "target": TARGET,
        "astraflow_s": statistics.median(min(o.reached_s, o.wall_s) for o in ours),
        "cost_ratio": statistics.median(o.cost_ratio for o in ours),
        "audits_hold": all(o.audit_ok for runs in found.values() for o in runs),
    }


def _ratios(others: Sequence[float], ours: Sequence[float]) -> Runs:
    return Runs(tuple(other / own for other, own in zip(others, ours, strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--width", type=int, default=128, help="of the verifier's layers; the solver's is 64")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--out", type=Path, help="run folders; finished ones are read, not made again")
    arguments = parser.parse_args()
    if "astraflow" not in arguments.systems:
        parser.error("--systems needs astraflow, with which the others are compared")
    with tempfile.TemporaryDirectory(prefix="astraflow-turns-") as scratch:
        main(arguments, (arguments.out or Path(scratch)).resolve())
