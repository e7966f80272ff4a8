"""Checks whether a proposer chooses better exercises than chance: proposer-solver/tiny and its twin, once per
seed.

Both sides start from the same solver, and train it with the same settings for the same number of steps. An
episode has nine completions on both sides: one proposal and eight attempts, or nine attempts at exercises of
a lesson drawn at random. The budget is the completions of all drawn groups, including those that a table had
no room for. Each lesson has the same number of held-out exercises. The benchmark prints a row per seed and
side.

    python benchmarks/proposer_solver.py [--seeds 0 1 2] [--out runs/proposer] [--read]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.recipe.recipe import load_recipe
from harness import report, show_table

ROOT = Path(__file__).resolve().parent.parent
SIDES = {"proposer": "tiny", "uniform": "tiny-uniform"}
MODELS = ("course-proposer", "course-solver")
MOST_COMPLETIONS = 1.0
"""Largest number of completions on the proposer's side per completion on the other side."""
COLUMNS = ("seed", "side", "before", "after", "completions", "solver steps", "RL s", "wall s", "audit")


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    before: float
    after: float
    """Held-out accuracy of the solver, first and last."""
    completions: int
    """Completions of all drawn groups, as if every proposal named a lesson and nothing was canceled."""
    steps: int
    """Number of the solver's steps."""
    rl_s: float
    wall_s: float
    audit_ok: bool


def astraflow(*arguments: str) -> None:
    """Runs a command. Its output goes to standard error, so the last line on standard output is the
    figures."""
    print("+ astraflow", *arguments, file=sys.stderr, flush=True)
    argv = [sys.executable, "-m", "astraflow.cli.main", *arguments]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=sys.stderr)


def recipe_of(side: str) -> str:
    """Returns the file of a side's recipe."""
    return f"recipes/proposer-solver/{SIDES[side]}.yaml"


def outcome_of(run_dir: Path, side: str) -> Outcome:
    """Reads a finished run."""
    records: list[dict[str, Any]] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    evals = [r for r in records if r["kind"] == "eval" and r["policy"] == "solver" and "score_mean" in r]
    summary = json.loads((run_dir / "summary.json").read_text())
    return Outcome(
        before=evals[0]["score_mean"],
        after=evals[-1]["score_mean"],
        completions=max(p["fates"]["drawn"] for p in summary["policies"]) * completions_per_group(side),
        steps=next(p["steps"] for p in summary["policies"] if p["name"] == "solver"),
        rl_s=summary["rl_wall_s"],
        wall_s=summary["wall_s"],
        audit_ok=summary["audit_ok"],
    )


def completions_per_group(side: str) -> int:
    """Returns the number of completions per group: the proposals and attempts of its episodes."""
    recipe = load_recipe(ROOT / recipe_of(side))
    attempts = recipe.workflow.model_dump()["args"]["attempts"]
    return recipe.policies["solver"].table.group_size * (attempts + (side == "proposer"))


def main(seeds: Sequence[int], out: Path, *, only_read: bool) -> None:
    """Runs, prints, and reports."""
    runs = {(seed, side): out / f"{side}-{seed}" for seed in seeds for side in SIDES}
    for model in () if only_read else MODELS:
        astraflow("model", "init", f"recipes/models/{model}.yaml", "--out", f"models/{model}")
    for (seed, side), run_dir in () if only_read else runs.items():
        astraflow("run", recipe_of(side), "--run-dir", str(run_dir), "--plain", f"seed={seed}")
    found = {key: outcome_of(run_dir, key[1]) for key, run_dir in runs.items()}
    rows = [
        (seed, side, f"{o.before:.3f}", f"{o.after:.3f}", o.completions, o.steps, o.rl_s, o.wall_s,
         "holds" if o.audit_ok else "BROKEN")
        for (seed, side), o in found.items()
    ]  # fmt: skip
    show_table("proposer-solver: held-out accuracy", COLUMNS, rows)
    conclude(seeds, found)


def conclude(seeds: Sequence[int], found: Mapping[tuple[int, str], Outcome]) -> None:
    """Reports the figures."""
    gains = [found[seed, "proposer"].after - found[seed, "uniform"].after for seed in seeds]
    figures: dict[str, object] = {
        "num_seeds": len(seeds),
        "proposer_wins": sum(gain > 0 for gain in gains),
        "gain_min": min(gains),
        "completions_frac_max": max(
            found[seed, "proposer"].completions / found[seed, "uniform"].completions for seed in seeds
        ),
        "rl_wall_s_max": max(o.rl_s for o in found.values()),
        "audits_hold": all(o.audit_ok for o in found.values()),
    }
    for side in SIDES:
        own = [found[seed, side] for seed in seeds]
        figures |= {
            f"{side}_before": [round(o.before, 4) for o in own],
            f"{side}_after": [round(o.after, 4) for o in own],
            f"{side}_completions": [o.completions for o in own],
        }
    report(
        figures, at_least={"proposer_wins": len(seeds)}, at_most={"completions_frac_max": MOST_COMPLETIONS}
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="run folders; a temporary one if not given")
    parser.add_argument("--read", action="store_true", help="read the runs in --out instead of making them")
    given = parser.parse_args()
    if given.read and not given.out:
        parser.error("--read needs --out FOLDER, where the runs are")
    with tempfile.TemporaryDirectory(prefix="astraflow-proposer-") as scratch:
        main(given.seeds, given.out or Path(scratch), only_read=given.read)
