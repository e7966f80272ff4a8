"""Checks whether the quickstart learns every time, with one run per seed by the commands of `make
quickstart`.

The runs start from three models in turn. Each model is warm-started from its own random weights and
demonstrations. A seed varies the order of tasks, what is sampled, and the split into minibatches. The
benchmark prints a row per seed, and plots the held-out accuracy over the time since the first lease.

    python benchmarks/quickstart_seeds.py [--seeds 0 1 2 3 4 5] [--models 0 1 2] [--out runs/seeds]
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from harness import report, show_table
from plots import use_style

ROOT = Path(__file__).resolve().parent.parent
IMAGE = ROOT / "docs" / "images" / "quickstart_seeds.png"
TARGET = 0.85
RL_LIMIT_S = 120.0
COLUMNS = ("seed", "model", "before", "after", "wall s", "RL s", "overlap", "staleness mean", "max", "audit")


def astraflow(*arguments: str) -> None:
    """Runs a command. Its output goes to standard error, so the last line on standard output is the
    figures."""
    print("+ astraflow", *arguments, file=sys.stderr, flush=True)
    argv = [sys.executable, "-m", "astraflow.cli.main", *arguments]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=sys.stderr)


def make_model(seed: int, folder: Path) -> Path:
    """Makes a warm-started model of the quickstart's spec."""
    astraflow("model", "init", "recipes/models/quickstart.yaml", "--out", str(folder), f"seed={seed}")
    return folder


def run_seed(seed: int, model: Path, run_dir: Path) -> dict[str, Any]:
    """Runs a seed; returns the run's summary."""
    changes = (f"seed={seed}", f"policies.actor.model={model}")
    astraflow("run", "recipes/quickstart.yaml", "--run-dir", str(run_dir), "--plain", *changes)
    return json.loads((run_dir / "summary.json").read_text())


def curve_of(run_dir: Path) -> list[tuple[float, float]]:
    """Returns (seconds since the evaluation of version 0, held-out accuracy) for each evaluation."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = [record for record in records if record["kind"] == "eval"]
    return [
        (record["at_s"] - evals[0]["at_s"], record["score_mean"])
        for record in evals
        if record["score_mean"] is not None
    ]


def figure_of(summary: Mapping[str, Any], key: str) -> float:
    """Returns a figure of a summary, or nan if no episode of the evaluation has a score."""
    return math.nan if summary[key] is None else float(summary[key])


def draw(curves: dict[int, list[tuple[float, float]]]) -> None:
    """Plots one line per seed."""
    use_style()
    figure, axes = plt.subplots(figsize=(7, 4))
    for seed, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"seed {seed}")
    axes.axhline(TARGET, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="seconds of RL", ylabel="held-out accuracy (512 tasks)", ylim=(0, 1))
    axes.set_title("Quickstart on two CPU cores")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(IMAGE)
    plt.close(figure)


def main(seeds: Sequence[int], model_seeds: Sequence[int], out: Path) -> None:
    """Runs, prints, and plots."""
    models = [make_model(seed, out.resolve() / f"model-{seed}") for seed in model_seeds]
    model_of = {seed: idx % len(models) for idx, seed in enumerate(seeds)}
    summaries = {seed: run_seed(seed, models[model_of[seed]], out / str(seed)) for seed in seeds}
    draw({seed: curve_of(out / str(seed)) for seed in seeds})
    keys = ("heldout_before", "heldout_after", "wall_s", "rl_wall_s", "overlap_frac", "staleness_mean")
    rows = [
        (
            seed,
            model_seeds[model_of[seed]],
            *(figure_of(s, key) for key in keys),
            s["staleness_max"],
            "holds" if s["audit_ok"] else "BROKEN",
        )
        for seed, s in summaries.items()
    ]
    show_table("quickstart", COLUMNS, rows)
    good = [
        figure_of(s, "heldout_after") >= TARGET and s["rl_wall_s"] < RL_LIMIT_S and s["audit_ok"]
        for s in summaries.values()
    ]
    report(
        {
            "num_seeds": len(good),
            "num_models": len(models),
            "num_good": sum(good),
            "heldout_after_min": min(
                (s["heldout_after"] for s in summaries.values() if s["heldout_after"] is not None),
                default=None,
            ),
            "rl_wall_s_max": max(s["rl_wall_s"] for s in summaries.values()),
            "overlap_frac_min": min(s["overlap_frac"] for s in summaries.values()),
        },
        at_least={"num_good": len(good)},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--models", type=int, nargs="+", default=[0, 1, 2], help="seeds of the models")
    parser.add_argument("--out", type=Path, help="run folders; a temporary one if not given")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="astraflow-seeds-") as scratch:
        main(given.seeds, given.models, given.out or Path(scratch))
