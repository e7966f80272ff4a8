"""Measures the throughput of a rollout pool that changes during a run, with emulated GPUs and everything else
real.

Services with `paced` engines (no model; `--slots` requests at `--tokens-per-s` each) join a run and are
killed with SIGKILL, without notice to any other process. The pool has 1, 2, 4, 8, and then 3 services. Each
of these phases is measured for `--window-s` after `--settle-s`.

Throughput counts what was delivered: the sampled tokens of accepted episodes, from the journal, each spread
over the duration of its episode. `--tail-s` pass before services are killed, so that the episodes that ran in
the window arrive. The baseline is the emulated speed itself (slots x tokens/s x services), of which
`linear_frac` is the share.

    python benchmarks/elastic.py [--pool 1,2,4,8,3]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.dataflow.audit import audit
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.recipe.recipe import Recipe
from astraflow.run.run import launch
from harness import report, show_table
from services import Delivery, Services, deliveries, paced_recipe


@dataclass
class Phase:
    """A pool of equal services, and what it delivered."""

    num_services: int
    begin_s: float = 0.0
    end_s: float = 0.0
    join_s: float = 0.0
    """Time until all of them had leases."""
    rate: float = 0.0
    """Delivered tokens per second."""

    def nominal(self, args: argparse.Namespace) -> float:
        """Returns the throughput that the emulated devices can reach."""
        return self.num_services * args.slots * args.tokens_per_s


# --- the run --------------------------------------------------------------------------------------


def make_recipe(folder: Path, args: argparse.Namespace) -> Recipe:
    """Makes the recipe. Batches take the oldest draws, so there must be enough tickets while the longest
    episode runs, or runs again."""
    engine = {
        "name": "paced",
        "num_slots": args.slots,
        "tokens_per_s": args.tokens_per_s,
        "mean_tokens": args.mean_tokens,
        "sigma": args.sigma,
        "prefill_cost": 0.02,
        "update_s": 0.05,
        "max_context": args.max_tokens + 64,
    }
    table = {
        "group_size": 8,
        "groups_per_batch": args.groups,
        "max_staleness": args.staleness,
        "engine_lag": 2,
    }
    backend = {"name": "paced", "step_s": args.step_s, "weights_bytes": 1 << 20}
    return paced_recipe(
        folder,
        {
            "sampling": {"max_tokens": args.max_tokens},
            "table": table,
            "train": {"steps": 10**6, "checkpoint_every": 10, "backend": backend},
        },
        name="elastic",
        workflow={"name": "paced"},
        rollout={"max_episodes": round(args.slots * 1.25), "engine": engine},
        dataflow={"lease_timeout_s": 6.0, "heartbeat_s": 1.0, "snapshot_every": 10**9},
    )


async def change(services: Services, num: int) -> None:
    """Kills the services that are too many, and starts the missing ones. Returns when all have leases."""
    wanted = [f"pool-{idx}" for idx in range(num)]
    for name in set(services.processes) - set(wanted):
        await services.kill(name)
    for name in wanted:
        if name not in services.processes:
            await services.start(name)
    await services.all_work()


async def drive(recipe: Recipe, folder: Path, plan: Sequence[Phase], args: argparse.Namespace) -> None:
    """Runs the phases, and notes when each took place."""
    async with launch(recipe, folder / "run") as run:
        services = Services(run, folder)
        try:
            for phase, following in zip(plan, [*plan[1:], None], strict=True):
                changed_s = time.time()
                await change(services, phase.num_services)
                phase.join_s = time.time() - changed_s
                await asyncio.sleep(args.settle_s)
                phase.begin_s = time.time()
                await asyncio.sleep(args.window_s)
                phase.end_s = time.time()
                print(f"{phase.num_services} services: joined in {phase.join_s:.1f} s", flush=True)
                if following is None or following.num_services < phase.num_services:
                    await asyncio.sleep(args.tail_s)
        finally:
            await services.close()


# --- what was delivered ---------------------------------------------------------------------------


def rate(delivered: Sequence[Delivery], phase: Phase) -> float:
    """Returns the tokens per second of a phase."""
    shares = (
        (each.metric("sampled_tokens"), each.share_of(phase.begin_s, phase.end_s)) for each in delivered
    )
    return sum(num * share for num, share in shares) / (phase.end_s - phase.begin_s)


def conclude(plan: Sequence[Phase], folder: Path, args: argparse.Namespace) -> None:
    """Prints the table and the figures."""
    journal = folder / "run" / "journal"
    arrived = list(deliveries(journal))
    delivered = [each for each in arrived if not each.is_dropped]
    for phase in plan:
        phase.rate = rate(delivered, phase)
    with JournalReader(journal) as reader:
        num_steps = len(reader.steps())
    checked = audit(journal)
    actor = checked.policies[0]
    rows = [
        (p.num_services, p.rate, p.nominal(args), f"{p.rate / p.nominal(args):.3f}", f"{p.join_s:.1f}")
        for p in plan
    ]
    header = ("services", "delivered tokens/s", "emulated tokens/s", "share", "joined in s")
    show_table(f"{args.slots} slots at {args.tokens_per_s:g} tokens/s a service", header, rows)
    print(f"audit: {'holds' if checked.ok else checked.problems}; {num_steps} steps were trained meanwhile")
    figures = {
        "linear_frac": min(p.rate / p.nominal(args) for p in plan),
        "join_s": statistics.median(p.join_s for p in plan),
        "audit_ok": checked.ok,
        "episodes": len(delivered),
        "steps": num_steps,
        "staleness_mean": actor.staleness_mean,
        "staleness_max": actor.staleness_max,
    }
    report(figures, at_least={"linear_frac": 0.9})


def main() -> None:
    """Runs the phases, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--pool", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8, 3]
    )
    parser.add_argument("--slots", type=int, default=64, help="concurrent requests of a service")
    parser.add_argument("--tokens-per-s", type=float, default=320.0, help="of a request")
    parser.add_argument("--mean-tokens", type=float, default=2000.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=8192, help="longer completions are cut")
    parser.add_argument("--groups", type=int, default=64, help="groups of 8 in a batch")
    parser.add_argument("--staleness", type=int, default=12, help="versions; the bound")
    parser.add_argument("--step-s", type=float, default=0.5, help="emulated time of a training step")
    parser.add_argument("--settle-s", type=float, default=15.0)
    parser.add_argument("--window-s", type=float, default=30.0)
    parser.add_argument("--tail-s", type=float, default=0.0, help="default: the longest completion's time")
    args = parser.parse_args()
    args.tail_s = args.tail_s or 1.3 * args.max_tokens / args.tokens_per_s
    plan = [Phase(num) for num in args.pool]
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        asyncio.run(drive(make_recipe(folder, args), folder, plan, args))
        conclude(plan, folder, args)


if __name__ == "__main__":
    main()
