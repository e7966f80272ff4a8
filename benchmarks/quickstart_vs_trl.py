"""Compares AstraFlow with TRL's GRPOTrainer: the time to a held-out accuracy with the same model, tasks,
reward, and step.

Both sides start from one model folder, and train with one optimizer, group size, and number of completions
per step, each with the same learning rates. The comparison uses the best learning rate of each row. The
recipe's filters are off, and its `max_staleness` is 1.

A ratio of two systems mixes the effects of the systems with those of their algorithms. There are therefore
several rows:

    as shipped            the recipe's loss; samples whose gradient is known to be 0 are not computed
    equal loss            TRL's loss, the clipped surrogate
    nothing skipped       the recipe's loss, every sample computed, as TRL does
    equal                 TRL's loss, every sample computed: shows the effect of the *system* alone
    equal, synchronous    the same with `max_staleness` 0: no generation during training
    TRL                   with the settings that are best on a CPU; it makes a separate forward pass for the
                          logprobs of the policy that sampled, which AstraFlow records while it samples
    TRL, tuned            prompts of one length together in a step, and a static cache

TRL's clock starts when the first step begins; AstraFlow's starts at the first training lease. Process starts,
imports, loading of models and tasks, and publication of version 0 come before both. The seconds of the whole
command, which include them, are also reported. A version's time is when its optimizer steps are done (TRL),
or when its commit is durable (AstraFlow), which comes after its publication. Neither side evaluates while the
clock runs. Each keeps the weights of all versions, and afterwards one evaluator samples one completion for
each of 512 held-out tasks at temperature 1. A run reaches the target at the time of the second of two
consecutive evaluations that reach it.

CPU time is that of all processes of a side, from its first version to its last, divided by the completions in
between. Unlike the clock, it hardly depends on other load on the machine.

TRL runs in `.venv-trl`, made on demand (about 2 minutes, 1.6 GB), in one process, with one torch thread or
one per core, whichever a short trial finds faster. Don't run anything else at the same time: two torch
threads that compete with other processes for two cores are many times slower than one.

    python benchmarks/quickstart_vs_trl.py [--quick] [--every 2] [--rows equal TRL] [--seeds 0 1 2]
"""

import argparse
import asyncio
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.utils import logging as transformers_logging

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.config import parse_config
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.short_forms import full_mapping
from astraflow.tasks.sources import make_source
from environments import make_environment
from harness import Runs, report, show_table
from heldout import Evaluator
from race import STOP, TARGET, Curve, Row, Setting, run
from trl_side import PACKAGES, StopRule

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
RECIPE = ROOT / "recipes" / "quickstart.yaml"
IMAGE = ROOT / "docs" / "images" / "quickstart_vs_trl.png"
NUM_TASKS = 512
SEEDS = (0, 1, 2)
RATE_FACTORS = (1.0, 2.0, 4.0)
"""Learning rates of all rows, as multiples of the recipe's. For most rows, the middle one is best."""
ROWS = {
    "as shipped": Row("astraflow"),
    "equal loss": Row("astraflow", has_equal_loss=True),
    "nothing skipped": Row("astraflow", skips=False),
    "equal": Row("astraflow", has_equal_loss=True, skips=False),
    "equal, synchronous": Row("astraflow", has_equal_loss=True, skips=False, max_staleness=0),
    "TRL": Row("trl"),
    "TRL, tuned": Row("trl", is_tuned=True),
}
AT_LEAST = {"speedup": 1.7, "throughput_ratio": 2.2, "speedup_equal": 1.5, "cpu_ratio_equal": 2.0}


async def faster_threads(setting: Setting) -> int:
    """Returns the number of torch threads with which TRL is faster, one or all cores, measured over some
    steps of each."""
    speeds: dict[int, float] = {}
    for count in sorted({1, os.cpu_count() or 1}):
        stop = StopRule(reward=1e9, window=1, max_steps=16)  # fewer say little: two threads start slowly
        trial = replace(setting, work=setting.work / f"threads-{count}", trl_threads=count, stop=stop)
        curve, _ = await run(trial, "TRL", ROWS["TRL"], setting.config.train.lr, SEEDS[0])
        speeds[count] = curve.completions_per_s
    measured = ", ".join(f"{count}: {speed:.0f}" for count, speed in speeds.items())
    print(f"TRL's completions/s by torch threads: {measured}", flush=True)
    return max(speeds, key=lambda count: speeds[count])


def make_setting(args: argparse.Namespace, work: Path) -> tuple[Setting, Recipe]:
    """Returns what all rows share, and the unchanged recipe (its evaluation set is the evaluator's)."""
    original = load_recipe(args.recipe)
    policy = next(iter(original.trained))
    model_dir = original.policies[policy].model_dir
    if not model_dir.is_dir():
        init_model(load_spec(SPEC), model_dir, progress=print)
    overrides: dict[str, Any] = {
        "weights.keep": STOP.max_steps + 1,
        f"policies.{policy}.table.filters": [],
        f"policies.{policy}.train.steps": STOP.max_steps,
        f"policies.{policy}.train.checkpoint_every": STOP.max_steps,
    }
    mapping = full_mapping(args.recipe, overrides)
    mapping["eval"]["sets"] = {}
    recipe = parse_config(mapping, Recipe)
    sources = [make_source(config, name=name) for name, config in recipe.tasks.sources.items()]
    tasks_file = work / "tasks.jsonl"
    lines = [msgspec.json.encode(source.task(idx)) for source in sources for idx in range(len(source))]
    tasks_file.write_bytes(b"\n".join(lines) + b"\n")
    python = make_environment(args.venv, PACKAGES)
    stop = StopRule(reward=STOP.reward, window=STOP.window, max_steps=args.steps)
    return Setting(recipe, policy, work, python, tasks_file, stop=stop), original


async def compare(args: argparse.Namespace, work: Path) -> None:
    """Runs everything, alternating between the rows, and prints the results."""
    setting, original = make_setting(args, work)
    setting = replace(setting, trl_threads=args.trl_threads or await faster_threads(setting))
    base_rate = setting.config.train.lr
    rates = [base_rate] if args.quick else [base_rate * factor for factor in args.rates]
    seeds = args.seeds[:1] if args.quick else args.seeds
    evaluator = Evaluator(original, setting.policy, num_tasks=NUM_TASKS)
    curves: list[Curve] = []
    for lr in rates:
        for seed in seeds:
            for name in args.rows:
                curve, versions = await run(setting, name, ROWS[name], lr, seed)
                for snapshot in [evaluator.base, *versions][:: args.every]:
                    curve.scores[snapshot.version] = await evaluator.score(snapshot)
                curves.append(curve)
                print(
                    f"{name}, lr {lr:g}, seed {seed}: {curve.reached_s:.1f} s to {TARGET}, "
                    f"{len(curve.times_s)} steps in {curve.times_s[-1]:.1f} s (command "
                    f"{curve.command_s:.1f} s), {curve.completions_per_s:.0f} completions/s, "
                    f"{curve.cpu_ms:.3f} ms of CPU each, {curve.scores[0]:.3f} -> "
                    f"{curve.points()[-1][1]:.3f}; others used {curve.others_load:.2f} cores",
                    flush=True,
                )
    await evaluator.close()
    conclude(setting, curves, args)


def best_of(curves: Sequence[Curve], row: str) -> list[Curve]:
    """Returns the runs of a row's best learning rate, which has the lowest median time to the target."""
    rates = sorted({c.lr for c in curves if c.row == row})
    by_rate = {lr: [c for c in curves if c.row == row and c.lr == lr] for lr in rates}
    return min(by_rate.values(), key=lambda runs: statistics.median(c.reached_s for c in runs))


def conclude(setting: Setting, curves: Sequence[Curve], args: argparse.Namespace) -> None:
    """Writes the tables, the plot, and the last line."""
    table = setting.config.table
    title = (
        f"seconds to {TARGET} held out ({NUM_TASKS} tasks, every {args.every} versions), "
        f"{table.groups_per_batch} x {table.group_size} completions a step, "
        f"{setting.config.train.minibatches} optimizer steps; {os.cpu_count()} cores"
    )
    header = ["row", "lr", "s to the target", "s of the command", "completions/s", "CPU ms", "others"]
    rows: list[list[object]] = []
    for name in args.rows:
        for lr in sorted({c.lr for c in curves}):
            runs = [c for c in curves if c.row == name and c.lr == lr]
            rows.append([name, f"{lr:g}", *columns_of(runs), f"{max(c.others_load for c in runs):.2f}"])
    show_table(title, header, rows)
    best = {name: best_of(curves, name) for name in args.rows}
    show_table(
        "the same at each row's best learning rate",
        header[:-1],
        [[name, f"{runs[0].lr:g}", *columns_of(runs)] for name, runs in best.items()],
    )
    if args.image:
        draw(curves, best, args.image)
    report(figures_of(setting, best), at_least=AT_LEAST)


def columns_of(runs: Sequence[Curve]) -> list[Runs]:
    """Returns the figures of some runs, as the tables show them."""
    return [
        Runs(tuple(c.reached_s for c in runs)),
        Runs(tuple(c.command_s for c in runs)),
        Runs(tuple(c.completions_per_s for c in runs)),
        Runs(tuple(c.cpu_ms for c in runs)),
    ]


def figures_of(setting: Setting, best: dict[str, list[Curve]]) -> dict[str, object]:
    """Returns the contents of the JSON: each row's figures, and its ratios to TRL's faster row."""
    figures: dict[str, object] = {"trl_threads": setting.trl_threads}
    for name, runs in best.items():
        key = name.replace(",", "").replace(" ", "_").lower()
        reached, command, speed, cpu = columns_of(runs)
        figures |= {f"{key}_lr": runs[0].lr, f"{key}_s": _finite(reached.median)}
        figures |= {f"{key}_command_s": command, f"{key}_completions_per_s": speed, f"{key}_cpu_ms": cpu}
    theirs = [columns_of(best[name]) for name in best if ROWS[name].side == "trl"]
    if not theirs:
        return figures
    trl_s, trl_command_s = (min(columns[idx].median for columns in theirs) for idx in (0, 1))
    trl_speed = max(columns[2].median for columns in theirs)
    trl_cpu_ms = min(columns[3].median for columns in theirs)
    for name, runs in best.items():
        if ROWS[name].side == "trl":
            continue
        reached, command, speed, cpu = columns_of(runs)
        end = "" if name == "as shipped" else "_" + name.replace(",", "").replace(" ", "_")
        figures[f"speedup{end}"] = _ratio(trl_s, reached.median)
        figures[f"command_speedup{end}"] = _ratio(trl_command_s, command.median)
        figures[f"throughput_ratio{end}"] = _ratio(speed.median, trl_speed)
        figures[f"cpu_ratio{end}"] = _ratio(trl_cpu_ms, cpu.median)
    return figures


def _ratio(value: float, of: float) -> float | None:
    """Returns the ratio, or None if either side did not reach the target."""
    return _finite(value / of) if math.isfinite(of) else None


def _finite(value: float) -> float | None:
    """Returns None for infinity, which JSON doesn't have: a target that was not reached is null."""
    return round(value, 3) if math.isfinite(value) else None


def draw(curves: Sequence[Curve], best: dict[str, list[Curve]], image: Path) -> None:
    """Plots all runs, and highlights those of each row's best learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    colors = dict(zip(best, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for curve in sorted(curves, key=lambda c: c in best[c.row]):
        is_best = curve in best[curve.row]
        label = f"{curve.row}, lr {curve.lr:g}" if is_best and curve is best[curve.row][0] else None
        axes.plot(
            *zip(*curve.points(), strict=True),
            color=colors[curve.row],
            alpha=1.0 if is_best else 0.1,
            label=label,
        )
    axes.axhline(TARGET, color="gray", linestyle=":")
    axes.set(xlabel="seconds since the first step", ylabel=f"held-out accuracy ({NUM_TASKS} tasks)")
    axes.legend(loc="lower right")
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    print(f"curves: {image}")


def main() -> None:
    """Parses the command line, and runs the comparison in a folder that is deleted afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, the recipe's learning rate")
    parser.add_argument("--every", type=int, default=2, help="versions between two evaluations")
    parser.add_argument("--steps", type=int, default=STOP.max_steps, help="most steps of a run")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(RATE_FACTORS), help="multiples of the recipe's rate"
    )
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--image", type=Path, help=f"picture of the curves (default: {IMAGE}; none if quick)")
    parser.add_argument(
        "--trl-threads", type=int, help="torch threads of TRL (default: the faster of 1 and all cores)"
    )
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    os.chdir(ROOT)
    work = args.keep or Path(tempfile.mkdtemp(prefix="quickstart-vs-trl-"))
    work.mkdir(parents=True, exist_ok=True)
    args.image = args.image or (None if args.quick else IMAGE)
    torch.set_num_threads(os.cpu_count() or 1)
    transformers_logging.disable_progress_bar()
    try:
        asyncio.run(compare(args, work.resolve()))
    finally:
        if args.keep is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
