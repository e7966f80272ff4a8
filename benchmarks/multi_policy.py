"""Measures what waiting costs two policies on ten emulated devices, over a range of loads, and where it is
cheap.

In an episode, both policies generate in turn, and an environment responds after each. AstraFlow generates on
8 devices and trains each policy on one, without any waiting. With lending, a trainer's device generates while
it waits for its next batch, and a generating device without requests joins a training step. The baselines are
the synchronous schedules of other systems, on the same ten devices and with the same parts (`schedules.py`):

    split          8 generate a batch, then 2 train it, each one policy, at the same time
    colocated      all 10 generate a batch, then all 10 train it, ten times as fast as one
    over-sampled   25 % more episodes are started; the first to end are trained on, the rest is canceled
    partial        the same, but the rest is paused while a batch is trained, and then continues
    one step off   a batch is generated while the previous one is trained

The sweep varies the load (episodes of a batch per slot of ten devices), the speed of a request that has a
device for itself (`tail`), and the cost of the policies. With unequal costs, one trainer needs three times as
long (its policy is trained on two devices, and 7 generate), or completions are four times as long. A full
device runs 64 requests at 50 tokens/s each. Lengths are log-normal with mean 1,500 and sigma 1, cut at 4,096.
The environment takes a log-normal time with median 1 s and sigma 1. A training step takes half of the time in
which 8 devices that are never idle generate a batch.

The bound is the time of a step if all ten devices did its work without ever waiting. A device that changes
between generation and training needs 0, 1, 5, or 20 % of the bound, in each direction, in every schedule. It
loses its KV cache: requests that continue on it or elsewhere compute their context again, ten tokens in the
time of one that is generated. The whole run has a beginning and an end: its last batch waits for the last
episodes while other devices have nothing to do. The steady state is without the first and last four steps.

Time is VIRTUAL, with the same clock for all rows, so other load on the machine doesn't change anything.
Moving weights and canceling cost nothing, and over-sampling takes any episodes, not whole groups. Processes,
HTTP, and the journal also take no time. Therefore, a second part runs three of the rows with real services
and shows both figures.

    python benchmarks/multi_policy.py [--quick] [--steps 40] [--only sweep|services] [--processes 2]
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt

from harness import report, show_table
from lending_run import LendingRun
from multi_policy_services import run_services
from multi_policy_sweep import COSTS, PLAIN, SCHEDULES, SEEDS, Cell, Key, Sweep, cells, figures
from plots import use_style
from schedule_run import VirtualRun
from schedules import ASTRAFLOW, LENDING, SYNCHRONOUS, Schedule, Work

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
AT_LEAST = {
    "speedup_vs_best_min": 1.0,
    "speedup_vs_best_min_free_steady": 0.98,
    "lending_vs_split_min_at_20": 0.98,
    "frac_of_bound_min": 0.95,
    "frac_of_bound_min_steady": 0.95,
    "speedup_vs_plain_geomean": 2.0,
    "services_over_virtual": 0.95,
    "lending_services_over_virtual": 0.95,
    "colocated_services_over_virtual": 0.95,
}
AT_MOST = {
    "idle_frac": 0.06,
    "services_over_virtual": 1.05,
    "lending_services_over_virtual": 1.05,
    "colocated_services_over_virtual": 1.05,
}
SERVICE_SEEDS = (0, 1, 2)
SHOWN = 0.05
"""Cost of a switch in the picture."""

# --- showing --------------------------------------------------------------------------------------


def show(sweep: Sweep) -> None:
    """Prints a row per schedule, setting, and cost (medians of the seeds), and a row per setting."""
    rows: list[tuple[object, ...]] = []
    for idx, cell in enumerate(sweep.settings):
        for schedule in SCHEDULES:
            for is_steady in (False, True):
                for cost in COSTS:
                    key = Key(idx, schedule.name, cost, sweep.seeds[0], is_steady)
                    if sweep.has(key):
                        rows.append(_row(sweep, cell, key))
    header = (
        "policies", "load", "tail", "schedule", "switch", "s/step", "of bound", "idle", "switching",
        "recomputing", "moved", "staleness", "max", "length",
    )  # fmt: skip
    show_table(f"{sweep.steps} steps at load 0.8, fewer above, VIRTUAL time: medians", header, rows)
    summary = [
        (str(cell), cost, _shown(sweep, idx, cost, PLAIN), _shown(sweep, idx, cost),
         sweep.best(Key(idx, LENDING.name, cost, sweep.seeds[0])),
         _shown(sweep, idx, cost, (ASTRAFLOW.name,)))
        for idx, cell in enumerate(sweep.settings)
        for cost in COSTS
    ]  # fmt: skip
    header = ("setting", "switch", "over plain", "over the best", "which", "over the fixed split")
    show_table("Speedup of AstraFlow with lending, whole runs: range of the seeds", header, summary)


def _row(sweep: Sweep, cell: Cell, key: Key) -> tuple[object, ...]:
    found = [sweep.row(key._replace(seed=seed)) for seed in sweep.seeds]
    names = (
        "step_s", "work_frac", "idle_frac", "switch_frac", "recompute_frac", "moved_frac", "staleness",
        "staleness_max", "length_ratio",
    )  # fmt: skip
    values = [statistics.median(getattr(each, name) for each in found) for name in names]
    name = f"{key.schedule}, steady" if key.is_steady else key.schedule
    return (cell.kind, cell.load, cell.work.tail, name, key.cost, *values)


def _shown(sweep: Sweep, cell: int, cost: float, names: Sequence[str] | None = None) -> str:
    others = names or tuple(each.name for each in SYNCHRONOUS)
    values = [sweep.speedup(Key(cell, LENDING.name, cost, seed), others) for seed in sweep.seeds]
    return f"{min(values):.2f} to {max(values):.2f}"


def draw_sweep(sweep: Sweep, image: Path) -> None:
    """Plots the speedup over each schedule against the load, with a panel per kind of policies and tail."""
    use_style()
    kinds = list(dict.fromkeys((cell.kind, cell.work.tail) for cell in sweep.settings))
    figure, panels = plt.subplots(1, len(kinds), figsize=(3.4 * len(kinds), 4.2), sharey=True, squeeze=False)
    for axes, kind in zip(panels[0], kinds, strict=True):
        chosen = [idx for idx, cell in enumerate(sweep.settings) if (cell.kind, cell.work.tail) == kind]
        loads = [sweep.settings[idx].load for idx in chosen]
        for color, schedule in enumerate((*SYNCHRONOUS, ASTRAFLOW)):
            ratios = [
                statistics.median(
                    sweep.speedup(Key(idx, LENDING.name, SHOWN, seed), (schedule.name,))
                    for seed in sweep.seeds
                )
                for idx in chosen
            ]
            style = ":" if schedule is ASTRAFLOW else "--" if schedule.is_colocated else "-"
            axes.plot(loads, ratios, style, marker="o", color=f"C{color}", label=schedule.name)
        axes.axhline(1.0, color="0.3", lw=1)
        axes.set(xscale="log", xlabel="episodes per slot", title=f"{kind[0]}, tail {kind[1]:g}")
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
    panels[0][0].set_ylabel("its seconds / AstraFlow's with lending")
    panels[0][min(1, len(kinds) - 1)].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(image)
    plt.close(figure)


# --- with real services -------------------------------------------------------------------------


def beside_services(steps: int, scale: float, seeds: Sequence[int], out: Path) -> dict[str, object]:
    """Measures AstraFlow, lending, and colocated, by the virtual clock and with real services.

    Real devices don't join steps. A switch costs what it took the real services, half of it in each
    direction. Both clocks draw different lengths, so one short run says less than the sum of several.
    """
    from astraflow.addons.tiny_models.spec import load_spec
    from astraflow.addons.tiny_models.tiny import init_model  # imports torch, which only this part needs

    spec = load_spec(ROOT / "recipes" / "models" / "quickstart.yaml", ["warm_start.steps=0"])
    model = out / "model"
    init_model(spec, model)  # its tokenizer is used, its weights are not
    colocated = next(schedule for schedule in SYNCHRONOUS if schedule.name == "colocated")
    rows: list[tuple[object, ...]] = []
    walls: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        for schedule in (ASTRAFLOW, LENDING, colocated):
            row = _row_of_services(schedule, steps=steps, seed=seed, scale=scale, model=model, out=out)
            rows.append(row)
            walls.setdefault(schedule.name, []).append((row[2], row[3]))
    header = (
        "schedule", "seed", "virtual s", "services s", "switch s", "staleness", "services", "audit",
    )  # fmt: skip
    show_table(f"{steps} steps, virtual and with real services at {scale:g} times the clock", header, rows)
    (ours, ours_real), (lending, lending_real), (sync, sync_real) = map(_sums, walls.values())
    ratios = [real / virtual for each in walls.values() for virtual, real in each]
    return {
        "num_service_seeds": len(seeds),
        "virtual_speedup_vs_colocated": sync / ours,
        "services_speedup_vs_colocated": sync_real / ours_real,
        "services_over_virtual": ours_real / ours,
        "lending_services_over_virtual": lending_real / lending,
        "colocated_services_over_virtual": sync_real / sync,
        "services_over_virtual_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "lending_services_speedup": ours_real / lending_real,
        "lending_virtual_speedup": ours / lending,
        "time_scale": scale,
        "audits_hold": all(row[-1] == "holds" for row in rows),
    }


def _row_of_services(
    schedule: Schedule, *, steps: int, seed: int, scale: float, model: Path, out: Path
) -> tuple[str, int, float, float, float, float, float, str]:
    work = Work()
    folder = out / f"{schedule.name}, seed {seed}"
    real = run_services(
        schedule, work, steps=steps, seed=seed, scale=scale, model=model, folder=folder
    )  # fmt: skip
    make = partial(LendingRun, joins=False) if schedule.lends else VirtualRun
    virtual = make(schedule, work, steps=steps, seed=seed, switch_s=real.switch_s / 2).run()
    audit = "holds" if real.audit_ok else "BROKEN"
    return (
        schedule.name, seed, virtual.wall_s, real.wall_s, real.switch_s,
        statistics.fmean(virtual.staleness), real.staleness_mean, audit,
    )  # fmt: skip


def _sums(walls: Sequence[tuple[float, float]]) -> tuple[float, float]:
    virtual, real = zip(*walls, strict=True)
    return sum(virtual), sum(real)


def main(given: argparse.Namespace) -> None:
    """Runs the requested parts, prints, and plots."""
    found: dict[str, object] = {}
    if given.only in ("", "sweep"):
        steps = given.steps or (6 if given.quick else 40)
        seeds = SEEDS[:1] if given.quick else SEEDS
        sweep = Sweep(cells(is_quick=given.quick), steps, seeds)
        sweep.run(given.processes)
        show(sweep)
        found |= {"steps": steps, **figures(sweep)}
        if not given.quick:
            draw_sweep(sweep, given.images / "multi_policy_sweep.png")
    if given.only in ("", "services"):
        with tempfile.TemporaryDirectory(prefix="astraflow-multi-") as scratch:
            out = (given.out or Path(scratch)).resolve()
            steps, scale = (2, 100.0) if given.quick else (12, 20.0)
            seeds = SERVICE_SEEDS[:1] if given.quick else SERVICE_SEEDS
            found |= beside_services(steps, scale, seeds, out)
    report(found, at_least=AT_LEAST, at_most=AT_MOST)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps and cells, no pictures: for trying")
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="of each policy at a load of 0.8; at n times the load, 1/n as many (default: 40, quick: 6)",
    )
    parser.add_argument("--only", choices=("", "sweep", "services"), default="")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of the sweep")
    parser.add_argument("--out", type=Path, help="run folders; finished ones are read, not made again")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder of the pictures")
    main(parser.parse_args())
