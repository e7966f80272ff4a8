"""Checks that everything works on one GPU, and measures how fast. Made for one H200; `--tiny` runs on a CPU.

Each phase is a separate process with a deadline, so a phase that fails or hangs doesn't affect the others.
After each phase, a JSON line is printed, flushed, and appended to `--out`. The last line has all figures, and
says which demands are met. All phases together take at most 580 s, or four times as long with `--tiny`.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_phases import PHASES
from harness import report, show_table

TOTAL_S = 580.0
TINY_FACTOR = 4.0
"""Factor of the deadlines on a CPU that other programs also use. There, importing torch alone can take half a
minute."""
_DEADLINES_S = {
    "ceilings": 30.0,
    "tests": 90.0,
    "trainer-1.7b-8k": 50.0,
    "trainer-1.7b-32k": 50.0,
    "trainer-4b-16k": 50.0,
    "trainer-8b-8k": 60.0,
    "trainer-8b-lora-32k": 60.0,
    "load-1.7b": 60.0,
    "megatron-1.7b-8k": 60.0,
    "engine-1.7b": 50.0,
    "publish-1.7b": 60.0,
    "publish-8b": 90.0,
    "quickstart": 150.0,
}
AT_LEAST = {
    "trainer-1.7b-8k.mfu": 0.40,
    "trainer-1.7b-32k.mfu": 0.38,
    "trainer-4b-16k.mfu": 0.40,
    "trainer-8b-8k.mfu": 0.45,
    "trainer-8b-lora-32k.fits": 1.0,
    "quickstart.accuracy": 0.85,
    "quickstart.audit_ok": 1.0,
    "quickstart.overlap_frac": 0.8,
}
AT_MOST = {
    "trainer-1.7b-8k.peak_gb": 60.0,
    "trainer-1.7b-32k.peak_gb": 60.0,
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
    end_s = time.monotonic() + factor * TOTAL_S
    outcomes = [
        _run(name, min(factor * _DEADLINES_S[name], end_s - time.monotonic()), options) for name in names
    ]
    rows = [
        [o.phase, o.seconds, name, value]
        for o in outcomes
        for name, value in (o.figures or {"": "-"}).items()
    ]
    show_table("one GPU" if not options.tiny else "tiny, on a CPU", ["phase", "s", "figure", "value"], rows)
    failed = [f"{outcome.phase}: {outcome.problem}" for outcome in outcomes if outcome.problem]
    for line in failed:
        print(f"failed: {line}")
    figures = {f"{o.phase}.{name}": value for o in outcomes for name, value in o.figures.items()}
    demands = ({}, {}) if options.tiny else (AT_LEAST, AT_MOST)
    report(
        {**figures, "num_failed": len(failed)}, at_least=demands[0], at_most={**demands[1], "num_failed": 0}
    )
    return bool(failed)


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
    process.communicate()


if __name__ == "__main__":
    sys.exit(main())
