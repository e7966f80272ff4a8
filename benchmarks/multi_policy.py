"""Measures what waiting costs two policies on ten emulated devices, over a range of loads, and where it is
cheap.

In an episode, both policies generate in turn, and an environment responds after each. AstraFlow generates on
8 devices and trains each policy on one, without any waiting. The baselines are the synchronous schedules of
other systems, on the same ten devices and with the same parts (`schedules.py`):

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

Time is VIRTUAL, with the same clock for all rows, so other load on the machine doesn't change anything. The
setup favors the synchronous schedules: moving weights, switching devices between tasks, and canceling cost
nothing, and over-sampling takes any episodes, not whole groups. Processes, HTTP, and the journal also take no
time. Therefore, a second part runs two of the rows with real services and shows both figures.

    python benchmarks/multi_policy.py [--quick] [--steps 40] [--only sweep|services] [--processes 2]
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from harness import report, show_table
from multi_policy_services import run_services
from schedules import (
    ASTRAFLOW,
    BARRIER,
    NUM_DEVICES,
    NUM_SLOTS,
    POLICIES,
    SYNCHRONOUS,
    Measured,
    Schedule,
    VirtualRun,
    Work,
)

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PLAIN = ("split", "colocated")
"""Schedules without over-sampling, partial rollouts, and steps ahead."""
TIMELINE = (
    "astraflow",
    "split, one step off",
    "colocated",
    "colocated, over-sampled",
    "colocated, partial rollouts",
)
SLOWER = Work(train=(0.5, 1.5), devices=(7, 1, 2))
LONGER = Work(mean_tokens=(1500.0, 6000.0), max_tokens=(4096, 16384), train=(0.2, 0.8))
SCHEDULES = (ASTRAFLOW, BARRIER, *SYNCHRONOUS)


@dataclass(frozen=True)
class Cell:
    """One setting of the sweep."""

    kind: str
    work: Work

    @property
    def load(self) -> float:
        """Episodes of a batch per slot."""
        return self.work.episodes / (NUM_DEVICES * NUM_SLOTS)


def cells(*, is_quick: bool) -> list[Cell]:
    """Returns all settings. A quick run takes one of each kind."""
    groups = (64,) if is_quick else (64, 128, 256)
    tails = (1.0,) if is_quick else (1.0, 3.0)
    equal = [Cell("equal", Work(groups=num, tail=tail)) for tail in tails for num in groups]
    slower = [Cell("trainer 3x slower", replace(SLOWER, groups=num)) for num in groups[:2]]
    longer = [Cell("4x the tokens", replace(LONGER, groups=num)) for num in groups[:2]]
    return [*equal, *slower, *longer]


def run_one(given: tuple[Schedule, Work, int]) -> Measured:
    """Makes one run, in its own process."""
    schedule, work, steps = given
    return VirtualRun(schedule, work, steps=steps).run()


def steps_of(work: Work, steps: int) -> int:
    """Returns the steps of a run. All runs train on equally many episodes, so the beginning has the same
    weight in each."""
    return max(2, steps * Work().groups // work.groups)


Runs = Mapping[str, Measured]
"""Schedule -> its measured run."""


def sweep(settings: Sequence[Cell], steps: int, num_processes: int) -> list[Runs]:
    """Makes the runs of each cell."""
    jobs = [(schedule, cell.work, steps_of(cell.work, steps)) for cell in settings for schedule in SCHEDULES]
    found: list[Measured] = []
    with ProcessPoolExecutor(num_processes) as pool:
        for (schedule, work, _), run in zip(jobs, pool.map(run_one, jobs), strict=True):
            print(f"+ {work.groups} groups, tail {work.tail:g}, {schedule.name}", file=sys.stderr, flush=True)
            found.append(run)
    names = [schedule.name for schedule in SCHEDULES]
    return [
        dict(zip(names, found[i : i + len(names)], strict=True)) for i in range(0, len(found), len(names))
    ]


def best(runs: Runs, names: Sequence[str]) -> str:
    """Returns the fastest of some schedules."""
    return min(names, key=lambda name: runs[name].wall_s)


def speedup(runs: Runs, names: Sequence[str] = tuple(s.name for s in SYNCHRONOUS)) -> float:
    """Returns the seconds of the fastest of some schedules, divided by AstraFlow's."""
    return runs[best(runs, names)].wall_s / runs[ASTRAFLOW.name].wall_s


# --- showing --------------------------------------------------------------------------------------


def show(settings: Sequence[Cell], found: Sequence[Runs], steps: int) -> None:
    """Prints a row per schedule and cell, and a row per cell."""
    rows: list[tuple[object, ...]] = []
    for cell, runs in zip(settings, found, strict=True):
        ours_s = runs[ASTRAFLOW.name].wall_s
        for schedule in SCHEDULES:
            run = runs[schedule.name]
            rows.append(
                (cell.kind, cell.load, cell.work.tail, schedule.name,
                 run.wall_s / steps_of(cell.work, steps), run.wall_s / ours_s,
                 run.slot_use(schedule.num_generating(cell.work)), statistics.fmean(run.staleness),
                 run.staleness_max, run.length_ratio)
            )  # fmt: skip
    header = (
        "policies", "load", "tail", "schedule", "s/step", "over ours", "slots busy", "staleness", "max",
        "length",
    )  # fmt: skip
    show_table(f"{steps} steps of both policies at load 0.8, fewer above; VIRTUAL time", header, rows)
    names = [schedule.name for schedule in SYNCHRONOUS]
    summary = [
        (cell.kind, cell.load, cell.work.tail, speedup(runs, PLAIN), best(runs, PLAIN), speedup(runs),
         best(runs, names), "LOSES" if speedup(runs) < 1 else "")
        for cell, runs in zip(settings, found, strict=True)
    ]  # fmt: skip
    header = ("policies", "load", "tail", "over plain", "which", "over the best", "which", "")
    show_table("AstraFlow's speedup over the best synchronous schedule", header, summary)


def figures(settings: Sequence[Cell], found: Sequence[Runs]) -> dict[str, object]:
    """Returns the figures of the sweep for the last line."""
    by_kind = {
        kind: [(cell, runs) for cell, runs in zip(settings, found, strict=True) if cell.kind == kind]
        for kind in dict.fromkeys(cell.kind for cell in settings)
    }
    equal = [runs for _, runs in by_kind.pop("equal")]
    unequal = [speedup(runs) for pairs in by_kind.values() for _, runs in pairs]
    return {
        "is_virtual": True,
        "speedup_vs_plain_range": _range([speedup(runs, PLAIN) for runs in equal]),
        "speedup_vs_best_range": _range([speedup(runs) for runs in equal]),
        "speedup_unequal": min(speedup(pairs[0][1]) for pairs in by_kind.values()),
        "speedup_unequal_range": _range(unequal),
        "speedup_vs_barrier_unequal": {
            kind: speedup(pairs[0][1], (BARRIER.name,)) for kind, pairs in by_kind.items()
        },
        "sweep": {
            f"{cell.kind}, load {cell.load:g}, tail {cell.work.tail:g}": round(speedup(runs), 3)
            for cell, runs in zip(settings, found, strict=True)
        },
        "num_lost": sum(speedup(runs) < 1 for runs in found),
        "staleness_max": max(runs[ASTRAFLOW.name].staleness_max for runs in found),
    }


def _range(values: Sequence[float]) -> list[float]:
    return [round(min(values), 3), round(max(values), 3)]


def draw_sweep(settings: Sequence[Cell], found: Sequence[Runs], image: Path) -> None:
    """Plots the speedup over each synchronous schedule against the load, with a panel per kind of policies
    and tail."""
    mpl.use("Agg")
    kinds = list(dict.fromkeys((cell.kind, cell.work.tail) for cell in settings))
    figure, panels = plt.subplots(
        1, len(kinds), figsize=(3.4 * len(kinds), 4.2), dpi=130, sharey=True, squeeze=False
    )
    for axes, kind in zip(panels[0], kinds, strict=True):
        chosen = [
            (cell.load, runs)
            for cell, runs in zip(settings, found, strict=True)
            if (cell.kind, cell.work.tail) == kind
        ]
        for idx, schedule in enumerate(SYNCHRONOUS):
            ratios = [speedup(runs, (schedule.name,)) for _, runs in chosen]
            style = "--" if schedule.is_colocated else "-"
            axes.plot(
                [load for load, _ in chosen], ratios, style, marker="o", color=f"C{idx}", label=schedule.name
            )
        axes.axhline(1.0, color="0.3", lw=1)
        axes.set(xscale="log", xlabel="episodes per slot", title=f"{kind[0]}, tail {kind[1]:g}")
        axes.set_xticks([load for load, _ in chosen], [f"{load:g}" for load, _ in chosen])
        axes.minorticks_off()
    panels[0][0].set_ylabel("its seconds / AstraFlow's")
    panels[0][min(1, len(kinds) - 1)].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(image)
    plt.close(figure)


def draw_timeline(runs: Runs, image: Path) -> None:
    """Plots the episodes that run at the same time, and below them the trainers' steps, with a panel per
    schedule."""
    mpl.use("Agg")
    figure, panels = plt.subplots(len(TIMELINE), 1, figsize=(9, 1.8 * len(TIMELINE)), dpi=130, sharex=True)
    shown_s = max(runs[name].wall_s for name in TIMELINE)
    for axes, name in zip(panels, TIMELINE, strict=True):
        run = runs[name]
        times = np.linspace(0, shown_s, 1200)
        begins, ends = (np.sort([span[i] for span in run.episodes]) for i in (0, 1))
        running = np.searchsorted(begins, times, "right") - np.searchsorted(ends, times, "right")
        axes.fill_between(times, np.where(times <= run.wall_s, running, 0), color="C0", alpha=0.6, lw=0)
        for row, policy in enumerate(POLICIES):
            bars = [(begin, end - begin) for begin, end in run.steps[policy]]
            axes.broken_barh(bars, (-110 * (row + 1), 90), color=f"C{row + 1}", lw=0.6)
        axes.set(ylim=(-110 * len(POLICIES) - 20, None), ylabel="episodes", yticks=(0, 200, 400, 600))
        axes.set_title(f"{name}: {run.wall_s:,.0f} s", loc="left", fontsize=9)
    panels[-1].set(xlabel="virtual seconds", xlim=(0, shown_s))
    figure.suptitle("Episodes that run at once, and the steps of both trainers below them", fontsize=10)
    figure.tight_layout()
    figure.savefig(image)
    plt.close(figure)


# --- with real services -------------------------------------------------------------------------


def beside_services(steps: int, scale: float, out: Path) -> dict[str, object]:
    """Measures AstraFlow and colocated, by the virtual clock and with real services."""
    from astraflow.addons.tiny_models.spec import load_spec
    from astraflow.addons.tiny_models.tiny import init_model  # imports torch, which only this part needs

    spec = load_spec(ROOT / "recipes" / "models" / "quickstart.yaml", ["warm_start.steps=0"])
    model = out / "model"
    init_model(spec, model)  # its tokenizer is used, its weights are not
    colocated = next(schedule for schedule in SYNCHRONOUS if schedule.name == "colocated")
    work = Work()
    rows: list[tuple[object, ...]] = []
    walls: list[tuple[float, float]] = []
    for schedule in (ASTRAFLOW, colocated):
        virtual = VirtualRun(schedule, work, steps=steps).run()
        real = run_services(schedule, work, steps=steps, scale=scale, model=model, folder=out / schedule.name)
        walls.append((virtual.wall_s, real.wall_s))
        rows.append(
            (schedule.name, virtual.wall_s, real.wall_s, statistics.fmean(virtual.staleness),
             real.staleness_mean, "holds" if real.audit_ok else "BROKEN")
        )  # fmt: skip
    header = ("schedule", "virtual s", "services s", "staleness", "services", "audit")
    show_table(f"{steps} steps, virtual and with real services at {scale:g} times the clock", header, rows)
    (ours, ours_real), (sync, sync_real) = walls
    return {
        "virtual_speedup_vs_colocated": sync / ours,
        "services_speedup_vs_colocated": sync_real / ours_real,
        "services_over_virtual": ours_real / ours,
        "time_scale": scale,
        "audits_hold": all(row[-1] == "holds" for row in rows),
    }


def main(given: argparse.Namespace) -> None:
    """Runs the requested parts, prints, and plots."""
    found: dict[str, object] = {}
    if given.only in ("", "sweep"):
        steps = given.steps or (6 if given.quick else 40)
        settings = cells(is_quick=given.quick)
        runs = sweep(settings, steps, given.processes)
        show(settings, runs, steps)
        found |= {"steps": steps, **figures(settings, runs)}
        if not given.quick:
            draw_sweep(settings, runs, given.images / "multi_policy_sweep.png")
            draw_timeline(runs[0], given.images / "multi_policy_timeline.png")
    if given.only in ("", "services"):
        with tempfile.TemporaryDirectory(prefix="astraflow-multi-") as scratch:
            out = (given.out or Path(scratch)).resolve()
            found |= beside_services(2 if given.quick else 12, 100.0 if given.quick else 20.0, out)
    report(found, at_least={"speedup_unequal": 2.0})


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
