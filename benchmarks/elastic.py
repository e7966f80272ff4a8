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
the window arrive. The cost of a kill is printed separately, as leases that were reissued. The baselines are:
the emulated speed itself (slots x tokens/s x services), of which `linear_frac` and `mixed_frac` are shares;
the first phase times the number of services; for the mix, equal shares for all services, as with a fixed
assignment, which ends with the slowest service; for the links, the same services without a link.

    python benchmarks/elastic.py [--only pool] [--picture docs/images/elastic.png]
"""

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.dataflow.audit import audit
from astraflow.dataflow.core.commands import (
    AddWorker,
    EpisodeFacts,
    LeaseIssued,
    RecordResult,
    ResultDropped,
)
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_commands, decode_events
from astraflow.errors import UnavailableError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.run import Run, launch
from elastic_service import start_service
from harness import report, show_table
from plots import use_style
from shaped_link import Link, ShapedLink

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
LINKS = {"150 ms, 50 Mbit/s": Link(0.15, 50e6), "300 ms, 4 Gbit/s": Link(0.3, 4e9)}
JOIN_S = 300.0
"""Longest time that services may take to start."""


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
    """Makes a recipe in which everything but the models is as in a real run. Rollout services join by
    themselves."""
    spec = load_spec(SPEC, {"warm_start.steps": 0})
    init_model(spec, folder / "model")
    tasks = [json.dumps({"prompt": f"Calculate {n} + 1.", "answer": str(n + 1)}) for n in range(5000)]
    (folder / "tasks.jsonl").write_text("\n".join(tasks))
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
    # Batches take the oldest draws, so there must be enough tickets while the longest episode runs, or runs
    # again.
    table = {
        "group_size": 8,
        "groups_per_batch": args.groups,
        "max_staleness": args.staleness,
        "engine_lag": 2,
    }
    backend = {"name": "paced", "step_s": args.step_s, "weights_bytes": args.weights_bytes}
    content: dict[str, Any] = {
        "name": "elastic",
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": str(folder / "tasks.jsonl")}}},
        "workflow": {"name": "paced"},
        "policies": {
            "actor": {
                "model": str(folder / "model"),
                "sampling": {"max_tokens": args.max_tokens},
                "table": table,
                "train": {"steps": 10**6, "checkpoint_every": 10, "backend": backend},
            }
        },
        "rollout": {"services": 0, "max_episodes": round(args.slots * 1.25), "engine": engine},
        "dataflow": {"lease_timeout_s": 6.0, "heartbeat_s": 1.0, "snapshot_every": 10**9},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path)


class Pool:
    """The services that run now."""

    def __init__(self, run: Run, publisher_url: str, folder: Path, args: argparse.Namespace) -> None:
        self._run = run
        self._publisher_url = publisher_url
        self._folder = folder
        self._args = args
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._links: list[ShapedLink] = []

    async def change(self, members: tuple[Member, ...]) -> None:
        """Kills the services that are not members, and starts the missing ones."""
        wanted = {member.name for member in members}
        for name in [name for name in self._processes if name not in wanted]:
            process = self._processes.pop(name)
            process.kill()
            await process.wait()
        for member in members:
            if member.name not in self._processes:
                self._processes[member.name] = await self._start(member)

    async def all_work(self) -> None:
        """Returns when each service has leases. Raises: RuntimeError that names a service that ended."""
        async with asyncio.timeout(JOIN_S):
            while True:
                for name, process in self._processes.items():
                    if process.returncode is not None:
                        log = (self._folder / f"{name}.log").read_text()[-2000:]
                        raise RuntimeError(f"{name} ended with {process.returncode}:\n{log}")
                if await self._working() >= set(self._processes):
                    return
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        """Ends the services and their links."""
        await self.change(())
        for link in self._links:
            await link.close()

    async def _working(self) -> set[str]:
        try:
            status = await self._run.status()
        except UnavailableError:  # the dataflow itself is starting
            return set()
        return {worker.name for worker in status.workers if worker.load.num_running > 0}

    async def _start(self, member: Member) -> asyncio.subprocess.Process:
        url = self._run.url
        routes = dict[str, str]()
        if member.link:
            link = ShapedLink(LINKS[member.link])
            self._links.append(link)
            url = await link.to(url)
            routes = {self._publisher_url: await link.to(self._publisher_url)}
        settings = {
            "url": url,
            "name": member.name,
            "cache": str(self._folder / f"cache-{member.name}"),
            "engine": {"tokens_per_s": self._args.tokens_per_s * member.speed},
            "routes": routes,
        }
        return await start_service(settings, self._folder / f"{member.name}.log")


async def drive(recipe: Recipe, folder: Path, plan: list[Phase], args: argparse.Namespace) -> None:
    """Runs the phases, and notes when each took place."""
    async with launch(recipe, folder / "run") as run:
        record = run.folder.load_record()
        publisher = next(s for s in record.services if s.name.startswith("publisher"))
        pool = Pool(run, f"http://127.0.0.1:{publisher.port}", folder, args)
        try:
            for idx, phase in enumerate(plan):
                phase.changed_s = time.time()
                await pool.change(phase.members)
                await pool.all_work()
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
            await pool.close()


# --- what was delivered ---------------------------------------------------------------------------


@dataclass
class Delivered:
    """The contents of the journal."""

    episodes: list[tuple[str, float, float, int]] = field(default_factory=list)
    """(service, begin, end, sampled tokens) of each accepted episode."""
    num_leases: int = 0
    num_results: int = 0
    num_dropped: int = 0


def read_journal(folder: Path) -> Delivered:
    """Reads every accepted episode of a journal."""
    found = Delivered()
    names = dict[str, str]()
    with JournalReader(folder) as journal:
        for record in journal.records():
            for command, events in zip(decode_commands(record), decode_events(record), strict=True):
                found.num_leases += sum(isinstance(event, LeaseIssued) for event in events)
                if isinstance(command, AddWorker):
                    names[command.worker_id] = command.name
                if isinstance(command, RecordResult) and isinstance(command.outcome, EpisodeFacts):
                    found.num_results += 1
                    if any(isinstance(event, ResultDropped) for event in events):
                        found.num_dropped += 1
                        continue
                    facts = command.outcome
                    num = sum(int(item.value) for item in facts.metrics if item.name == "sampled_tokens")
                    begin_s = record.at_s - facts.duration_s
                    found.episodes.append((names[command.worker_id], begin_s, record.at_s, num))
    return found


def rates(delivered: Delivered, begin_s: float, end_s: float) -> dict[str, float]:
    """Returns the tokens per second of each service within a window."""
    tokens: defaultdict[str, float] = defaultdict(float)
    for name, start_s, stop_s, num in delivered.episodes:
        inside_s = min(stop_s, end_s) - max(start_s, begin_s)
        if inside_s > 0:
            tokens[name] += num * inside_s / (stop_s - start_s)
    return {name: count / (end_s - begin_s) for name, count in tokens.items()}


def conclude(plan: list[Phase], folder: Path, args: argparse.Namespace, wall_s: float) -> None:
    """Prints the tables and the figures."""
    delivered = read_journal(folder / "run" / "journal")
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
        **_of_run(folder, delivered, wall_s),
        "join_s": round(statistics.median(p.join_s for p in plan), 1),
    }
    if args.picture and by_part["pool"]:
        draw(by_part["pool"], delivered, args)
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


def _of_run(folder: Path, delivered: Delivered, wall_s: float) -> dict[str, object]:
    """Prints and returns what the journal of the whole run says, and the cores that it used."""
    steps = _steps(folder)
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
        "reissued_leases": delivered.num_leases - delivered.num_results,
        "dropped_results": delivered.num_dropped,
        "episodes": len(delivered.episodes),
        "steps": steps,
        "staleness_mean": actor.staleness_mean,
        "staleness_max": actor.staleness_max,
        "cores_used": round(sum(each.ru_utime + each.ru_stime for each in used) / wall_s, 2),
    }


def _steps(folder: Path) -> int:
    with JournalReader(folder / "run" / "journal") as journal:
        return len(journal.steps())


def draw(pool: list[Phase], delivered: Delivered, args: argparse.Namespace) -> None:
    """Plots throughput over time, and the throughput that the pool could reach."""
    from matplotlib import pyplot

    use_style()

    begin_s = pool[0].changed_s
    end_s = pool[-1].end_s
    bin_s = 2.0
    times = [begin_s + bin_s * idx for idx in range(int((end_s - begin_s) / bin_s))]
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    measured = [sum(rates(delivered, t, t + bin_s).values()) / 1e3 for t in times]
    axes.plot([t - begin_s for t in times], measured, color="C0", label="delivered")
    edges = [p.changed_s - begin_s for p in pool] + [end_s - begin_s]
    axes.stairs([p.nominal(args) / 1e3 for p in pool], edges, color="0.6", label="pool (emulated speed)")
    for phase in pool:
        axes.axvspan(phase.begin_s - begin_s, phase.end_s - begin_s, color="C0", alpha=0.08)
        axes.annotate(str(len(phase.members)), (phase.changed_s - begin_s + 1, phase.nominal(args) / 1e3))
    axes.set(xlabel="seconds", ylabel="1,000 tokens/s", title="Services join, and are killed, unannounced")
    axes.set_ylim(0, 1.15 * max(p.nominal(args) for p in pool) / 1e3)
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(args.picture, dpi=110)
    print(f"wrote {args.picture}")


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
    parser.add_argument("--picture", type=Path)
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
