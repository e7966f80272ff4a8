"""Measures how much of a run's throughput remains when processes are killed, with and without resuming
episodes.

Thirty rollout services with emulated GPUs (`paced` engines: `--slots` requests at `--tokens-per-s` each) run
episodes of 64 turns. Dataflow, publisher, trainer, and all processes are real. One process after the other is
killed with SIGKILL: a rollout service, the trainer, the publisher, or the dataflow, each with the same
probability. A killed process restarts immediately, as under any supervisor. Two runs have the same kills:

    resume   unfinished episodes continue after the turns that they have reported (`rollout.resume: auto`)
    afresh   they are sampled again from their start (`never`)

A third run is left undisturbed. The figures come from the journals:

    goodput_frac     trained tokens per second, as a share of those of the undisturbed run
    resampled_frac   tokens that were sampled but are not part of an accepted episode, because their service
                     was killed, as a share of those that are

The last heartbeat of a killed service says how many tokens it had sampled. The tokens sampled since then, and
those of incomplete turns, are added based on its speed. The tokens that its successors took over are
subtracted. A step is trained in `--step-s`, so the rollout services are the bottleneck.

    python benchmarks/goodput.py [--quick]

The default takes 70 minutes. `--quick` takes 2, with fewer services and shorter episodes. It shows that
everything works, but its figures mean little.
"""

import argparse
import asyncio
import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.dataflow.audit import audit
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.recipe.recipe import Recipe
from astraflow.run.run import Run, launch
from astraflow.types import WorkerStatus
from harness import report, show_table
from services import Services, deliveries, paced_recipe

GROUP_SIZE = 4
PARTS = ("trainer-actor", "publisher-actor", "dataflow")
"""Processes that may be killed in addition to the rollout services."""
SIGMA = 0.5
"""Standard deviation of log(length of a turn)."""
LOOK_S = 0.5
REISSUE_S = 10.0
"""Longest time, approximately, until the episodes of the service that was killed last run again."""
STARTS_AT_ONCE = 4
"""Number of services that start at the same time. More would only compete for the CPU cores."""
MODES = ("undisturbed", "resume", "afresh")


@dataclass
class Killed:
    """The state of a rollout service when it was killed."""

    worker_id: str
    num_tokens: float
    """Tokens that it had sampled, in complete and incomplete turns."""


@dataclass
class Outcome:
    """One run."""

    mode: str
    begin_s: float = 0.0
    end_s: float = 0.0
    kills: Counter[str] = field(default_factory=Counter[str])
    """Number of kills by kind of process."""
    killed: list[Killed] = field(default_factory=list[Killed])
    tokens_per_s: float = 0.0
    """Trained tokens per second."""
    accepted_tokens: float = 0.0
    """Sampled tokens of accepted episodes, during the time in which processes were killed."""
    resumed_tokens: int = 0
    wasted_tokens: float = 0.0
    steps: int = 0
    audit_ok: bool = False

    @property
    def resampled_frac(self) -> float:
        """Wasted tokens divided by accepted tokens."""
        return max(0.0, self.wasted_tokens) / max(1.0, self.accepted_tokens)


# --- a run ----------------------------------------------------------------------------------------


def make_recipe(folder: Path, mode: str, args: argparse.Namespace) -> Recipe:
    """Makes the recipe. Batches take the oldest draws, so there must be enough tickets while the longest
    episode runs, or runs again."""
    max_tokens = 4 * args.turn_tokens
    table = {
        "group_size": GROUP_SIZE,
        "groups_per_batch": args.groups,
        "max_staleness": args.staleness,
        "engine_lag": 2,
    }
    backend = {"name": "paced", "step_s": args.step_s, "weights_bytes": 1 << 16}
    engine = {
        "name": "paced",
        "num_slots": args.slots,
        "tokens_per_s": args.tokens_per_s,
        "mean_tokens": float(args.turn_tokens),
        "sigma": SIGMA,
        "max_context": args.turns * (max_tokens + 32) + 64,
    }
    return paced_recipe(
        folder,
        {
            "sampling": {"max_tokens": max_tokens},
            "table": table,
            "train": {"steps": 10**6, "checkpoint_every": 5, "backend": backend},
        },
        name=f"goodput-{mode}",
        workflow={"name": "paced", "turns": args.turns},
        rollout={
            "max_episodes": args.slots,
            "resume": "never" if mode == "afresh" else "auto",
            "episode_timeout_s": 3600.0,
            "engine": engine,
        },
        dataflow={"lease_timeout_s": 20.0, "heartbeat_s": args.heartbeat_s, "snapshot_every": 10**9},
    )


async def start_all(services: Services, args: argparse.Namespace) -> None:
    """Starts all services, and waits until each has episodes."""
    names = names_of(args)
    for first in range(0, len(names), STARTS_AT_ONCE):
        for name in names[first : first + STARTS_AT_ONCE]:
            await services.start(name)
        await services.all_work()


def names_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the names of the rollout services."""
    return tuple(f"rollout-{idx}" for idx in range(args.services))


async def watch(services: Services) -> None:
    """Records what the services report about themselves, until its task is canceled."""
    while True:
        await services.look()
        await asyncio.sleep(LOOK_S)


def killed_of(worker: WorkerStatus, args: argparse.Namespace) -> Killed:
    """Returns what a service that has just been killed had sampled."""
    load = worker.load
    since_s = min(max(0.0, time.time() - worker.last_seen_s), 2 * args.heartbeat_s)
    speed = load.num_running * args.tokens_per_s
    # A turn that is observed while it runs is longer than the mean, and half done on average.
    partial = load.num_running * args.turn_tokens * math.exp(SIGMA**2) / 2
    return Killed(worker.id, load.generated_tokens + speed * since_s + partial)


async def drive(recipe: Recipe, folder: Path, outcome: Outcome, args: argparse.Namespace) -> None:
    """Drives the whole run, and records what was done to it."""
    async with launch(recipe, folder / "run") as run:
        services = Services(run, folder)
        watching = asyncio.create_task(watch(services))
        try:
            await start_all(services, args)
            await asyncio.sleep(args.settle_s)
            outcome.begin_s = time.time()
            await _kill_some(run, services, outcome, args)
            outcome.end_s = time.time()
            if outcome.kills:
                await services.all_work()  # on a busy machine, a process takes long to start
                await asyncio.sleep(args.tail_s)
        finally:
            watching.cancel()
            await services.close()


async def _kill_some(run: Run, services: Services, outcome: Outcome, args: argparse.Namespace) -> None:
    """Kills a process from time to time. In the undisturbed run, only time passes."""
    rng = random.Random(args.seed)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for number in range(1, int(args.window_s / args.kill_every_s) + 1):
        await asyncio.sleep(began_s + number * args.kill_every_s - loop.time())
        target = rng.choice((*names_of(args), *PARTS))
        if outcome.mode == "undisturbed":
            continue
        outcome.kills[target.partition("-")[0]] += 1
        if target not in PARTS:
            if (worker := await services.kill(target)) is not None:
                outcome.killed.append(killed_of(worker, args))
            await services.start(target)
            continue
        record = next(s for s in run.folder.load_record().services if s.name == target)
        if record.state in {"", "running"}:
            os.kill(record.pid, signal.SIGKILL)


# --- what came of it ------------------------------------------------------------------------------


def read(folder: Path, outcome: Outcome) -> None:
    """Fills in the figures from the journal."""
    journal = folder / "run" / "journal"
    sampled: Counter[str] = Counter()
    for each in deliveries(journal):
        num_resumed = each.metric("resumed_tokens")
        num_sampled = each.metric("sampled_tokens") - num_resumed
        sampled[each.worker_id] += num_sampled
        if each.is_dropped:
            outcome.wasted_tokens += num_sampled
            continue
        outcome.resumed_tokens += num_resumed
        share = each.share_of(outcome.begin_s, outcome.end_s)
        outcome.accepted_tokens += each.metric("sampled_tokens") * share
    outcome.wasted_tokens += sum(killed.num_tokens - sampled[killed.worker_id] for killed in outcome.killed)
    outcome.wasted_tokens -= outcome.resumed_tokens
    with JournalReader(journal) as reader:
        steps = reader.steps()
    outcome.steps = len(steps)
    inside = [step for step in steps if outcome.begin_s <= step.at_s <= outcome.end_s]
    if len(inside) > 1:
        # The tokens of a step were produced since the previous step.
        num_tokens = sum(step.num_trained_tokens for step in inside[1:])
        outcome.tokens_per_s = num_tokens / (inside[-1].at_s - inside[0].at_s)
    outcome.audit_ok = audit(journal).ok


def conclude(outcomes: Sequence[Outcome]) -> None:
    """Prints the table and the figures."""
    by_mode = {outcome.mode: outcome for outcome in outcomes}
    base = by_mode.get("undisturbed")
    figures: dict[str, object] = {}
    rows: list[tuple[object, ...]] = []
    for outcome in outcomes:
        frac = outcome.tokens_per_s / base.tokens_per_s if base and base.tokens_per_s else None
        kills = ", ".join(f"{num} {kind}" for kind, num in outcome.kills.items()) or "none"
        rows.append(
            (
                outcome.mode,
                round(outcome.tokens_per_s),
                "-" if frac is None else f"{frac:.3f}",
                f"{outcome.resampled_frac:.4f}",
                outcome.resumed_tokens,
                kills,
                outcome.steps,
                outcome.audit_ok,
            )
        )
        if outcome.mode != "undisturbed":
            end = "" if outcome.mode == "resume" else "_afresh"
            if frac is not None:
                figures[f"goodput_frac{end}"] = round(frac, 4)
            figures[f"resampled_frac{end}"] = round(outcome.resampled_frac, 4)
            figures[f"resumed_tokens{end}"] = outcome.resumed_tokens
            figures[f"num_kills{end}"] = outcome.kills.total()
    header = ("run", "trained tokens/s", "goodput", "resampled", "resumed tokens", "killed", "steps", "audit")
    show_table("emulated GPUs, real processes", header, rows)
    figures["audits_hold"] = all(outcome.audit_ok for outcome in outcomes)
    report(figures, at_least={"goodput_frac": 0.95}, at_most={"resampled_frac": 0.05})


def main() -> None:
    """Makes the runs one after the other, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes, few services, short episodes")
    parser.add_argument("--only", choices=MODES, nargs="*", default=MODES)
    parser.add_argument("--services", type=int, default=30)
    parser.add_argument("--slots", type=int, default=4, help="episodes of a service")
    parser.add_argument("--turns", type=int, default=64, help="of an episode")
    parser.add_argument("--turn-tokens", type=int, default=24, help="mean length of a turn")
    parser.add_argument("--tokens-per-s", type=float, default=20.0, help="of a request")
    parser.add_argument("--groups", type=int, default=8, help=f"groups of {GROUP_SIZE} in a batch")
    parser.add_argument("--staleness", type=int, default=16, help="versions; the bound")
    parser.add_argument("--step-s", type=float, default=2.0, help="emulated time of a training step")
    parser.add_argument("--heartbeat-s", type=float, default=2.0)
    parser.add_argument("--window-s", type=float, default=1200.0, help="time in which processes are killed")
    parser.add_argument("--kill-every-s", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    args = parser.parse_args()
    if args.quick:
        small = {"services": 5, "turns": 12, "turn_tokens": 8, "groups": 2, "step_s": 0.3}
        vars(args).update(small, heartbeat_s=1.0, window_s=12.5, kill_every_s=2.5, seed=5)
    episode_s = args.turns * args.turn_tokens / args.tokens_per_s
    args.settle_s = episode_s
    args.tail_s = 1.2 * episode_s + REISSUE_S
    outcomes = [Outcome(mode) for mode in MODES if mode in args.only]
    with tempfile.TemporaryDirectory() as temporary:
        for outcome in outcomes:
            folder = (args.keep or Path(temporary)) / outcome.mode
            asyncio.run(drive(make_recipe(folder, outcome.mode, args), folder, outcome, args))
            read(folder, outcome)
            print(f"{outcome.mode}: {outcome.tokens_per_s:.0f} trained tokens/s", flush=True)
    conclude(outcomes)


if __name__ == "__main__":
    main()
