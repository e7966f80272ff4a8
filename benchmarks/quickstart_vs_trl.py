"""Time to a held-out accuracy: AstraFlow beside TRL's GRPOTrainer, same model, tasks, reward and step.

Both sides start from one model folder and train with one optimizer, group size and number of completions a
step, each with the same learning rates; the best of each side is compared. Filters of the recipe are off: TRL
trains on every completion, and so does the recipe here. TRL's loss is the clipped surrogate, with the bounds
of the recipe's loss if that is `grpo`, else with that loss's defaults.

The clock. TRL's starts when the first step begins; AstraFlow's at the first training lease. Process starts,
imports, loading of models and tasks, and publication of version 0 lie before both. A version's time is when
its optimizer steps are done (TRL), or when its commit is durable (AstraFlow), which comes after its
publication. Neither side evaluates while the clock runs: each keeps the weights of all versions, and
afterwards one evaluator samples one completion of each of 512 held-out tasks at temperature 1. A run reaches
the target at the time of the second of two consecutive evaluations that do.

TRL runs in `.venv-trl`, made on demand (about 2 minutes, 1.6 GB), in one process, with one torch thread or
one a core, whichever a short trial finds faster. Run nothing else meanwhile: two torch threads that compete
with other processes for two cores are many times slower than one.

    python benchmarks/quickstart_vs_trl.py [--quick] [--every 2]
"""

import argparse
import asyncio
import itertools
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from astraflow.config import load_mapping, parse_config
from astraflow.dataflow.audit import audit
from astraflow.envs.sources import make_source
from astraflow.host_tensors import WeightSnapshot
from astraflow.launch.config import PolicyConfig, Recipe, load_recipe
from astraflow.launch.folder import RunFolder
from astraflow.launch.run import launch
from astraflow.losses.config import GrpoLossConfig
from astraflow.models.loading import host_tensor
from astraflow.models.spec import load_spec
from astraflow.models.tiny import init_model
from astraflow.weights.saved_versions import SavedVersions
from harness import report, show_table
from heldout import Evaluator
from trl_side import StopRule, TrlJob, make_environment, run_job, weights_file

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
RECIPE = ROOT / "recipes" / "quickstart.yaml"
IMAGE = ROOT / "docs" / "images" / "quickstart_vs_trl.png"
TARGET = 0.75
NUM_TASKS = 512
SEEDS = (0, 1, 2)
RATE_FACTORS = (0.5, 1.0, 2.0)
"""Learning rates of both sides, as multiples of the recipe's."""
STOP = StopRule(reward=0.83, window=5, max_steps=120)
SIDES = ("astraflow", "trl")


@dataclass
class Curve:
    """One run: when each version was ready, and how well the evaluated ones do."""

    side: str
    lr: float
    seed: int
    times_s: list[float]
    """Times at which versions 1, 2, ... were reached."""
    completions_per_s: float
    """Completions trained on, over the time of the last version."""
    scores: dict[int, float] = field(default_factory=dict[int, float])
    """Version -> held-out accuracy."""

    def points(self) -> list[tuple[float, float]]:
        """(seconds, accuracy) of each evaluation."""
        return [(self.times_s[v - 1] if v else 0.0, score) for v, score in sorted(self.scores.items())]

    @property
    def reached_s(self) -> float:
        """Seconds to the second of two consecutive evaluations at the target; infinite if there are none."""
        points = self.points()
        hits = [b[0] for a, b in itertools.pairwise(points) if min(a[1], b[1]) >= TARGET]
        return hits[0] if hits else math.inf


@dataclass(frozen=True)
class Setting:
    """What both sides share."""

    recipe: Recipe
    policy: str
    work: Path
    trl_python: Path
    tasks_file: Path
    trl_threads: int = 1
    stop: StopRule = STOP

    @property
    def config(self) -> PolicyConfig:
        """The trained policy."""
        return self.recipe.policies[self.policy]

    def with_rate(self, lr: float, seed: int) -> Recipe:
        """The recipe of one run."""
        mapping = self.recipe.model_dump(mode="json")
        mapping["seed"] = seed
        mapping["policies"][self.policy]["train"]["lr"] = lr
        return parse_config(mapping, Recipe)


# --- AstraFlow --------------------------------------------------------------------------------------


async def run_astraflow(setting: Setting, lr: float, seed: int) -> tuple[Curve, list[WeightSnapshot]]:
    """Trains with all real services; the weights stay in the run folder."""
    recipe = setting.with_rate(lr, seed)
    run_dir = setting.work / f"astraflow-{lr:g}-{seed}"
    rewards: list[float] = []
    commits: list[float] = []
    num_samples = 0
    async with launch(recipe, run_dir) as run:
        async for step in run.steps(setting.policy):
            rewards.append(step.reward_mean)
            commits.append(step.at_s)
            num_samples += step.num_samples
            if STOP.is_over(rewards):
                break
    folder = RunFolder(run_dir)
    began_s = audit(folder.journal).first_lease_s
    times_s = [at_s - began_s for at_s in commits]
    curve = Curve("astraflow", lr, seed, times_s, num_samples / times_s[-1])
    return curve, published(folder, setting, len(times_s))


def published(folder: RunFolder, setting: Setting, num_versions: int) -> list[WeightSnapshot]:
    """Versions 1, 2, ... from the publisher's files, verified."""
    saved = SavedVersions(folder.weights / setting.policy, setting.policy)
    return [
        WeightSnapshot(setting.policy, version, saved.read(version).tensors, setting.config.model_dir)
        for version in range(1, num_versions + 1)
    ]


# --- TRL --------------------------------------------------------------------------------------------


def run_trl(setting: Setting, lr: float, seed: int) -> tuple[Curve, list[WeightSnapshot]]:
    """Trains in TRL's own environment, in a process of its own."""
    out_dir = setting.work / f"trl-{lr:g}-{seed}"
    out_dir.mkdir(parents=True)
    config = setting.config
    train = config.train
    table = config.table
    if train.denominator != "tokens" or train.optimizer.schedule != "constant":
        sys.exit(
            "TRL's side divides by tokens and keeps the learning rate after the warm-up; the recipe does not"
        )
    loss = train.loss if isinstance(train.loss, GrpoLossConfig) else GrpoLossConfig()
    job = TrlJob(
        model_dir=str(config.model_dir.resolve()),
        tasks_file=str(setting.tasks_file),
        reward=setting.recipe.tasks.without_curators.model_dump_json(),
        out_dir=str(out_dir),
        stop=setting.stop,
        seed=seed,
        lr=lr,
        warmup_steps=train.optimizer.warmup_steps,
        betas=train.optimizer.betas,
        eps=train.optimizer.eps,
        weight_decay=train.optimizer.weight_decay,
        max_grad_norm=train.optimizer.max_grad_norm,
        group_size=table.group_size,
        groups_per_batch=table.groups_per_batch,
        minibatches=train.minibatches,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        num_threads=setting.trl_threads,
    )
    result = run_job(setting.trl_python, job, ROOT / "src")
    num_samples = len(result.times_s) * table.groups_per_batch * table.group_size
    curve = Curve("trl", lr, seed, result.times_s, num_samples / result.times_s[-1])
    return curve, [_trl_weights(setting, out_dir, idx + 1) for idx in range(len(result.times_s))]


def faster_threads(setting: Setting) -> int:
    """Torch threads with which TRL is faster, one or all cores, by some steps of each."""
    speeds: dict[int, float] = {}
    for count in sorted({1, os.cpu_count() or 1}):
        stop = StopRule(reward=1e9, window=1, max_steps=16)  # fewer say nothing: two threads start slowly
        trial = replace(setting, work=setting.work / f"threads-{count}", trl_threads=count, stop=stop)
        speeds[count] = run_trl(trial, setting.config.train.lr, SEEDS[0])[0].completions_per_s
    measured = ", ".join(f"{count}: {speed:.0f}" for count, speed in speeds.items())
    print(f"TRL's completions/s by torch threads: {measured}", flush=True)
    return max(speeds, key=lambda count: speeds[count])


def _trl_weights(setting: Setting, out_dir: Path, version: int) -> WeightSnapshot:
    tensors = tuple(host_tensor(name, t) for name, t in load_file(weights_file(out_dir, version)).items())
    return WeightSnapshot(setting.policy, version, tensors, setting.config.model_dir)


# --- the comparison ---------------------------------------------------------------------------------


def make_setting(args: argparse.Namespace, work: Path) -> tuple[Setting, Recipe]:
    """What both sides share, and the recipe as it stands (its evaluation set is the evaluator's)."""
    original = load_recipe(args.recipe)
    policy = next(iter(original.trained))
    model_dir = original.policies[policy].model_dir
    if not model_dir.is_dir():
        init_model(load_spec(SPEC), model_dir, progress=print)
    overrides: dict[str, Any] = {
        "weights.keep": STOP.max_steps + 1,
        f"policies.{policy}.table.filters": [],
        f"policies.{policy}.table.max_staleness": 1,
        f"policies.{policy}.train.steps": STOP.max_steps,
        f"policies.{policy}.train.checkpoint_every": STOP.max_steps,
    }
    mapping = load_mapping(args.recipe, overrides)
    mapping["eval"]["sets"] = {}
    recipe = parse_config(mapping, Recipe)
    sources = [make_source(config, name=name) for name, config in recipe.tasks.sources.items()]
    tasks_file = work / "tasks.jsonl"
    lines = [msgspec.json.encode(source.task(idx)) for source in sources for idx in range(len(source))]
    tasks_file.write_bytes(b"\n".join(lines) + b"\n")
    python = make_environment(args.venv, ROOT / "constraints.txt")
    return Setting(recipe, policy, work, python, tasks_file), original


async def compare(args: argparse.Namespace, work: Path) -> None:
    """Runs everything, alternating between the sides, and prints what came out."""
    setting, original = make_setting(args, work)
    setting = replace(setting, trl_threads=args.trl_threads or faster_threads(setting))
    base_rate = setting.config.train.lr
    rates = [base_rate] if args.quick else [base_rate * factor for factor in RATE_FACTORS]
    seeds = SEEDS[:1] if args.quick else SEEDS
    evaluator = Evaluator(original, setting.policy, num_tasks=NUM_TASKS)
    curves: list[Curve] = []
    for lr in rates:
        for seed in seeds:
            for side in SIDES:
                if side == "trl":
                    curve, versions = await asyncio.to_thread(run_trl, setting, lr, seed)
                else:
                    curve, versions = await run_astraflow(setting, lr, seed)
                for snapshot in [evaluator.base, *versions][:: args.every]:
                    curve.scores[snapshot.version] = await evaluator.score(snapshot)
                curves.append(curve)
                print(
                    f"{side} lr {lr:g} seed {seed}: {curve.reached_s:.1f} s to {TARGET}, "
                    f"{len(curve.times_s)} steps in {curve.times_s[-1]:.1f} s, "
                    f"{curve.completions_per_s:.0f} completions/s, {curve.scores[0]:.3f} -> "
                    f"{curve.points()[-1][1]:.3f}",
                    flush=True,
                )
    await evaluator.close()
    conclude(setting, curves, args)


def best_of(curves: Sequence[Curve], side: str) -> list[Curve]:
    """The runs of a side's best learning rate: lowest median time to the target."""
    rates = sorted({c.lr for c in curves if c.side == side})
    by_rate = {lr: [c for c in curves if c.side == side and c.lr == lr] for lr in rates}
    return min(by_rate.values(), key=lambda runs: statistics.median(c.reached_s for c in runs))


def conclude(setting: Setting, curves: Sequence[Curve], args: argparse.Namespace) -> None:
    """Table, picture, and the last line."""
    rows: list[list[object]] = []
    for lr in sorted({c.lr for c in curves}):
        for side in SIDES:
            runs = [c for c in curves if c.side == side and c.lr == lr]
            times = [c.reached_s for c in runs]
            speed = statistics.median(c.completions_per_s for c in runs)
            steps = statistics.median(len(c.times_s) / c.times_s[-1] for c in runs)
            rows.append(
                [side, f"{lr:g}", *(round(t, 1) for t in times), statistics.median(times), speed, steps]
            )
    table = setting.config.table
    seeds = sorted({c.seed for c in curves})
    title = (
        f"seconds to {TARGET} held out ({NUM_TASKS} tasks, every {args.every} versions), "
        f"{table.groups_per_batch} x {table.group_size} completions a step, "
        f"{setting.config.train.minibatches} optimizer steps; {os.cpu_count()} cores"
    )
    names = ["side", "lr", *(f"seed {seed}" for seed in seeds), "median", "completions/s", "steps/s"]
    show_table(title, names, rows)
    best = {side: best_of(curves, side) for side in SIDES}
    seconds = {side: statistics.median(c.reached_s for c in best[side]) for side in SIDES}
    speeds = {side: statistics.median(c.completions_per_s for c in best[side]) for side in SIDES}
    if args.image:
        draw(curves, best, args.image)
    figures: dict[str, object] = {
        "trl_threads": setting.trl_threads,
        "speedup": _finite(seconds["trl"] / seconds["astraflow"])
        if math.isfinite(seconds["astraflow"])
        else None,
        "throughput_ratio": round(speeds["astraflow"] / speeds["trl"], 3),
        "num_seeds": len(seeds),
        "load_average": round(os.getloadavg()[0], 2),
    }
    for side in SIDES:
        figures[f"{side}_s"] = _finite(seconds[side])
        figures[f"{side}_lr"] = best[side][0].lr
        figures[f"{side}_completions_per_s"] = round(speeds[side], 1)
    report(figures)


def _finite(value: float) -> float | None:
    """JSON has no infinity: a target that was not reached is null."""
    return round(value, 3) if math.isfinite(value) else None


def draw(curves: Sequence[Curve], best: dict[str, list[Curve]], image: Path) -> None:
    """All runs faint, those of each side's best learning rate strong."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"astraflow": "tab:blue", "trl": "tab:orange"}
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for curve in sorted(curves, key=lambda c: c in best[c.side]):
        is_best = curve in best[curve.side]
        label = f"{curve.side}, lr {curve.lr:g}" if is_best and curve is best[curve.side][0] else None
        axes.plot(
            *zip(*curve.points(), strict=True),
            color=colors[curve.side],
            alpha=1.0 if is_best else 0.2,
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
    """Parses the command line and runs the comparison in a folder that goes afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, the recipe's learning rate")
    parser.add_argument("--every", type=int, default=2, help="versions between two evaluations")
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
