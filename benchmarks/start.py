"""Measures how long the quickstart takes to start and to end, what that costs, and how much memory it needs.

The benchmark runs `astraflow run` on the quickstart's recipe in a process of its own, as a user does. With
`--beside FOLDER`, it alternates with another checkout, which has its own environment in `FOLDER/.venv`, and
prints the ratio of each pair.

    start_s               from the command to the first committed step
    end_s                 from the last committed step to the end of the command
    cpu_to_first_step_s   CPU seconds of all processes up to the first step
    import_floor_s        CPU seconds of one process that imports torch and the model's class of transformers
    starts_over_floor     cpu_to_first_step_s / import_floor_s, of neighboring measurements
    peak_pss_mb           largest sum of the processes' memory; each shared page counts once

CPU time hardly depends on other load on the machine, and neither does memory; seconds do.

    python benchmarks/start.py [--pairs 8] [--steps 100] [--beside FOLDER]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import Memory, Runs, report, show_table, tree_cpu_s

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/quickstart.yaml"
FLOOR = "import torch; from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM"
COMPLETIONS_PER_STEP = 512
"""The recipe's group_size * groups_per_batch."""
# A machine with 2 GB has about this much memory for the run, next to the system and a browser.
BARS = {"starts_over_floor": 5.0, "end_s": 1.5, "peak_pss_mb": 1000.0}


@dataclass(frozen=True, slots=True)
class Start:
    """The figures of one run."""

    start_s: float
    command_s: float
    end_s: float
    cpu_to_first_step_s: float
    steady_cpu_per_completion_ms: float
    peak_pss_mb: float


def measure(checkout: Path, model: Path, run_dir: Path, steps: int) -> Start:
    """Runs the quickstart of a checkout. Raises: RuntimeError if the run fails."""
    astraflow = str(checkout / ".venv" / "bin" / "astraflow")
    changes = (f"policies.actor.model={model}", f"train.steps={steps}")
    argv = [astraflow, "run", RECIPE, "--run-dir", str(run_dir), "--plain", *changes]
    began_s = time.time()
    with subprocess.Popen(argv, cwd=checkout, stdout=sys.stderr) as process:
        memory = Memory(process.pid)
        first_s = _wait_for_step(process, run_dir, 1)
        first_cpu_s = tree_cpu_s(process.pid)
        _wait_for_step(process, run_dir, steps)
        last_cpu_s = tree_cpu_s(process.pid)
        code = process.wait()
        ended_s = time.time()
        memory.close()
    if code != 0:
        raise RuntimeError(f"{checkout}: the run ended with code {code}")
    return Start(
        start_s=first_s - began_s,
        command_s=ended_s - began_s,
        end_s=ended_s - _step_times(run_dir)[-1],
        cpu_to_first_step_s=first_cpu_s,
        steady_cpu_per_completion_ms=1e3
        * (last_cpu_s - first_cpu_s)
        / max(1, (steps - 1) * COMPLETIONS_PER_STEP),
        peak_pss_mb=memory.peak_mb,
    )


def _wait_for_step(process: "subprocess.Popen[bytes]", run_dir: Path, number: int) -> float:
    """Waits until so many steps are committed, and returns the time of the last one."""
    while len(times_s := _step_times(run_dir)) < number:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended after {len(times_s)} steps")
        time.sleep(0.02)
    return times_s[number - 1]


def _step_times(run_dir: Path) -> list[float]:
    """Returns the Unix time of each committed step."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [record["at_s"] for record in records if record["kind"] == "step"]


def import_floor_s(checkout: Path) -> float:
    """Returns the CPU seconds of a process that imports torch and a model."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([checkout / ".venv" / "bin" / "python", "-P", "-c", FLOOR], check=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_model(checkout: Path, folder: Path) -> Path:
    """Makes the quickstart's model."""
    argv = [str(checkout / ".venv" / "bin" / "astraflow"), "model", "init", "recipes/models/quickstart.yaml"]
    subprocess.run([*argv, "--out", str(folder)], cwd=checkout, check=True, stdout=sys.stderr)
    return folder


def show(found: Mapping[str, list[Start]]) -> None:
    """Prints the medians of each checkout."""
    names = tuple(Start.__dataclass_fields__)
    rows = [
        (checkout, *(statistics.median(getattr(start, name) for start in starts) for name in names))
        for checkout, starts in found.items()
    ]
    show_table("The quickstart, medians", ("checkout", *names), rows)


def main() -> None:
    """Runs everything, alternating between the checkouts, and prints the results."""
    parser = argparse.ArgumentParser(description="How long the quickstart takes to start and to end.")
    parser.add_argument("--pairs", type=int, default=1, help="runs of each checkout")
    parser.add_argument("--steps", type=int, default=100, help="steps per run")
    parser.add_argument("--beside", type=Path, help="another checkout, which has its own .venv")
    args = parser.parse_args()
    checkouts = {"this": ROOT} | ({"beside": args.beside.resolve()} if args.beside else {})
    found: dict[str, list[Start]] = {name: [] for name in checkouts}
    floors_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="astraflow-start-") as folder:
        model = make_model(ROOT, Path(folder) / "model")
        for idx in range(args.pairs):
            for name, checkout in checkouts.items():
                run_dir = Path(folder) / f"{name}-{idx}"
                found[name].append(measure(checkout, model, run_dir, args.steps))
                print(name, found[name][-1], flush=True)
            floors_s.append(import_floor_s(ROOT))
    show(found)
    ours = found["this"]
    figures: dict[str, object] = {
        field: Runs(tuple(getattr(start, field) for start in ours)) for field in Start.__dataclass_fields__
    }
    figures["import_floor_s"] = Runs(tuple(floors_s))
    over_floor = (start.cpu_to_first_step_s / floor_s for start, floor_s in zip(ours, floors_s, strict=True))
    figures["starts_over_floor"] = Runs(tuple(over_floor))
    if args.beside:
        pairs = list(zip(ours, found["beside"], strict=True))
        for name in Start.__dataclass_fields__:
            figures[f"{name}_ratio"] = Runs(tuple(getattr(a, name) / getattr(b, name) for a, b in pairs))
    report(figures, at_most=BARS)


if __name__ == "__main__":
    main()
