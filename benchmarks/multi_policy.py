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
HTTP, and the journal also take no time.

    python benchmarks/multi_policy.py [--quick] [--steps 40] [--processes 2]
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt

from harness import report, show_table
from lending_run import LendingRun
from plots import use_style
from schedule_run import Measured, VirtualRun, work_bound_s
from schedules import ASTRAFLOW, LENDING, NUM_DEVICES, NUM_SLOTS, SYNCHRONOUS, Schedule, Work

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
AT_LEAST = {
    "speedup_vs_best_min": 1.0,
    "speedup_vs_best_min_free_steady": 0.98,
    "lending_vs_split_min_at_20": 0.98,
    "frac_of_bound_min": 0.95,
    "frac_of_bound_min_steady": 0.95,
    "speedup_vs_plain_geomean": 2.0,
}
SHOWN = 0.05
"""Cost of a switch in the picture."""
COSTS = (0.0, 0.01, 0.05, 0.2)
"""Costs of a switch, as shares of the bound."""
STEADY_COSTS = (0.0, 0.05)
SEEDS = (20, 21, 22)
"""None of those that were looked at while the decision and the admission were chosen (0, 1, 10, 11, 12)."""
FILL = 4
"""Steps at the beginning and at the end that are not the steady state: as many batches are in flight."""
HIGH_LOAD = 1.6
PLAIN = ("split", "colocated")
"""Schedules without over-sampling, partial rollouts, and steps ahead."""
SCHEDULES = (LENDING, ASTRAFLOW, *SYNCHRONOUS)
SLOWER = Work(train=(0.5, 1.5), devices=(7, 1, 2))
LONGER = Work(mean_tokens=(1500.0, 6000.0), max_tokens=(4096, 16384), train=(0.2, 0.8))


@dataclass(frozen=True)
class Cell:
    """One setting of the sweep."""

    kind: str
    work: Work

    @property
    def load(self) -> float:
        """Episodes of a batch per slot."""
        return self.work.episodes / (NUM_DEVICES * NUM_SLOTS)

    def __str__(self) -> str:
        return f"{self.kind}, load {self.load:g}, tail {self.work.tail:g}"


def cells(*, is_quick: bool) -> list[Cell]:
    """Returns all settings. A quick run takes one of each kind."""
    groups = (64,) if is_quick else (64, 128, 256)
    tails = (1.0,) if is_quick else (1.0, 3.0)
    equal = [Cell("equal", Work(groups=num, tail=tail)) for tail in tails for num in groups]
    slower = [Cell("trainer 3x slower", replace(SLOWER, groups=num)) for num in groups[:2]]
    longer = [Cell("4x the tokens", replace(LONGER, groups=num)) for num in groups[:2]]
    return [*equal, *slower, *longer]


def steps_of(work: Work, steps: int) -> int:
    """Returns the steps of a run. All runs train on equally many episodes, so the beginning has the same
    weight in each."""
    return max(2, steps * Work().groups // work.groups)


def simulate(schedule: Schedule, work: Work, *, steps: int, seed: int, switch_s: float) -> Measured:
    """Makes one run."""
    make = LendingRun if schedule.lends else VirtualRun
    return make(schedule, work, steps=steps, seed=seed, switch_s=switch_s).run()


class Key(NamedTuple):
    """A row: one schedule in one setting."""

    cell: int
    schedule: str
    cost: float
    seed: int
    is_steady: bool = False


@dataclass(frozen=True)
class Found:
    """The result of a run. Shares are of the device-seconds of all devices."""

    step_s: float
    """Seconds per step. In the steady state of a schedule that loses no work: the bound, divided by
    `work_frac`."""
    work_frac: float
    """Share of the work that was trained on: how much of the bound the schedule reaches."""
    idle_frac: float


def measure(cell: Cell, key: Key, steps: int) -> Found:
    """Makes the run of a row."""
    schedule = next(each for each in SCHEDULES if each.name == key.schedule)
    work = cell.work
    num = steps_of(work, steps)
    begin, end = (FILL, num + FILL) if key.is_steady else (0, num)
    planned = num + 2 * FILL if key.is_steady else num
    run = simulate(schedule, work, steps=planned, seed=key.seed, switch_s=key.cost * work.bound_s)
    use = run.use_until(end).since(run.use_until(begin))
    total = NUM_DEVICES * use.at_s
    if key.is_steady and len(run.tokens_drawn) == planned * work.episodes:
        # A burst of `fifo` at either end would change the seconds between two steps. Here, all work is
        # trained on in the end, so it can be counted instead.
        work_frac = (use.generate + use.train) / total
        step_s = work.bound_s / work_frac
    else:
        work_frac = work_bound_s(run, work, (begin, end)) / use.at_s
        step_s = use.at_s / num
    return Found(step_s=step_s, work_frac=work_frac, idle_frac=use.idle_frac(NUM_DEVICES))


class Sweep:
    """All rows of some settings."""

    def __init__(self, settings: Sequence[Cell], steps: int, seeds: Sequence[int] = SEEDS) -> None:
        self.settings = settings
        self.steps = steps
        self.seeds = seeds
        self._found: dict[Key, Found] = {}

    def run(self, num_processes: int) -> None:
        """Makes all runs."""
        jobs = [key for cell in range(len(self.settings)) for key in self._keys(cell)]
        with ProcessPoolExecutor(num_processes) as pool:
            runs = pool.map(_measure, [(self.settings[key.cell], key, self.steps) for key in jobs])
            for key, run in zip(jobs, runs, strict=True):
                print(f"+ {self.settings[key.cell]}, {key}", file=sys.stderr, flush=True)
                self._found[key] = run

    def _keys(self, cell: int) -> Iterable[Key]:
        for seed in self.seeds:
            for schedule in SCHEDULES:
                for cost in COSTS if switches(schedule) else COSTS[:1]:
                    yield Key(cell, schedule.name, cost, seed)
            yield Key(cell, ASTRAFLOW.name, 0.0, seed, True)
            for cost in STEADY_COSTS:
                yield Key(cell, LENDING.name, cost, seed, True)

    def row(self, key: Key) -> Found:
        """Returns a row. Switches don't matter to a schedule without any."""
        return self._found.get(key) or self._found[key._replace(cost=0.0)]

    def best(self, key: Key, names: Sequence[str] = tuple(s.name for s in SYNCHRONOUS)) -> str:
        """Returns the fastest of some schedules in a row's setting, with its cost and seed."""
        return min(names, key=lambda name: self.row(key._replace(schedule=name, is_steady=False)).step_s)

    def speedup(self, key: Key, names: Sequence[str] = tuple(s.name for s in SYNCHRONOUS)) -> float:
        """Returns the seconds of the fastest of some schedules, divided by the row's. Schedules that wait for
        each step have neither beginning nor end, so their whole run is their steady state."""
        other = self.row(key._replace(schedule=self.best(key, names), is_steady=False))
        return other.step_s / self.row(key).step_s

    def keys(
        self, schedule: Schedule, cost: float, *, is_steady: bool = False, loads: "Loads | None" = None
    ) -> list[Key]:
        """Returns a schedule's rows: all settings, or those with some loads, and all seeds."""
        return [
            Key(idx, schedule.name, cost, seed, is_steady)
            for idx, cell in enumerate(self.settings)
            for seed in self.seeds
            if loads is None or loads(cell.load)
        ]


Loads = Callable[[float], bool]


def switches(schedule: Schedule) -> bool:
    """Whether devices change between generation and training."""
    return schedule.lends or schedule.is_colocated


def _measure(given: tuple[Cell, Key, int]) -> Found:
    return measure(*given)


# --- figures --------------------------------------------------------------------------------------


def is_high(load: float) -> bool:
    """Whether a batch more than fills the devices."""
    return load >= HIGH_LOAD


def figures(sweep: Sweep) -> dict[str, object]:
    """Returns the figures of the sweep for the last line, and the worst row of each."""
    worst = _Worst(sweep)
    low = sweep.keys(LENDING, 0.05, loads=lambda load: load <= HIGH_LOAD)
    high_loads = is_high if any(is_high(cell.load) for cell in sweep.settings) else None
    return {
        "is_virtual": True,
        "num_seeds": len(sweep.seeds),
        "speedup_vs_best_min": worst.least("speedup_vs_best_min", sweep.keys(LENDING, 0.05), sweep.speedup),
        "speedup_vs_best_min_free_steady": worst.least(
            "speedup_vs_best_min_free_steady", sweep.keys(LENDING, 0.0, is_steady=True), sweep.speedup
        ),
        "lending_vs_split_min_at_20": worst.least(
            "lending_vs_split_min_at_20",
            sweep.keys(LENDING, 0.2),
            lambda key: sweep.speedup(key, (ASTRAFLOW.name,)),
        ),
        **_bound_figures(sweep, worst, high_loads),
        "speedup_vs_plain_geomean": statistics.geometric_mean(sweep.speedup(key, PLAIN) for key in low),
        "speedup_vs_plain_range": _range(sweep.speedup(key, PLAIN) for key in sweep.keys(LENDING, 0.05)),
        "speedup_vs_best_range": {
            f"{cost:g}": _range(sweep.speedup(key) for key in sweep.keys(LENDING, cost)) for cost in COSTS
        },
        "speedup_vs_best_range_fixed_split": _range(
            sweep.speedup(key) for key in sweep.keys(ASTRAFLOW, 0.05)
        ),
        "worst_rows": worst.rows,
    }  # fmt: skip


def _bound_figures(sweep: Sweep, worst: "_Worst", loads: Loads | None) -> dict[str, object]:
    """Returns how much of the bound lending reaches, and what is idle, at high loads and costs up to 5 %."""
    low_costs = [cost for cost in COSTS if cost <= max(STEADY_COSTS)]
    whole = [key for cost in low_costs for key in sweep.keys(LENDING, cost, loads=loads)]
    steady = [key for cost in STEADY_COSTS for key in sweep.keys(LENDING, cost, is_steady=True, loads=loads)]
    fixed = sweep.keys(ASTRAFLOW, 0.0, is_steady=True, loads=loads)

    def frac(key: Key) -> float:
        return sweep.row(key).work_frac

    return {
        "frac_of_bound_min": worst.least("frac_of_bound_min", whole, frac),
        "frac_of_bound_min_steady": worst.least("frac_of_bound_min_steady", steady, frac),
        "idle_frac": -worst.least("idle_frac", steady, lambda key: -sweep.row(key).idle_frac),
        "idle_frac_fixed_split": _range(sweep.row(key).idle_frac for key in fixed),
    }


class _Worst:
    """The row in which each figure is worst."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self.rows: dict[str, str] = {}

    def least(self, name: str, keys: Sequence[Key], value: Callable[[Key], float]) -> float:
        """Returns the least value over some rows, and remembers its row."""
        key = min(keys, key=value)
        self.rows[name] = f"{self._sweep.settings[key.cell]}, cost {key.cost:g}, seed {key.seed}"
        return value(key)


def _range(values: Iterable[float]) -> list[float]:
    found = list(values)
    return [round(min(found), 3), round(max(found), 3)]


# --- showing --------------------------------------------------------------------------------------


def show(sweep: Sweep) -> None:
    """Prints a row per setting and cost."""
    rows = [
        (str(cell), cost, _shown(sweep, idx, cost, PLAIN), _shown(sweep, idx, cost),
         sweep.best(Key(idx, LENDING.name, cost, sweep.seeds[0])),
         _shown(sweep, idx, cost, (ASTRAFLOW.name,)))
        for idx, cell in enumerate(sweep.settings)
        for cost in COSTS
    ]  # fmt: skip
    header = ("setting", "switch", "over plain", "over the best", "which", "over the fixed split")
    title = f"Speedup with lending, {sweep.steps} steps at load 0.8, fewer above, VIRTUAL time"
    show_table(title, header, rows)


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


def main(given: argparse.Namespace) -> None:
    """Runs the sweep, prints, and plots."""
    steps = given.steps or (6 if given.quick else 40)
    sweep = Sweep(cells(is_quick=given.quick), steps, SEEDS[:1] if given.quick else SEEDS)
    sweep.run(given.processes)
    show(sweep)
    if not given.quick:
        draw_sweep(sweep, given.images / "multi_policy_sweep.png")
    report({"steps": steps, **figures(sweep)}, at_least=AT_LEAST, at_most={"idle_frac": 0.06})


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
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of the sweep")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder of the pictures")
    main(parser.parse_args())
