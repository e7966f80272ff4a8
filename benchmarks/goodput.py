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
import json
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
from typing import Any

import yaml

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.dataflow.audit import audit
from astraflow.dataflow.core.commands import EpisodeFacts, RecordResult, ResultDropped, StepCommitted
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_commands, decode_events
from astraflow.errors import UnavailableError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.run import Run, launch
from astraflow.types import WorkerStatus
from elastic_service import start_service
from harness import report, show_table

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
POLICY = "actor"
GROUP_SIZE = 4
PARTS = ("trainer-actor", "publisher-actor", "dataflow")
"""Processes that may be killed in addition to the rollout services."""
SIGMA = 0.5
"""Standard deviation of log(length of a turn)."""
JOIN_S = 300.0
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
    """Makes a recipe in which everything but the models is as in a real run. Rollout services join by
    themselves."""
    folder.mkdir(parents=True)
    model = folder.parent / "model"
    if not model.exists():
        init_model(load_spec(SPEC, {"warm_start.steps": 0}), model)
    tasks = [json.dumps({"prompt": f"Calculate {n} + 1.", "answer": str(n + 1)}) for n in range(5000)]
    (folder / "tasks.jsonl").write_text("\n".join(tasks))
    max_tokens = 4 * args.turn_tokens
    # Batches take the oldest draws, so there must be enough tickets while the longest episode runs, or runs
    # again.
    table = {
        "group_size": GROUP_SIZE,
        "groups_per_batch": args.groups,
        "max_staleness": args.staleness,
        "engine_lag": 2,
    }
    content: dict[str, Any] = {
        "name": f"goodput-{mode}",
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": str(folder / "tasks.jsonl")}}},
        "workflow": {"name": "paced", "turns": args.turns},
        "policies": {
            POLICY: {
                "model": str(model),
                "sampling": {"max_tokens": max_tokens},
                "table": table,
                "train": {
                    "steps": 10**6,
                    "checkpoint_every": 5,
                    "backend": {"name": "paced", "step_s": args.step_s, "weights_bytes": 1 << 16},
                },
            }
        },
        "rollout": {
            "services": 0,
            "max_episodes": args.slots,
            "resume": "never" if mode == "afresh" else "auto",
            "episode_timeout_s": 3600.0,
            "engine": {
                "name": "paced",
                "num_slots": args.slots,
                "tokens_per_s": args.tokens_per_s,
                "mean_tokens": float(args.turn_tokens),
                "sigma": SIGMA,
                "max_context": args.turns * (max_tokens + 32) + 64,
            },
        },
        "dataflow": {"lease_timeout_s": 20.0, "heartbeat_s": args.heartbeat_s, "snapshot_every": 10**9},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path)


class Pool:
    """The rollout services, and the last known state of each."""

    def __init__(self, run: Run, folder: Path, args: argparse.Namespace) -> None:
        self._run = run
        self._folder = folder
        self._args = args
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._seen: dict[str, WorkerStatus] = {}
        """Name -> newest status of the newest service of this name."""
        self._dead: set[str] = set()
        """Ids of services that were killed. The dataflow still lists them for a while."""

    @property
    def names(self) -> tuple[str, ...]:
        """All services, in the order in which they first started."""
        return tuple(f"rollout-{idx}" for idx in range(self._args.services))

    async def start(self) -> None:
        """Starts all services, and waits until each has episodes."""
        for first in range(0, len(self.names), STARTS_AT_ONCE):
            for name in self.names[first : first + STARTS_AT_ONCE]:
                await self._start(name)
            await self.all_work()

    async def all_work(self) -> None:
        """Waits until each started service has episodes."""
        async with asyncio.timeout(JOIN_S):
            while not set(self._processes) <= {n for n, w in self._seen.items() if w.load.num_running}:
                self._check()
                await asyncio.sleep(LOOK_S)

    async def watch(self) -> None:
        """Records what the services report about themselves, until its task is canceled."""
        while True:
            try:
                status = await self._run.status()
            except (UnavailableError, TimeoutError):
                status = None  # the dataflow was killed and restarts
            for worker in status.workers if status else ():
                if worker.id not in self._dead:
                    self._seen[worker.name] = worker
            await asyncio.sleep(LOOK_S)

    async def kill(self, name: str) -> Killed | None:
        """Kills a service and restarts it. Returns what it had sampled, if it had joined."""
        process = self._processes[name]
        process.kill()
        worker = self._seen.pop(name, None)
        if worker is not None:
            self._dead.add(worker.id)
        await process.wait()
        await self._start(name)
        if worker is None:
            return None
        load = worker.load
        since_s = min(max(0.0, time.time() - worker.last_seen_s), 2 * self._args.heartbeat_s)
        speed = load.num_running * self._args.tokens_per_s
        # A turn that is observed while it runs is longer than the mean, and half done on average.
        partial = load.num_running * self._args.turn_tokens * math.exp(SIGMA**2) / 2
        return Killed(worker.id, load.generated_tokens + speed * since_s + partial)

    async def close(self) -> None:
        """Ends all services."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _check(self) -> None:
        for name, process in self._processes.items():
            if process.returncode is not None:
                log = (self._folder / f"{name}.log").read_text()[-2000:]
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{log}")

    async def _start(self, name: str) -> None:
        settings: dict[str, Any] = {
            "url": self._run.url,
            "name": name,
            "cache": str(self._folder / f"cache-{name}"),
            "engine": {},
            "routes": {},
        }
        self._processes[name] = await start_service(settings, self._folder / f"{name}.log")


async def drive(recipe: Recipe, folder: Path, outcome: Outcome, args: argparse.Namespace) -> None:
    """Drives the whole run, and records what was done to it."""
    async with launch(recipe, folder / "run") as run:
        pool = Pool(run, folder, args)
        watch = asyncio.create_task(pool.watch())
        try:
            await pool.start()
            await asyncio.sleep(args.settle_s)
            outcome.begin_s = time.time()
            await _kill_some(run, pool, outcome, args)
            outcome.end_s = time.time()
            if outcome.kills:
                await pool.all_work()  # on a busy machine, a process takes long to start
                await asyncio.sleep(args.tail_s)
        finally:
            watch.cancel()
            await pool.close()


async def _kill_some(run: Run, pool: Pool, outcome: Outcome, args: argparse.Namespace) -> None:
    """Kills a process from time to time. In the undisturbed run, only time passes."""
    rng = random.Random(args.seed)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for number in range(1, int(args.window_s / args.kill_every_s) + 1):
        await asyncio.sleep(began_s + number * args.kill_every_s - loop.time())
        target = rng.choice((*pool.names, *PARTS))
        if outcome.mode == "undisturbed":
            continue
        outcome.kills[target.partition("-")[0]] += 1
        if target not in PARTS:
            if (killed := await pool.kill(target)) is not None:
                outcome.killed.append(killed)
            continue
        record = next(s for s in run.folder.load_record().services if s.name == target)
        if record.state in {"", "running"}:
            os.kill(record.pid, signal.SIGKILL)


# --- what came of it ------------------------------------------------------------------------------


def read(folder: Path, outcome: Outcome) -> None:
    """Fills in the figures from the journal."""
    steps: list[tuple[float, int]] = []
    sampled: Counter[str] = Counter()
    with JournalReader(folder / "run" / "journal") as journal:
        for record in journal.records():
            for command, events in zip(decode_commands(record), decode_events(record), strict=True):
                steps += [
                    (record.at_s, event.record.num_trained_tokens)
                    for event in events
                    if isinstance(event, StepCommitted)
                ]
                if isinstance(command, RecordResult) and isinstance(command.outcome, EpisodeFacts):
                    is_dropped = any(isinstance(event, ResultDropped) for event in events)
                    _book(outcome, sampled, command, at_s=record.at_s, is_dropped=is_dropped)
    outcome.wasted_tokens += sum(killed.num_tokens - sampled[killed.worker_id] for killed in outcome.killed)
    outcome.wasted_tokens -= outcome.resumed_tokens
    outcome.steps = len(steps)
    inside = [(at_s, num) for at_s, num in steps if outcome.begin_s <= at_s <= outcome.end_s]
    if len(inside) > 1:
        # The tokens of a step were produced since the previous step.
        outcome.tokens_per_s = sum(num for _, num in inside[1:]) / (inside[-1][0] - inside[0][0])
    outcome.audit_ok = audit(folder / "run" / "journal").ok


def _book(
    outcome: Outcome, sampled: Counter[str], command: RecordResult, *, at_s: float, is_dropped: bool
) -> None:
    """Counts an episode: what its service sampled, and what earlier services had sampled."""
    facts = command.outcome
    assert isinstance(facts, EpisodeFacts)
    num_tokens = _metric(facts, "sampled_tokens")
    num_resumed = _metric(facts, "resumed_tokens")
    sampled[command.worker_id] += num_tokens - num_resumed
    if is_dropped:
        outcome.wasted_tokens += num_tokens - num_resumed
        return
    outcome.resumed_tokens += num_resumed
    inside_s = min(at_s, outcome.end_s) - max(at_s - facts.duration_s, outcome.begin_s)
    if inside_s > 0:
        outcome.accepted_tokens += num_tokens * inside_s / max(facts.duration_s, 1e-9)


def _metric(facts: EpisodeFacts, name: str) -> int:
    return sum(int(item.value) for item in facts.metrics if item.name == name)


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
