"""Two policies, emulated devices, real services: no waiting, a barrier at every step, or everything in turn.

An episode lets policy `first` and policy `second` speak in turn, and an environment answers after each. All
processes, protocols, versions, leases and batches are real; only the models are `paced`: completions take the
time that they would take on a device, training steps sleep. Emulated time runs `--scale` times faster than
the clock, and a token here stands for 16 of them, so that two cores keep up. Seconds below are emulated.

The same ten emulated devices for all systems, two of them the trainers':

    astraflow   8 generate, 2 train; each policy steps when its own batch is there
    barrier     the same, but no policy begins a step before the other has done as many
    split       8 generate a batch, then 2 train it, one policy after the other; all wait for each other
    colocated   all 10 generate a batch, then all 10 train it, ten times as fast as one

A device runs 64 requests at 50 tokens/s each. Lengths are log-normal with mean 1,500, cut at 4,096; the
environment takes a log-normal time with median 1 s and sigma 1. A training step takes half of the time in
which 8 devices that are never idle generate a batch. Not emulated, in favour of the systems that take turns:
moving weights and switching devices between tasks costs them nothing. As a trainer-centred loop has one
trainer, the run of `split` and `colocated` has one, whose step lasts as long as the steps of both.

    python benchmarks/multi_policy.py [--sigmas 0.6 1.0 1.4] [--steps 50] [--scale 10] [--out runs/multi]

At 10 times the clock one sigma takes 45 minutes; the more steps, the less the first batch weighs.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import yaml

from astraflow.dataflow.core.commands import EpisodeFacts, LeaseIssued, RecordResult
from astraflow.dataflow.journal_reader import JournalReader
from astraflow.dataflow.records import decode_commands, decode_events
from astraflow.launch.folder import RunFolder
from astraflow.models.spec import load_spec
from astraflow.models.tiny import init_model
from harness import report, show_table
from turns import with_turns

ROOT = Path(__file__).resolve().parent.parent
IMAGE = ROOT / "docs" / "images" / "multi_policy_timeline.png"
SYSTEMS = ("astraflow", "barrier", "split", "colocated")
POLICIES = ("first", "second")

TOKEN = 16
"""Tokens that one token of the run stands for."""
NUM_ROLLOUT = 8
NUM_TRAINERS = 2
NUM_SLOTS = 64
GROUP_SIZE = 8
NUM_GROUPS = 64
TOKENS_PER_S = 50.0
MEAN_TOKENS = 1500.0
MAX_TOKENS = 4096
ENV_S = 1.0
ENV_SIGMA = 1.0
MAX_STALENESS = 4
DRAWN_SIGMA = 1.0
"""Sigma of the lengths in the runs of the picture and of the figures."""


# --- what the systems have in common --------------------------------------------------------------


def busy_generation_s(sigma: float) -> float:
    """Seconds in which devices that are never idle generate a batch: slot time of its episodes over slots."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(math.log(MEAN_TOKENS) - sigma**2 / 2, sigma, size=1_000_000)
    episode_s = len(POLICIES) * float(np.minimum(lengths, MAX_TOKENS).mean()) / TOKENS_PER_S
    return GROUP_SIZE * NUM_GROUPS * episode_s / (NUM_ROLLOUT * NUM_SLOTS)


def recipe_of(system: str, sigma: float, run: "Settings", barrier: Path) -> dict[str, Any]:
    """The recipe of a system."""
    in_turn = system in {"split", "colocated"}
    num_devices = NUM_ROLLOUT + (NUM_TRAINERS if system == "colocated" else 0)
    step_s = 0.5 * busy_generation_s(sigma)
    if in_turn:
        step_s *= len(POLICIES) / (num_devices if system == "colocated" else 1)
    table: dict[str, Any] = {"group_size": GROUP_SIZE, "groups_per_batch": NUM_GROUPS}
    if in_turn:
        table |= {"max_staleness": 0, "engine_lag": 0, "sampler": {"name": "on_policy"}}
    else:
        table |= {"max_staleness": MAX_STALENESS, "engine_lag": 1, "sampler": {"name": "fifo"}}
    policies: dict[str, Any] = {}
    for name in POLICIES:
        backend: dict[str, Any] = {"name": "paced", "step_s": step_s, "time_scale": run.scale}
        if system == "barrier":
            backend = with_turns(backend, name, POLICIES, barrier)
        policies[name] = {
            "model": str(run.model),
            "role": "frozen" if in_turn and name != POLICIES[0] else "trained",
            "sampling": {"max_tokens": MAX_TOKENS // TOKEN},
            "table": table,
            "train": {"steps": run.steps, "backend": backend, "checkpoint_every": 1000},
        }
    engine = {
        "name": "paced",
        "num_slots": NUM_SLOTS,
        "max_context": 2 * MAX_TOKENS // TOKEN,
        "tokens_per_s": TOKENS_PER_S / TOKEN,
        "mean_tokens": MEAN_TOKENS / TOKEN,
        "sigma": sigma,
        "time_scale": run.scale,
    }
    spare = NUM_SLOTS // 4  # so that slots are not idle while environments answer
    held = math.ceil(GROUP_SIZE * NUM_GROUPS / num_devices) if in_turn else NUM_SLOTS + spare
    return {
        "name": f"multi-policy-{system}",
        "tasks": {
            "sources": {"sums": {"name": "reasoning_gym", "dataset": "basic_arithmetic", "size": 20000}}
        },
        "workflow": {"name": "paced", "env_s": ENV_S, "env_sigma": ENV_SIGMA, "time_scale": run.scale},
        "policies": policies,
        "rollout": {"services": num_devices, "engine": engine, "max_episodes": held},
        "dataflow": {"retain": 0, "snapshot_every": 10_000_000},
    }


@dataclass(frozen=True)
class Settings:
    """Settings of all runs."""

    steps: int
    scale: float
    model: Path
    out: Path


@dataclass(frozen=True)
class Measured:
    """What a run's journal says; times are emulated seconds since the first lease."""

    wall_s: float
    staleness_mean: float
    staleness_max: int
    audit_ok: bool
    episodes: list[tuple[float, float]]
    """Begin and end of each."""
    steps: dict[str, list[tuple[float, float]]]
    """Policy -> begin and end of each training step."""

    def slot_use(self) -> float:
        """Episodes that ran at once, on average, over the slots of 8 devices."""
        return sum(min(end, self.wall_s) - min(begin, self.wall_s) for begin, end in self.episodes) / (
            self.wall_s * NUM_ROLLOUT * NUM_SLOTS
        )


# --- running and reading --------------------------------------------------------------------------


def measure(system: str, sigma: float, run: Settings) -> Measured:
    """Runs a system, unless its folder holds a finished run. Raises: CalledProcessError if it fails."""
    folder = run.out / f"{system}-{sigma:g}"
    summary = folder / "run" / "summary.json"
    if not summary.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        barrier = folder / "barrier"
        barrier.mkdir(parents=True)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe_of(system, sigma, run, barrier)))
        argv = [sys.executable, "-m", "astraflow.cli.main", "run", str(path), "--plain"]
        print(f"+ {system}, sigma {sigma:g}", file=sys.stderr, flush=True)
        # From here, so that the trainers find TurnsBackend.
        command = [*argv, "--run-dir", str(folder / "run")]
        subprocess.run(command, cwd=Path(__file__).parent, check=True, stdout=sys.stderr)
    return read(folder / "run", json.loads(summary.read_text()), run.scale)


def read(run_dir: Path, summary: Mapping[str, Any], scale: float) -> Measured:
    """From a finished run's journal."""
    episodes = list[tuple[float, float]]()
    begun = list[float]()
    with JournalReader(RunFolder(run_dir).journal) as journal:
        for record in journal.records():
            for command, events in zip(decode_commands(record), decode_events(record), strict=True):
                begun += [record.at_s for event in events if isinstance(event, LeaseIssued)]
                if isinstance(command, RecordResult) and isinstance(command.outcome, EpisodeFacts):
                    episodes.append((record.at_s - command.outcome.duration_s, record.at_s))
        rows = [row for row in journal.telemetry() if row.span.kind == "train"]
        last_s = max(step.at_s for step in journal.steps())
    first_s = min(begun)

    def emulated(span: tuple[float, float]) -> tuple[float, float]:
        return (span[0] - first_s) * scale, (span[1] - first_s) * scale

    return Measured(
        wall_s=(last_s - first_s) * scale,
        staleness_mean=summary["staleness_mean"],
        staleness_max=summary["staleness_max"],
        audit_ok=summary["audit_ok"],
        episodes=[emulated(span) for span in episodes],
        steps={
            name: [emulated((r.span.start_s, r.span.end_s)) for r in rows if r.source.endswith(name)]
            for name in POLICIES
        },
    )


# --- showing --------------------------------------------------------------------------------------


def draw(runs: Mapping[str, Measured], sigma: float, image: Path) -> None:
    """A panel a system: episodes that run at once, and below them the trainers' steps."""
    mpl.use("Agg")
    figure, panels = plt.subplots(len(runs), 1, figsize=(9, 1.9 * len(runs)), dpi=130, sharex=True)
    shown_s = max(run.wall_s for run in runs.values())
    for axes, (system, run) in zip(panels, runs.items(), strict=True):
        times = np.linspace(0, shown_s, 1200)
        begins, ends = (np.sort([span[i] for span in run.episodes]) for i in (0, 1))
        running = np.searchsorted(begins, times, "right") - np.searchsorted(ends, times, "right")
        axes.fill_between(times, np.where(times <= run.wall_s, running, 0), color="C0", alpha=0.6, lw=0)
        for row, name in enumerate(POLICIES):
            bars = [(begin, end - begin) for begin, end in run.steps[name]]
            axes.broken_barh(bars, (-110 * (row + 1), 90), color=f"C{row + 1}", lw=0.6)
        axes.set(ylim=(-110 * len(POLICIES) - 20, None), ylabel="episodes", yticks=(0, 200, 400, 600))
        axes.set_title(f"{system}: {run.wall_s:,.0f} s", loc="left", fontsize=9)
    panels[-1].set(xlabel="emulated seconds", xlim=(0, shown_s))
    title = f"Episodes that run at once, and the steps of both trainers below them (sigma {sigma:g})"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(image, format="png")
    plt.close(figure)


def main(sigmas: Sequence[float], run: Settings, image: Path) -> None:
    """Runs all systems for all sigmas, one after the other."""
    spec = load_spec(ROOT / "recipes" / "models" / "quickstart.yaml", ["warm_start.steps=0"])
    init_model(spec, run.model)  # its tokenizer is used, its weights are not
    found = {sigma: {system: measure(system, sigma, run) for system in SYSTEMS} for sigma in sigmas}
    rows = [
        (sigma, system, r.wall_s, in_turn_best(runs) / r.wall_s, r.slot_use(), r.staleness_mean,
         r.staleness_max, "holds" if r.audit_ok else "BROKEN")
        for sigma, runs in found.items()
        for system, r in runs.items()
    ]  # fmt: skip
    header = ("sigma", "system", "emulated s", "speedup", "slots busy", "staleness", "max", "audit")
    show_table(f"{run.steps} steps of both policies, EMULATED at {run.scale:g} times the clock", header, rows)
    chosen = DRAWN_SIGMA if DRAWN_SIGMA in found else sigmas[0]
    draw(found[chosen], chosen, image)
    runs = found[chosen]
    report(
        {
            "is_emulated": True,
            "time_scale": run.scale,
            "sigma": chosen,
            "speedup_vs_sync": in_turn_best(runs) / runs["astraflow"].wall_s,
            "speedup_vs_split": runs["split"].wall_s / runs["astraflow"].wall_s,
            "speedup_vs_colocated": runs["colocated"].wall_s / runs["astraflow"].wall_s,
            "speedup_vs_barrier": runs["barrier"].wall_s / runs["astraflow"].wall_s,
            "sweep_speedup_vs_sync": {
                f"{s:g}": in_turn_best(r) / r["astraflow"].wall_s for s, r in found.items()
            },
            "staleness_max": runs["astraflow"].staleness_max,
            "audits_hold": all(r.audit_ok for runs in found.values() for r in runs.values()),
        }
    )


def in_turn_best(runs: Mapping[str, Measured]) -> float:
    """Seconds of the better one of the systems that take turns."""
    return min(runs["split"].wall_s, runs["colocated"].wall_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.6, 1.0, 1.4])
    parser.add_argument("--steps", type=int, default=50, help="of each policy")
    parser.add_argument("--scale", type=float, default=10.0, help="emulated seconds in one of the clock")
    parser.add_argument("--out", type=Path, help="run folders; finished ones are read, not made again")
    parser.add_argument("--image", type=Path, default=IMAGE, help="where the picture goes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="astraflow-multi-") as scratch:
        out = (given.out or Path(scratch)).resolve()
        main(given.sigmas, Settings(given.steps, given.scale, out / "model", out), given.image)
