"""Measures what a pool that sizes itself saves, on emulated GPUs under a virtual clock (`pool_run.py`).

There are two loads. In `x8`, completions grow from 600 to 4,800 tokens and shrink to 1,200 as
training proceeds, and half of a step's time grows with the tokens of its batch. The pool that sizes itself (2
to 16 services) is compared with the smallest fixed pool that takes at most 3 % longer.

`paper` is the load on which the AstraFlow paper (arXiv 2605.15565) measured its 13 %: Qwen3-14B on math, 745
steps. The paper compares all GPUs, including the trainer's four, with a fixed pool of 11 that is larger than
needed. The number of services that this run needed is read from the figure on the project's page: 6 / (1 -
w), where w is the share of time that its trainer waited for six services, minus the 3.5 % that it waits for
any pool.

    python benchmarks/autoscale.py [--quick] [--processes 2]
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from astraflow.config import parse_config
from astraflow.recipe.cluster_config import ClusterConfig
from harness import report, show_table
from plots import use_style
from pool_run import GROUP_SIZE, Load, PoolMeasured, PoolRun, fixed

ROOT = Path(__file__).resolve().parent.parent
MOST = 16
STEPS = 200
LONGEST = 4800.0
"""Mean length of the longest completions."""
LONGEST_S = 70.0
"""Seconds of a training step at the longest lengths."""
GROWING = "x8"
PAPER = "paper"
PAPER_DONE = (0.0, 0.11, 0.2, 0.31, 0.44, 0.6, 0.67, 0.79, 0.84, 0.91, 1.0)
PAPER_NEEDS = (5.5, 5.8, 7.5, 8.2, 8.8, 8.8, 9.6, 9.1, 10.3, 9.5, 10.0)
"""Services that the paper's run needed when these shares of its steps were done. Before 0.11, it is only
known that six were enough."""
PAPER_STEPS = 745
PAPER_STEP_S = 137.0
"""Like `LONGEST_S`. With this value, the steps take 113 s on average, as the paper's did."""
PAPER_FIXED = 11
PAPER_FIRST = 6
PAPER_TRAINERS = 4
SAME_WALL = 1.03


def growing_length(done: float) -> float:
    """Returns the mean completion length. It grows for 40 % of the steps, stays constant, and shrinks in the
    last 40 %."""
    return float(np.interp(done, (0.0, 0.4, 0.6, 1.0), (600.0, LONGEST, LONGEST, 1200.0)))


def paper_length(done: float) -> float:
    """Returns the mean length that needs as many services as the paper's run, if half of a step's time is
    constant."""
    needed = float(np.interp(done, PAPER_DONE, PAPER_NEEDS))
    return LONGEST * (PAPER_STEP_S / LONGEST_S) * needed / (2 * _at_longest() - needed)


@cache
def _at_longest() -> float:
    """Returns the number of services that every load needs at the longest lengths."""
    return make_load(1, 0.5, constant_length).needed_for(LONGEST)


def constant_length(done: float) -> float:
    """Returns the same mean length for the whole run."""
    del done
    return 2400.0


def make_load(
    steps: int, constant: float, mean_tokens: Callable[[float], float], *, longest_s: float = LONGEST_S
) -> Load:
    """Makes a load. `constant`: share of a step's time that doesn't depend on its batch. `longest_s`: seconds
    of a step at the longest lengths, which are proportional to it."""
    millions = LONGEST * GROUP_SIZE * Load.groups / 1e6
    return Load(
        steps=steps,
        mean_tokens=mean_tokens,
        step_s=constant * longest_s,
        million_tokens_s=(1 - constant) * LONGEST_S / millions,
    )


def load_named(name: str, steps: int) -> Load:
    """Returns one of the loads that change."""
    if name == PAPER:
        return make_load(round(PAPER_STEPS * steps / STEPS), 0.5, paper_length, longest_s=PAPER_STEP_S)
    return make_load(steps, 0.5, growing_length)


def pool_config() -> ClusterConfig:
    """Makes the config of the pool that sizes itself: the recipe's defaults, except for the patience."""
    fields = {"min_services": 2, "max_services": MOST, "pool": {"patience_s": 120.0}}
    return parse_config(fields, ClusterConfig, where="cluster")


def run_one(job: Mapping[str, Any]) -> PoolMeasured:
    """Makes one run, in its own process."""
    return PoolRun(**job).run()


def run_all(jobs: Mapping[str, Mapping[str, Any]], num_processes: int) -> dict[str, PoolMeasured]:
    """Makes the runs; returns them by name."""
    found: dict[str, PoolMeasured] = {}
    with ProcessPoolExecutor(num_processes) as pool:
        for name, run in zip(jobs, pool.map(run_one, jobs.values()), strict=True):
            print(f"+ {name}: {run.wall_s / 3600:.2f} h", file=sys.stderr, flush=True)
            found[name] = run
    return found


def _jobs_of(name: str, given: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    load = load_named(name, given.steps)
    sized = {"load": load, "cluster": pool_config(), "num_services": PAPER_FIRST if name == PAPER else 3}
    jobs: dict[str, Mapping[str, Any]] = {f"{name}: sized": sized}
    sizes = (4, 8, 12) if given.quick else range(7, 12) if name == PAPER else range(5, 13)
    return jobs | {
        f"{name}: fixed {num}": {"load": load, "cluster": fixed(num), "num_services": num} for num in sizes
    }


def _fixed_of(name: str, runs: Mapping[str, PoolMeasured]) -> list[PoolMeasured]:
    """Returns the fixed pools of a load, the smallest first."""
    return [run for other, run in runs.items() if other.startswith(f"{name}: fixed ")]


def _compared(name: str, runs: Mapping[str, PoolMeasured]) -> tuple[PoolMeasured, list[tuple[object, ...]]]:
    """Returns the fixed pool with which a load's pool is compared, and the rows of all its pools."""
    sized = runs[f"{name}: sized"]
    other = _same_wall(_fixed_of(name, runs), sized)
    of_load = {full: run for full, run in runs.items() if full.startswith(f"{name}:")}
    rows = [_row(full, run, "compared" if run in (sized, other) else "") for full, run in of_load.items()]
    return other, rows


def _as_in_the_paper(runs: Mapping[str, PoolMeasured]) -> dict[str, object]:
    """Compares as the paper does: with the larger fixed pool, including and excluding the trainer."""
    sized, larger = runs[f"{PAPER}: sized"], runs[f"{PAPER}: fixed {PAPER_FIXED}"]
    total_h = [run.used_h + PAPER_TRAINERS * run.wall_s / 3600 for run in (sized, larger)]
    return {
        "paper_total_saved_frac": round(1 - total_h[0] / total_h[1], 4),
        "paper_rollout_saved_frac": round(1 - sized.used_h / larger.used_h, 4),
        "paper_wall_ratio": round(sized.wall_s / larger.wall_s, 4),
    }


def _same_wall(pools: Sequence[PoolMeasured], run: PoolMeasured) -> PoolMeasured:
    """Returns the smallest fixed pool that takes at most 3 % longer than a run."""
    return next((pool for pool in pools if pool.wall_s <= SAME_WALL * run.wall_s), pools[-1])


def _row(name: str, run: PoolMeasured, mark: str) -> tuple[object, ...]:
    load, _, pool = name.partition(": ")
    busy = f"{run.busy_s / run.wall_s:.1%}"
    return load, pool, run.wall_s / 3600, run.used_h, busy, run.num_changes, mark


def draw(runs: Mapping[str, PoolMeasured], names: Sequence[str], image: Path) -> None:
    """Plots the number of services over the share of elapsed time, with a line per load."""
    use_style()
    figure, axes = plt.subplots(figsize=(8, 3.4))
    for idx, name in enumerate(names):
        run = runs[f"{name}: sized"]
        shares = [time_s / run.wall_s for time_s, _ in run.sizes] + [1.0]
        numbers = [number for _, number in run.sizes]
        axes.step(shares, [*numbers, numbers[-1]], where="post", color=f"C{idx}", label=name)
    axes.set(xlabel="share of the virtual time", ylabel="rollout services", ylim=(0, MOST))
    axes.legend()
    figure.tight_layout()
    figure.savefig(image)
    plt.close(figure)


def main(given: argparse.Namespace) -> None:
    """Compares the pool that sizes itself with fixed ones, for each load, and prints the figures."""
    given.steps = given.steps or (24 if given.quick else STEPS)
    names = [GROWING] if given.quick else [GROWING, PAPER]
    jobs: dict[str, Mapping[str, Any]] = {}
    for name in names:
        jobs |= _jobs_of(name, given)
    runs = run_all(jobs, given.processes)
    figures: dict[str, object] = {"is_virtual": True, "steps": given.steps}
    rows: list[tuple[object, ...]] = []
    for name in names:
        sized = runs[f"{name}: sized"]
        other, rows_of_load = _compared(name, runs)
        rows += rows_of_load
        if name == GROWING:
            figures["gpu_hours_saved_frac"] = round(1 - sized.used_h / other.used_h, 4)
            figures["wall_ratio"] = round(sized.wall_s / other.wall_s, 4)
            figures["same_wall_services"] = round(other.used_h / other.wall_s * 3600)
        if name == PAPER:
            figures |= _as_in_the_paper(runs)
    header = ("load", "pool", "hours", "GPU-hours", "trainer busy", "changes", "")
    show_table(f"{given.steps} steps; VIRTUAL time", header, rows)
    if not given.quick:
        draw(runs, names, given.images / "autoscale.png")
    report(figures, at_least={} if given.quick else {"paper_total_saved_frac": 0.13})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps and pools, no picture: for trying")
    parser.add_argument("--steps", type=int, default=0, help="default: 200, quick: 24")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="runs side by side")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="folder of the picture")
    main(parser.parse_args())
