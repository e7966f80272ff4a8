"""Compares EDF with FIFO if long tasks are the hard ones: speed, accuracy, and durations of dropped groups.

The quickstart's model learns sums of three digits, half of them with carries (which it must learn) and half
without (which it knows). An episode of a sum with carries takes `--factor` times as long. All parts except
the clock are real (see `exact_run.py`): an episode takes `exp(N(0, 0.6))` units times its factor, a training
step takes 5 units, 192 episodes run at the same time, and `max_staleness` is 4.

`fifo` drops nothing and waits for the oldest group. `edf` takes complete groups, those with the oldest tokens
first, and drops groups that have become stale. `sweep` takes groups as they complete. A sampler that drops
long groups drops hard ones: the table shows how long the dropped and the trained groups were, and how many of
them were hard.

    python benchmarks/long_tasks.py [--seeds 0 1 2] [--steps 100] [--picture FILE]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.trainer.config import TrainConfig
from exact_run import ExactRun, Pace, Setting, sums
from harness import report, show_table
from plots import use_style

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
SAMPLERS = ("fifo", "edf", "sweep")
NUM_TASKS = 2000
"""Number of tasks of each kind."""
NUM_HELDOUT = 512
SIGMA = 0.6
NUM_SLOTS = 192
STEP_S = 5.0
Runs = Mapping[str, Sequence[ExactRun]]
"""Sampler -> one run per seed."""


def setting(sampler: str, seed: int, steps: int, factor: float) -> Setting:
    """Makes a setting: easy problems first, then hard ones. The held-out ones are all hard."""
    easy = sums(NUM_TASKS, digits=3, carries=False, seed=seed)
    hard = sums(NUM_TASKS, digits=3, carries=True, seed=seed)
    table = {"groups_per_batch": 8, "max_staleness": 4, "engine_lag": 0, "sampler": {"name": sampler}}
    train = {
        "steps": steps,
        "lr": 3e-4,
        "loss": {"name": "m2po"},
        "optimizer": {"warmup_steps": 10, "max_grad_norm": 0.5},
    }
    return Setting(
        table=parse_config(table, TableConfig, where="table"),
        train=parse_config(train, TrainConfig, where="train"),
        problems=(*easy, *hard),
        heldout=tuple(sums(NUM_HELDOUT, digits=3, carries=True, seed=0, split="heldout")),
        pace=Pace(NUM_SLOTS, STEP_S, SIGMA, factors=(1.0,) * len(easy) + (factor,) * len(hard)),
        eval_every=max(1, steps // 4),
    )


def lengths(runs: Sequence[ExactRun], *, is_trained: bool) -> list[float]:
    """Returns the durations of the trained groups, or of the dropped groups."""
    return [
        run.durations_s[group]
        for run in runs
        for group in (run.trained_groups if is_trained else run.stale_groups)
    ]


def hard_frac(runs: Sequence[ExactRun], *, is_trained: bool) -> float:
    """Returns the share of hard problems among the trained groups, or among the dropped groups."""
    chosen = [
        run.problem_of[group] >= NUM_TASKS
        for run in runs
        for group in (run.trained_groups if is_trained else run.stale_groups)
    ]
    return statistics.fmean(chosen) if chosen else float("nan")


def mean(values: Sequence[float]) -> float:
    """Returns the mean, or nan if there are no values."""
    return statistics.fmean(values) if values else float("nan")


def draw(found: Runs, image: Path) -> None:
    """Plots how long trained and dropped groups were, with a panel per sampler."""
    use_style()
    figure, panels = plt.subplots(1, len(found), figsize=(9, 3), sharey=True)
    top = max(max(lengths(runs, is_trained=True)) for runs in found.values())
    bins = np.geomspace(0.1, top * 1.1, 30)
    for axes, (sampler, runs) in zip(panels, found.items(), strict=True):
        axes.hist(lengths(runs, is_trained=True), bins=bins, alpha=0.6, label="trained")
        axes.hist(lengths(runs, is_trained=False), bins=bins, alpha=0.8, label="dropped")
        axes.set(xscale="log", title=sampler, xlabel="longest episode (units)")
    panels[0].set_ylabel("groups")
    panels[-1].legend()
    figure.tight_layout()
    figure.savefig(image)
    plt.close(figure)


def main(seeds: Sequence[int], steps: int, factor: float, model: Path, image: Path | None) -> None:
    """Runs all samplers with all seeds."""
    found: dict[str, list[ExactRun]] = {sampler: [] for sampler in SAMPLERS}
    for seed in seeds:
        for sampler in SAMPLERS:
            print(f"+ {sampler}, seed {seed}", file=sys.stderr, flush=True)
            found[sampler].append(ExactRun(setting(sampler, seed, steps, factor), model, seed=seed).run())
    rows: list[tuple[object, ...]] = []
    figures: dict[str, object] = {"num_seeds": len(seeds), "factor": factor}
    for sampler, runs in found.items():
        num_stale = sum(len(run.stale_groups) for run in runs)
        num_trained = sum(len(run.trained_groups) for run in runs)
        values = {
            "virtual_s": mean([run.end_s for run in runs]),
            "hard_accuracy": mean([mean(run.accuracies[-2:]) for run in runs]),
            "dropped_frac": num_stale / (num_stale + num_trained),
            "trained_length": mean(lengths(runs, is_trained=True)),
            "dropped_length": mean(lengths(runs, is_trained=False)),
            "trained_hard_frac": hard_frac(runs, is_trained=True),
            "dropped_hard_frac": hard_frac(runs, is_trained=False),
        }
        rows.append((sampler, *values.values(), max(run.staleness_max for run in runs)))
        figures |= {f"{sampler}_{name}": None if v != v else v for name, v in values.items()}
    header = (
        "sampler", "units", "hard accuracy", "dropped", "length trained", "dropped", "hard trained",
        "dropped", "staleness max",
    )  # fmt: skip
    show_table(f"{steps} steps, hard tasks take {factor:g} times as long, VIRTUAL time", header, rows)
    if image is not None:
        draw(found, image)
    walls = {sampler: mean([run.end_s for run in runs]) for sampler, runs in found.items()}
    report({**figures, "edf_speedup_vs_fifo": walls["fifo"] / walls["edf"]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--factor", type=float, default=6.0, help="time of a hard task, in easy ones")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="astraflow-long-") as scratch:
        folder = ROOT / "models" / "quickstart"
        if not folder.is_dir():
            folder = Path(scratch) / "model"
            command = [sys.executable, "-m", "astraflow.cli.main", "model", "init", str(SPEC)]
            subprocess.run([*command, "--out", str(folder)], check=True, stdout=sys.stderr)
        main(given.seeds, given.steps, given.factor, folder, given.picture)
