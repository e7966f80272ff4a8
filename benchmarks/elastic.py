"""Measures the throughput of a rollout pool that changes during a run, with emulated GPUs and everything else
real.

Services with `paced` engines (no model; `--slots` requests at `--tokens-per-s` each) join a run and are
killed with SIGKILL, without notice to any other process. Each phase is measured for `--window-s` after
`--settle-s`:

    pool    1 -> 2 -> 4 -> 8 -> 3 services of equal speed
    mixed   three services with 1x, 2x and 4x the speed of the slowest
    links   two services on the dataflow's machine; two behind a link of 150 ms and 50 Mbit/s each way; two
            behind 300 ms and 4 Gbit/s. Dataflow and weights use the same link (a proxy in this process).

Throughput counts what was delivered: the sampled tokens of accepted episodes, from the journal, each spread
over the duration of its episode. `--tail-s` pass before services are killed, so that the episodes that ran in
the window arrive. The baselines are: the emulated speed itself (slots x tokens/s x services), of which
`linear_frac` and `mixed_frac` are shares; the first phase times the number of services; for the mix, equal
shares for all services, as with a fixed assignment, which ends with the slowest service; for the links, the
same services without a link.

    python benchmarks/elastic.py [--only pool]
"""

import argparse
import asyncio
import resource
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.dataflow.audit import audit
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.recipe.recipe import Recipe
from astraflow.run.run import launch
from harness import report, show_table
from services import Delivery, Services, deliveries, paced_recipe
from shaped_link import Link

LINKS = {"150 ms, 50 Mbit/s": Link(0.15, 50e6), "300 ms, 4 Gbit/s": Link(0.3, 4e9)}


@dataclass(frozen=True)
class Member:
    """A service of a phase."""

    name: str
    speed: float = 1.0
    """Multiple of `--tokens-per-s`."""
    link: str = ""
    """One of LINKS; empty: none."""


@dataclass
class Phase:
    """A pool, and what it delivered."""

    part: str
    title: str
    members: tuple[Member, ...]
    changed_s: float = 0.0
    """When the services of the previous phase were killed and those of this phase were started."""
    begin_s: float = 0.0
    end_s: float = 0.0
    join_s: float = 0.0
    """Time until all of them had leases."""
    rates: dict[str, float] = field(default_factory=dict)
    """Service -> tokens per second."""

    @property
    def rate(self) -> float:
        """Emulated tokens per second of all services together."""
        return sum(self.rates.values())

    def nominal(self, args: argparse.Namespace) -> float:
        """Returns the throughput that the emulated devices can reach."""
        return sum(member.speed for member in self.members) * args.slots * args.tokens_per_s


def phases(args: argparse.Namespace) -> list[Phase]:
    """Returns all requested phases, in order."""
    found: list[Phase] = []
    if args.only in ("", "pool"):
        for num in args.pool:
            members = tuple(Member(f"pool-{idx}") for idx in range(num))
            found.append(Phase("pool", f"{num} services", members))
    if args.only in ("", "mixed"):
        members = tuple(Member(f"mixed-{speed}x", speed / 2) for speed in (1, 2, 4))
        found.append(Phase("mixed", "1x + 2x + 4x", members))
    if args.only in ("", "links"):
        for idx, link in enumerate(("", *LINKS)):
            members = tuple(Member(f"link{idx}-{i}", link=link) for i in range(2))
            found.append(Phase("links", link or "no link", members))
    return found


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
        "update_s": args.update_s,
        "max_context": args.max_tokens + 64,
    }
    table = {
        "group_size": 8,
        "groups_per_batch": args.groups,
        "max_staleness": args.staleness,
        "engine_lag": 2,
    }
    backend = {"name": "paced", "step_s": args.step_s, "weights_bytes": args.weights_bytes}
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


async def change(services: Services, members: Sequence[Member], args: argparse.Namespace) -> None:
    """Kills the services that are not members, and starts the missing ones. Returns when all have leases."""
    for name in set(services.processes) - {member.name for member in members}:
        await services.kill(name)
    for member in members:
        if member.name not in services.processes:
            engine = {"tokens_per_s": args.tokens_per_s * member.speed}
            await services.start(member.name, engine=engine, link=LINKS.get(member.link))
    await services.all_work()


async def drive(recipe: Recipe, folder: Path, plan: list[Phase], args: argparse.Namespace) -> None:
    """Runs the phases, and notes when each took place."""
    async with launch(recipe, folder / "run") as run:
        services = Services(run, folder)
        try:
            for idx, phase in enumerate(plan):
                phase.changed_s = time.time()
                await change(services, phase.members, args)
                phase.join_s = time.time() - phase.changed_s
                await asyncio.sleep(args.settle_s)
                phase.begin_s = time.time()
                await asyncio.sleep(args.window_s)
                phase.end_s = time.time()
                print(
                    f"{phase.title}: joined in {phase.join_s:.1f} s, measured {args.window_s:g} s", flush=True
                )
                stays = {m.name for m in plan[idx + 1].members} if idx + 1 < len(plan) else set[str]()
                if not {member.name for member in phase.members} <= stays:
                    await asyncio.sleep(args.tail_s)
        finally:
            await services.close()


# --- what was delivered ---------------------------------------------------------------------------


def rates(delivered: Sequence[Delivery], begin_s: float, end_s: float) -> dict[str, float]:
    """Returns the tokens per second of each service within a window."""
    tokens: defaultdict[str, float] = defaultdict(float)
    for each in delivered:
        tokens[each.service] += each.metric("sampled_tokens") * each.share_of(begin_s, end_s)
    return {name: count / (end_s - begin_s) for name, count in tokens.items() if count}


def conclude(plan: list[Phase], folder: Path, args: argparse.Namespace, wall_s: float) -> None:
    """Prints the tables and the figures."""
    found = list(deliveries(folder / "run" / "journal"))
    delivered = [each for each in found if not each.is_dropped]
    for phase in plan:
        phase.rates = rates(delivered, phase.begin_s, phase.end_s)
    header = ("phase", "delivered tokens/s", "emulated tokens/s", "share", "joined in s")
    rows = [
        (p.title, p.rate, p.nominal(args), f"{p.rate / p.nominal(args):.3f}", f"{p.join_s:.1f}") for p in plan
    ]
    show_table(f"{args.slots} slots at {args.tokens_per_s:g} tokens/s a service", header, rows)
    by_part: defaultdict[str, list[Phase]] = defaultdict(list)
    for phase in plan:
        by_part[phase.part].append(phase)
    figures = {
        **_of_pool(by_part["pool"], args),
        **_of_mix(by_part["mixed"], args),
        **_of_links(by_part["links"], args),
        **_of_run(folder, wall_s),
        "dropped_results": len(found) - len(delivered),
        "episodes": len(delivered),
        "join_s": round(statistics.median(p.join_s for p in plan), 1),
    }
    report(
        {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()},
        at_least={"linear_frac": 0.9, "mixed_frac": 0.9},
        at_most={"wan_loss_frac": 0.1},
    )


def _of_pool(pool: list[Phase], args: argparse.Namespace) -> dict[str, object]:
    """Returns how throughput grows with the number of services."""
    if not pool:
        return {}
    alone = next((p.rate for p in pool if len(p.members) == 1), pool[0].rate / len(pool[0].members))
    return {
        "linear_frac": min(p.rate / p.nominal(args) for p in pool),
        "linear_frac_of_first": min(p.rate / (alone * len(p.members)) for p in pool),
        "peak_tokens_per_s": round(max(p.rate for p in pool)),
    }


def _of_mix(mixed: list[Phase], args: argparse.Namespace) -> dict[str, object]:
    """Prints and returns what services of different speeds deliver together."""
    figures: dict[str, object] = {}
    unit = args.slots * args.tokens_per_s
    for phase in mixed:
        parts = [(m.name, phase.rates.get(m.name, 0.0), m.speed) for m in phase.members]
        shares = [(name, rate, f"{rate / speed / unit:.3f}") for name, rate, speed in parts]
        show_table("the mix, by service", ("service", "delivered", "share"), shares)
        slowest = min(m.speed for m in phase.members)
        figures["mixed_frac"] = phase.rate / phase.nominal(args)
        figures["mixed_equal_shares_frac"] = slowest * len(parts) * unit / phase.nominal(args)
    return figures


def _of_links(links: list[Phase], args: argparse.Namespace) -> dict[str, object]:
    """Prints and returns what slow links cost, compared with the first."""
    if not links:
        return {}
    losses = {p.title: 1 - p.rate / links[0].rate for p in links[1:]}
    show_table("links", ("link", "loss"), [(title, f"{loss:.3f}") for title, loss in losses.items()])
    return {
        "wan_loss_frac": max(losses.values()),
        "wan_loss_of_emulated_frac": max(1 - p.rate / p.nominal(args) for p in links[1:]),
    }


def _of_run(folder: Path, wall_s: float) -> dict[str, object]:
    """Prints and returns what the journal of the whole run says, and the cores that it used."""
    with JournalReader(folder / "run" / "journal") as journal:
        steps = len(journal.steps())
    checked = audit(folder / "run" / "journal")
    actor = checked.policies[0]
    print(f"audit: {'holds' if checked.ok else checked.problems}; {steps} steps were trained meanwhile")
    print(
        f"staleness: mean {actor.staleness_mean:.2f}, max {actor.staleness_max}, bound "
        f"{actor.staleness_bound}"
    )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return {
        "audit_ok": checked.ok,
        "steps": steps,
        "staleness_mean": actor.staleness_mean,
        "staleness_max": actor.staleness_max,
        "cores_used": round(sum(each.ru_utime + each.ru_stime for each in used) / wall_s, 2),
    }


def main() -> None:
    """Runs the phases, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=("", "pool", "mixed", "links"), default="")
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
    parser.add_argument("--update-s", type=float, default=0.05, help="emulated time of a weight update")
    parser.add_argument("--weights-bytes", type=int, default=1 << 20)
    parser.add_argument("--settle-s", type=float, default=15.0)
    parser.add_argument("--window-s", type=float, default=30.0)
    parser.add_argument("--tail-s", type=float, default=0.0, help="default: the longest completion's time")
    parser.add_argument("--keep", type=Path, help="folder for the run; default: a temporary one")
    args = parser.parse_args()
    args.tail_s = args.tail_s or 1.3 * args.max_tokens / args.tokens_per_s
    folder = args.keep or Path(tempfile.mkdtemp(prefix="elastic-"))
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.time()
    plan = phases(args)
    try:
        asyncio.run(drive(make_recipe(folder, args), folder, plan, args))
        conclude(plan, folder, args, time.time() - began_s)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
