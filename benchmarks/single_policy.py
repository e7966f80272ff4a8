"""Compares the held-out accuracy of two policies that help each other with that of one policy with as many
rollouts.

    two policies   `recipes/math-multi-agent/tiny.yaml`: a solver, a verifier that approves or rejects, and a
                   second try of the solver if it rejects
    one policy     the same solver, tasks, reward, and training without a verifier: as many episodes per step,
                   as many steps
    one, 2.5x      the same with 2.5 times the steps: about as many completions as the two policies generate

The accuracy is that of the whole system on 512 held-out tasks: the last answer counts with two policies,
otherwise the only one.

    python benchmarks/single_policy.py [--seeds 0 1 2] [--out runs/single] [--picture FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness import report, show_table
from plots import draw_curves

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "math-multi-agent" / "tiny.yaml"
MODELS = ("math-solver", "math-verifier")
SYSTEMS = ("two policies", "one policy", "one, 2.5x")
MORE = 2.5
"""Completions per episode of the two policies: an answer, a verdict, and often both again."""


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    points: list[tuple[int, float]]
    """(episodes, accuracy) at each evaluation."""
    audit_ok: bool

    @property
    def accuracy(self) -> float:
        """Mean of the last two evaluations."""
        return statistics.fmean(accuracy for _, accuracy in self.points[-2:])


def astraflow(*arguments: str) -> None:
    """Runs a command. Its output goes to standard error, so the last line on standard output is the
    figures."""
    argv = [sys.executable, "-m", "astraflow.cli.main", *arguments]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=sys.stderr)


def recipe_of(system: str, models: Path, steps: int) -> dict[str, Any]:
    """Makes the recipe of a system."""
    recipe = yaml.safe_load(RECIPE.read_text())
    for name, model in zip(("solver", "verifier"), MODELS, strict=True):
        recipe["policies"][name]["model"] = str(models / model)
    train = recipe["policies"]["solver"]["train"]
    num_evals = train["steps"] // recipe["eval"]["every"]
    train["steps"] = steps
    if system != SYSTEMS[0]:
        del recipe["workflow"]
        del recipe["policies"]["verifier"]
    if system == SYSTEMS[2]:
        train["steps"] = round(MORE * steps)
    recipe["eval"]["every"] = max(1, train["steps"] // num_evals)
    return recipe


def run(system: str, seed: int, out: Path, steps: int) -> Outcome:
    """Runs a system, unless its folder holds a finished run. Raises: CalledProcessError if it fails."""
    folder = out / f"{SYSTEMS.index(system)}-{seed}"
    if not (folder / "run" / "summary.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe_of(system, out / "models", steps)))
        print(f"+ {system}, seed {seed}", file=sys.stderr, flush=True)
        astraflow("run", str(path), "--run-dir", str(folder / "run"), "--plain", f"seed={seed}")
    return read(folder)


def read(folder: Path) -> Outcome:
    """Reads a finished run's metrics."""
    table = yaml.safe_load((folder / "recipe.yaml").read_text())["policies"]["solver"]["table"]
    episodes = table["group_size"] * table["groups_per_batch"]
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    evals = [r for r in records if r["kind"] == "eval" and r["policy"] == "solver"]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return Outcome(
        points=[(r["step"] * episodes, r["score_mean"]) for r in evals if r["score_mean"] is not None],
        audit_ok=summary["audit_ok"],
    )


def main(seeds: Sequence[int], steps: int, out: Path, image: Path | None) -> None:
    """Runs all systems with all seeds, one after the other."""
    for model in MODELS:
        if not (out / "models" / model).is_dir():
            spec = str(ROOT / "recipes" / "models" / f"{model}.yaml")
            astraflow("model", "init", spec, "--out", str(out / "models" / model))
    found: dict[str, list[Outcome]] = {system: [] for system in SYSTEMS}
    for seed in seeds:
        for system in SYSTEMS:
            found[system].append(run(system, seed, out, steps))
    rows = [
        (system, seed, o.points[0][1], o.accuracy, o.points[-1][0], "holds" if o.audit_ok else "BROKEN")
        for system, runs in found.items()
        for seed, o in zip(seeds, runs, strict=True)
    ]
    header = ("system", "seed", "before", "after", "episodes", "audit")
    show_table("held-out accuracy of the whole system", header, rows)
    if image is not None:
        curves = {system: [run.points for run in runs] for system, runs in found.items()}
        draw_curves(curves, image, over="episodes per policy", lowest=0.4)
    means = {system: statistics.fmean(o.accuracy for o in runs) for system, runs in found.items()}
    report(
        {
            "num_seeds": len(seeds),
            "two_accuracy": means[SYSTEMS[0]],
            "one_accuracy": means[SYSTEMS[1]],
            "one_more_accuracy": means[SYSTEMS[2]],
            "gain": means[SYSTEMS[0]] - means[SYSTEMS[1]],
            "gain_over_more": means[SYSTEMS[0]] - means[SYSTEMS[2]],
            "audits_hold": all(o.audit_ok for runs in found.values() for o in runs),
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="of each policy; the recipe's number is 60")
    parser.add_argument("--out", type=Path, help="run folders; finished ones are read, not made again")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="astraflow-single-") as scratch:
        main(given.seeds, given.steps, (given.out or Path(scratch)).resolve(), given.picture)
