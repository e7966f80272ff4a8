"""Compares the forecasts of `astraflow plan` with measurements of pools of real processes with emulated GPUs.

One run with two services is measured. Its journal alone gives the forecasts of six pools: half as many
services, as many, and up to four times as many, so the bottleneck moves from the services to the trainer and
to the tickets. Then each pool is run. All processes, protocols, versions, leases, and batches are real. The
models are `paced`: requests take the time of a GPU, and training steps sleep. The comparison is based on
trained tokens per second between the same steps:

    worst_error_frac  largest |forecast / measured - 1| of all pools
    double_error_max  the same for the benefit of a doubled pool: its tokens/s divided by those of half of it

    python benchmarks/plan.py [--quick] [--out FOLDER]

The default takes 20 minutes on two otherwise idle cores. `--quick` takes three, with three pools and few
steps. It shows that everything works, but its figures mean little.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow_paced.forecast.forecast import Forecast, forecast, parse_pool
from astraflow_paced.forecast.forecast_inputs import measure_run
from harness import report, show_table

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
POLICY = "actor"
MAX_STALENESS = 2
WARM = MAX_STALENESS + 2
"""Steps in which a run settles. The forecast leaves out the same number."""
CYCLE = MAX_STALENESS
"""There are tickets for this number of batches. If the two sides wait in turns, the batches are generated
together and trained one after the other: a long step, then a short one. Only whole cycles have a rate."""
FORECAST_STEPS = 200
"""Enough steps that the forecast's own draws change it by 1 % at most. A forecast takes seconds."""
NUM_SLOTS = 16


@dataclass(frozen=True)
class Ran:
    """A pool that was run."""

    tokens_per_s: float
    staleness: float
    waited_frac: float
    audit_ok: bool


def make_recipe(folder: Path, services: int, args: argparse.Namespace, seed: int) -> Path:
    """Makes a recipe in which everything but the models is as in a real run. A single service makes about 400
    tokens per second, and the trainer can take 1,400."""
    model = folder.parent / "model"
    if not model.exists():
        init_model(load_spec(SPEC, {"warm_start.steps": 0}), model)
    tasks = [json.dumps({"prompt": f"Calculate {n} + 1.", "answer": str(n + 1)}) for n in range(5000)]
    (folder / "tasks.jsonl").write_text("\n".join(tasks))
    backend = {"name": "paced", "step_s": 2.0, "million_tokens_s": 200.0}
    content: dict[str, Any] = {
        "name": f"plan-{services}",
        "seed": seed,
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": str(folder / "tasks.jsonl")}}},
        "workflow": {"name": "paced", "env_s": 0.2, "env_sigma": 0.5},
        "policies": {
            POLICY: {
                "model": str(model),
                "sampling": {"max_tokens": 320},
                "table": {
                    "group_size": 4,
                    "groups_per_batch": 16,
                    "max_staleness": MAX_STALENESS,
                    "engine_lag": 1,
                },
                "train": {"steps": args.steps, "checkpoint_every": 1000, "backend": backend},
            }
        },
        "rollout": {
            "services": services,
            "max_episodes": NUM_SLOTS,
            "engine": {
                "name": "paced",
                "num_slots": NUM_SLOTS,
                "tokens_per_s": 40.0,
                "max_tokens_per_s": 1280.0,
                "mean_tokens": 80.0,
                "sigma": 0.6,
                "max_context": 512,
            },
        },
        "dataflow": {"snapshot_every": 10**9},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(out: Path, name: str, services: int, args: argparse.Namespace, seed: int) -> RunFolder:
    """Runs a pool, unless its folder holds a finished run. Raises: CalledProcessError if it fails."""
    folder = out / name
    found = RunFolder(folder / "run")
    if not found.summary.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path = make_recipe(folder, services, args, seed)
        print(f"+ {name}: {services} rollout services", file=sys.stderr, flush=True)
        argv = [sys.executable, "-m", "astraflow.cli.main", "run", str(path), "--plain"]
        subprocess.run([*argv, "--run-dir", str(folder / "run")], check=True, stdout=sys.stderr)
    return found


def read(folder: RunFolder) -> Ran:
    """Reads a run's results, without the steps in which it settled and without its last cycle, for which no
    more tasks are drawn."""
    with JournalReader(folder.journal) as journal:
        steps = journal.steps()[:-CYCLE]
    num_kept = (len(steps) - WARM) // CYCLE * CYCLE
    kept = steps[-num_kept:]
    passed_s = kept[-1].at_s - steps[-num_kept - 1].at_s
    waits = [item.value for step in kept for item in step.metrics if item.name == "batch_wait_s"]
    return Ran(
        tokens_per_s=sum(step.num_trained_tokens for step in kept) / passed_s,
        staleness=sum(step.staleness_mean for step in kept) / len(kept),
        waited_frac=sum(waits) / passed_s,
        audit_ok=json.loads(folder.summary.read_text())["audit_ok"],
    )


def compare(found: dict[int, tuple[Forecast, Ran]]) -> dict[str, object]:
    """Returns the figures of all pools."""
    errors = {num: each.tokens_per_s / ran.tokens_per_s - 1 for num, (each, ran) in found.items()}
    doubled = {
        num: (found[2 * num][0].tokens_per_s / each.tokens_per_s)
        / (found[2 * num][1].tokens_per_s / ran.tokens_per_s)
        - 1
        for num, (each, ran) in found.items()
        if 2 * num in found
    }
    return {
        "worst_error_frac": round(max(map(abs, errors.values())), 4),
        "double_error_max": round(max(map(abs, doubled.values())), 4),
        "plan_errors": {str(num): round(error, 4) for num, error in errors.items()},
        "num_pools": len(found),
        "audits_hold": all(ran.audit_ok for _, ran in found.values()),
    }


def main(args: argparse.Namespace) -> None:
    """Measures, forecasts, runs, and prints."""
    args.steps = max(args.steps or (8 if args.quick else 20), WARM + 2 * CYCLE)
    sizes = (1, 2, 4) if args.quick else (1, 2, 3, 4, 6, 8)
    with tempfile.TemporaryDirectory(prefix="astraflow-plan-") as scratch:
        out = (args.out or Path(scratch)).resolve()
        folder = run(out, "measured", 2, args, seed=100)
        recipe: Recipe = load_recipe(folder.recipe)
        inputs, shapes = measure_run(folder.journal, [POLICY], NUM_SLOTS)
        service = inputs.service
        trainer = inputs.trainers[POLICY]
        measures = (
            service.tokens_per_s, service.max_tokens_per_s, service.turn_s, service.idle_s, service.load_s,
            trainer.step_s, trainer.million_tokens_s, trainer.publish_s,
        )  # fmt: skip
        header = (
            "tokens/s alone",
            "at most",
            "turn s",
            "idle s",
            "load s",
            "step s",
            "s/M tokens",
            "publish s",
        )
        show_table("measured with 2 services", header, [measures])
        found: dict[int, tuple[Forecast, Ran]] = {}
        for num in sizes:
            told = forecast(
                recipe, inputs, shapes, parse_pool(str(num), recipe.cluster), steps=FORECAST_STEPS
            )
            ran = read(run(out, f"pool-{num}", num, args, seed=num))
            found[num] = (told, ran)
            text = f"forecast {told.tokens_per_s:.0f} tokens/s, measured {ran.tokens_per_s:.0f}"
            print(f"+ pool-{num}: {text}", file=sys.stderr, flush=True)
    rows = [
        (num, told.tokens_per_s, ran.tokens_per_s, f"{told.tokens_per_s / ran.tokens_per_s - 1:+.1%}",
         told.policies[0].staleness_mean, ran.staleness, f"{told.policies[0].trainer_wait_frac:.0%}",
         f"{ran.waited_frac:.0%}", told.bottleneck)
        for num, (told, ran) in found.items()
    ]  # fmt: skip
    header = (
        "services", "forecast", "measured tokens/s", "error", "staleness", "measured", "trainer waits",
        "measured", "bottleneck",
    )  # fmt: skip
    show_table(
        f"{args.steps} steps, without the first {WARM} and the last {CYCLE}; EMULATED GPUs, real processes",
        header,
        rows,
    )
    targets = {} if args.quick else {"worst_error_frac": 0.10, "double_error_max": 0.10}
    report({"steps": args.steps, **compare(found)}, at_most=targets)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three pools, few steps: for trying")
    parser.add_argument("--steps", type=int, default=0, help="of each run (default: 20, quick: 8)")
    parser.add_argument("--out", type=Path, help="run folders; finished ones are read, not made again")
    main(parser.parse_args())
