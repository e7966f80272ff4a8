"""Compares ways to train solver and verifier on this machine's cores, without emulation.

The trainers don't wait, meet at a barrier, or train one batch at a time. The benchmark runs
`recipes/math-multi-agent/tiny.yaml` in four ways, and measures how long each takes to reach one accuracy:

    astraflow      as the recipe says: two trainers that never wait for each other
    barrier        the same, but no policy begins a step before the other has done the same number of steps
    one step off   a batch is generated for both, while both train on the previous one
    in turn        a batch is generated for both by the newest weights, then both train on it at the same time

The policies have unequal costs: the verifier's trainer packs microbatches of at most `--token-budget` tokens,
which doesn't change any gradient, but makes its step about three times as slow (the measured ratio is
printed). `--equal` keeps the recipe's setting.

The clock starts with the evaluation of the first weights, when all services are ready. Further evaluations
follow every 5 steps of each policy, on 512 held-out tasks; all ways pay for them. A run reaches the target at
the second of two consecutive evaluations of the system (solve, verify, solve again) at 0.85 or more.

    python benchmarks/multi_policy_cpu.py [--seeds 0 1 2] [--equal] [--out runs/turns]
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

from harness import report, show_table
from turns import with_turns

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "math-multi-agent" / "tiny.yaml"
MODELS = ("math-solver", "math-verifier")
POLICIES = ("solver", "verifier")
SYSTEMS = ("astraflow", "barrier", "one step off", "in turn")
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


def recipe_of(system: str, models: Path, folder: Path, token_budget: int) -> dict[str, Any]:
    """Makes the recipe of a system."""
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["eval"]["every"] = 5
    for name, model in zip(POLICIES, MODELS, strict=True):
        policy = recipe["policies"][name]
        policy["model"] = str(models / model)
        train = policy.setdefault("train", {})
        if name == "verifier" and token_budget:
            train["token_budget"] = token_budget
        if system == "astraflow":
            continue
        is_synchronous = system != "barrier"
        train["backend"] = with_turns({"name": "torch"}, name, POLICIES, folder, ends_together=is_synchronous)
        if is_synchronous:
            ahead = system == "one step off"  # it has tickets for two batches, otherwise for one
            sampler = "sweep" if ahead else "on_policy"
            policy["table"] |= {
                "max_staleness": int(ahead),
                "engine_lag": 0,
                "sampler": {"name": sampler},
            }
    return recipe


def run(system: str, seed: int, out: Path, token_budget: int) -> Outcome:
    """Runs a system, unless its folder holds a finished run. Raises: CalledProcessError if it fails."""
    folder = out / f"{system.replace(' ', '-')}-{seed}"
    if not (folder / "run" / "summary.json").is_file():
        (folder / "turns").mkdir(parents=True)
        path = folder / "recipe.yaml"
        content = recipe_of(system, out / "models", folder / "turns", token_budget)
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


def main(seeds: Sequence[int], out: Path, token_budget: int) -> None:
    """Runs all systems with all seeds. The systems alternate, so that other load affects all equally."""
    for model in MODELS:
        spec = str(ROOT / "recipes" / "models" / f"{model}.yaml")
        if not (out / "models" / model).is_dir():
            astraflow("model", "init", spec, "--out", str(out / "models" / model))
    found: Mapping[str, list[Outcome]] = {system: [] for system in SYSTEMS}
    for seed in seeds:
        for system in SYSTEMS:
            found[system].append(run(system, seed, out, token_budget))
    median = {system: statistics.median(o.reached_s for o in runs) for system, runs in found.items()}
    rows = [
        (system, seed, o.reached_s, o.wall_s, o.score, o.staleness_mean, o.staleness_max,
         o.cost_ratio, "holds" if o.audit_ok else "BROKEN")
        for system, runs in found.items()
        for seed, o in zip(seeds, runs, strict=True)
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
    report(
        {
            "num_seeds": len(seeds),
            "target": TARGET,
            "astraflow_s": median["astraflow"],
            "cpu_speedup_vs_barrier": median["barrier"] / median["astraflow"],
            "cpu_speedup_vs_one_step_off": median["one step off"] / median["astraflow"],
            "cpu_speedup_vs_in_turn": median["in turn"] / median["astraflow"],
            "cpu_speedup_vs_sync": min(median["in turn"], median["one step off"]) / median["astraflow"],
            "cost_ratio": statistics.median(o.cost_ratio for o in found["astraflow"]),
            "wall_speedup_vs_sync": statistics.median(o.wall_s for o in found["in turn"])
            / statistics.median(o.wall_s for o in found["astraflow"]),
            "audits_hold": all(o.audit_ok for runs in found.values() for o in runs),
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--token-budget", type=int, default=192, help="of the verifier's microbatches")
    parser.add_argument("--equal", action="store_true", help="both policies as the recipe has them")
    parser.add_argument("--out", type=Path, help="run folders; finished ones are read, not made again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="astraflow-turns-") as scratch:
        budget = 0 if given.equal else given.token_budget
        main(given.seeds, (given.out or Path(scratch)).resolve(), budget)
