"""Checks that everything works on GPUs, and measures how fast. Made for one H200; `--tiny` takes tiny sizes,
which a CPU can compute, too.

Each phase is a separate process with a deadline, so a phase that fails or hangs doesn't affect the others.
The deadlines add up to less than 780 s, or four times as long with `--tiny`; time that a phase leaves is
there for the next ones. After each phase, a JSON line is printed, flushed, and appended to `--out`. The last
line has all figures, and says which demands are met.

    python benchmarks/gpu.py [--only ceilings,trainer-1.7b-8k] [--out gpu.jsonl]
    python benchmarks/gpu.py --tiny
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_phases import PHASES
from harness import report, show_table

TOTAL_S = 780.0
TINY_FACTOR = 4.0
"""Factor of the deadlines on a CPU that other programs also use. There, importing torch alone can take half a
minute."""
_ENDING_S = 5.0
"""Time to wait for the end of a phase that was killed. A process that waits for a driver may never end."""
DEADLINES_S = {
    "ceilings": 15.0,
    "tests": 60.0,
    "trainer-1.7b-8k": 30.0,
    "trainer-1.7b-8k-compiled": 60.0,
    "trainer-1.7b-8k-wide": 30.0,
    "lost-ranks": 110.0,
    "engine-1.7b": 35.0,
    "vllm-1.7b": 70.0,
    "quickstart": 85.0,
    "ranks-1.7b-8k": 45.0,
    "load-1.7b": 30.0,
    "publish-1.7b": 30.0,
    "trainer-8b-8k": 35.0,
    "publish-8b": 40.0,
    "trainer-1.7b-32k": 25.0,
    "trainer-4b-16k": 25.0,
    "trainer-8b-lora-32k": 30.0,
    "megatron-1.7b-8k": 20.0,
}
"""Time that each phase has at least, if none before it hangs on after it was killed."""
AT_LEAST = {
    "trainer-1.7b-8k.mfu": 0.26,
    "trainer-1.7b-8k-compiled.mfu": 0.36,
    "trainer-1.7b-8k-wide.mfu": 0.24,
    "trainer-1.7b-32k.mfu": 0.20,
    "trainer-4b-16k.mfu": 0.23,
    "trainer-8b-8k.mfu": 0.18,
    "trainer-8b-lora-32k.fits": 1.0,
    "vllm-1.7b.num_versions": 2.0,
    "quickstart.accuracy": 0.85,
    "quickstart.audit_ok": 1.0,
    "quickstart.overlap_frac": 0.8,
}
"""MFU: the roofline on an H100, rounded down (an H200's is a quarter higher). Matrix products reach 70 % of
the peak, and other operators move bytes at 85 % of the memory's speed: per token and layer 2.5 MB at a width
of 2,048 and in proportion, counted on posing devices (1.7B: 566 GB in a pass of 8,192 tokens), half of it if
compiled. `recompute` adds a third to both; an offloaded optimizer adds its copies at 50 GB/s (8B: 1.3 s). The
other targets are what a run needs."""
AT_MOST = {
    "trainer-1.7b-8k.peak_gb": 60.0,
    "trainer-1.7b-32k.peak_gb": 60.0,
    "vllm-1.7b.gap_mean": 0.05,
    "vllm-1.7b.update_s": 5.0,
    "ranks-1.7b-8k.gap": 1e-3,
    "ranks-1.7b-8k.load_host_gb": 2.0,
    "ranks-1.7b-8k.resume_host_gb": 2.0,
    "load-1.7b.load_host_gb": 2.0,
    "load-1.7b.resume_host_gb": 2.0,
    "publish-1.7b.blocked_s": 0.3,
    "publish-8b.blocked_s": 1.0,
    "publish-1.7b.delta_to_installed_s": 3.0,
    "publish-8b.delta_to_installed_s": 8.0,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a phase ended."""

    phase: str
    seconds: float
    figures: Mapping[str, float]
    problem: str
    """Empty if the phase succeeded."""


def main() -> int:
    """Runs the phases. The last line has all figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU; no demands")
    parser.add_argument("--only", default=",".join(PHASES), help="phases, with commas between them")
    parser.add_argument("--out", type=Path, help="file that gets a JSON line per phase")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        print(json.dumps(PHASES[options.phase](is_tiny=options.tiny)), flush=True)
        return 0
    if not (options.tiny or torch.cuda.is_available()):
        parser.error("there is no CUDA device; --tiny runs every phase on a CPU")
    names = options.only.split(",")
    if unknown := set(names) - set(PHASES):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(PHASES)}")
    factor = TINY_FACTOR if options.tiny else 1.0
    outcomes = run_all(names, options, end_s=time.monotonic() + factor * TOTAL_S, factor=factor)
    rows = [
        [o.phase, o.seconds, name, value]
        for o in outcomes
        for name, value in (o.figures or {"": "-"}).items()
    ]
    show_table("tiny sizes" if options.tiny else "GPUs", ["phase", "s", "figure", "value"], rows)
    failed = [f"{outcome.phase}: {outcome.problem}" for outcome in outcomes if outcome.problem]
    for line in failed:
        print(f"failed: {line}")
    figures = {f"{o.phase}.{name}": value for o in outcomes for name, value in o.figures.items()}
    demands = ({}, {}) if options.tiny else (AT_LEAST, AT_MOST)
    report(
        {**figures, "num_failed": len(failed)}, at_least=demands[0], at_most={**demands[1], "num_failed": 0}
    )
    return bool(failed)


def run_all(
    names: Sequence[str], options: argparse.Namespace, *, end_s: float, factor: float
) -> list[Outcome]:
    """Runs phases until `end_s`. Each may take what the deadlines of those after it leave."""
    outcomes: list[Outcome] = []
    for idx, name in enumerate(names):
        reserved_s = factor * sum(DEADLINES_S[later] for later in names[idx + 1 :])
        outcomes.append(_run(name, end_s - reserved_s - time.monotonic(), options))
    return outcomes


def _run(name: str, deadline_s: float, options: argparse.Namespace) -> Outcome:
    """Runs a phase in its own process, and prints its outcome as a line of JSON."""
    began_s = time.monotonic()
    argv = [sys.executable, __file__, "--phase", name, *(["--tiny"] if options.tiny else [])]
    figures: Mapping[str, float] = {}
    problem = ""
    if deadline_s <= 0:
        problem = "no time is left"
    else:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=deadline_s)
            if process.returncode:
                problem = f"ended with {process.returncode}"
            else:
                figures = json.loads(output.splitlines()[-1])
        except subprocess.TimeoutExpired:
            problem = f"took longer than {deadline_s:.0f} s"
        finally:
            _end(process)
    outcome = Outcome(name, time.monotonic() - began_s, figures, problem)
    line = json.dumps(
        {"phase": name, "seconds": round(outcome.seconds, 1), "problem": problem, "figures": figures}
    )
    print(line, flush=True)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(line + "\n")
    return outcome


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends a phase and its remaining processes. They are in their own session, so in one process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_ENDING_S)


if __name__ == "__main__":
    sys.exit(main())
