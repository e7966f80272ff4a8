"""Computes what a run on a thousand GPUs costs, and which resource ends first, without the GPUs.

`fleet.py` simulates the run under a virtual clock with the dataflow's real core: 94 nodes in three regions
generate, eight trainers of 31 GPUs train eight policies, and nodes and trainers are lost. The assumed rates
are a node per day and 1,000 GPUs, which is twice what Meta reports for Llama 3 (466 interruptions of 16,384
GPUs in 54 days, arXiv 2407.21783, section 3.3.4), and a loss of each spot node every six hours. A day of
these failures happens in each hour. A second run has no failures.

The costs of an episode are measured on a real dataflow process, at two lengths and in five rounds: CPU
seconds, bytes written to the journal, and bytes sent. All costs grow linearly with the length. The benchmark
predicts from them what a third length costs, and measures that too (`cpu_check`, `journal_check`: measured /
predicted).

    goodput_frac         trained tokens per second with failures, divided by those without
    dataflow_cores       CPU seconds per second of the dataflow process
    journal_tb_per_day   bytes written to the journal
    first_limit_gpus     size at which the first resource is used up, if batches grow with the fleet
    busiest_link_frac    share of its bandwidth that the busiest link needs for weights. It depends on how
                         often policies are published, not on the size of the fleet

    python benchmarks/thousand_gpus.py [--minutes 10] [--scale 1.0]
"""

import argparse
import asyncio
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow import wire
from astraflow.types import Fingerprints, SessionRequest
from dataflow import training
from dataflow_peers import (
    Server,
    Side,
    join,
    lease,
    make_results,
    make_trajectory,
    open_side,
    publish,
)
from fleet import GPUS_PER_NODE, Fleet, Found, Plan, Region
from harness import report, show_table

ROOT = Path(__file__).resolve().parent.parent
FAILURES = 24.0
"""Failures per hour, as multiples of those expected."""
NODE_PER_H = GPUS_PER_NODE / 1000 / 24
SPOT_PER_H = 1 / 6
LENGTHS = (1024, 8192)
CHECKED_LENGTH = 4096
ROUNDS = 5
CHUNK = 16
"""Episodes per request, as many as a busy rollout service sends at once."""
PER_SERVICE_CORES = 3e-5
"""Cores that the heartbeats of a service need in a pool of 10,000 (`pool.py`)."""
DISK_MB_S = 1000.0
NIC_GBIT_S = 25.0


def make_plan(scale: float, failures: float) -> Plan:
    """Makes the plan of a run of about 1,000 * `scale` GPUs."""
    lost = NODE_PER_H * failures
    gpus_per_trainer = max(1, round(31 * scale))
    return Plan(
        regions=(
            Region("home", round(56 * scale), 50.0, 400.0, 0.001, lost),
            Region("second", round(24 * scale), 40.0, 100.0, 0.02, lost),
            Region("spot", round(14 * scale), 30.0, 20.0, 0.1, lost + SPOT_PER_H * failures),
        ),
        gpus_per_trainer=gpus_per_trainer,
        groups_per_batch=max(1, round(1024 * scale)),
        trainer_losses_per_h=lost * gpus_per_trainer / GPUS_PER_NODE,
    )


# --- costs of a real dataflow process ---------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """The costs of an episode, from lease to batch."""

    cpu_s: float
    journal_bytes: float
    sent_bytes: float

    def at(self, num_tokens: float, other: "Costs", lengths: tuple[int, int]) -> "Costs":
        """Returns the costs at a length; `self` and `other` are those at `lengths`."""
        share = (num_tokens - lengths[0]) / (lengths[1] - lengths[0])
        return Costs(
            self.cpu_s + share * (other.cpu_s - self.cpu_s),
            self.journal_bytes + share * (other.journal_bytes - self.journal_bytes),
            self.sent_bytes + share * (other.sent_bytes - self.sent_bytes),
        )


async def measure_costs(num_tokens: int, num: int, folder: Path) -> Costs:
    """Measures `num` episodes of a length, with a trainer that takes all batches."""
    server = Server("service", str(folder / f"journal-{num_tokens}"), "32", "100000")
    try:
        async with open_side(server, connections=4, is_bare=False) as side:
            request = SessionRequest(trainer_id="t", durable_step=0, fingerprints=Fingerprints())
            side.session = await side.client.attach("actor", request)
            await publish(side, 0)
            side.worker_id = await join(side, "w")
            async with training(side):
                await _run_episodes(side, num_tokens, num // 4)
                cpu_s = server.cpu_s()
                written = server.written_bytes()
                await _run_episodes(side, num_tokens, num)
                cpu_s = server.cpu_s() - cpu_s
                written = server.written_bytes() - written
    finally:
        server.close()
    sent = len(wire.encode(make_results("w.0", ["0" * 12], make_trajectory(num_tokens))))
    return Costs(cpu_s / num, written / num, float(sent))


async def measure_medians(lengths: Sequence[int], num: int) -> list[Costs]:
    """Measures each length in several rounds, because CPU time varies by a tenth. Returns: the medians."""
    rounds: list[list[Costs]] = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=ROOT, prefix=".thousand-gpus-") as name:
            rounds.append([await measure_costs(length, num, Path(name)) for length in lengths])
    return [
        Costs(
            statistics.median(costs.cpu_s for costs in of_length),
            statistics.median(costs.journal_bytes for costs in of_length),
            of_length[0].sent_bytes,
        )
        for of_length in zip(*rounds, strict=True)
    ]


async def _run_episodes(side: Side, num_tokens: int, num: int) -> None:
    done = 0
    while done < num:
        ids = await lease(side, min(CHUNK, num - done))
        trajectory = make_trajectory(num_tokens, side.version)
        await side.client.episodes(make_results(side.worker_id, ids, trajectory))
        done += len(ids)


# --- resources --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resource:
    """What a run uses of a resource, and how much there is of it."""

    name: str
    used: float
    limit: float
    unit: str
    grows: bool = True
    """Whether a larger fleet, with larger batches, uses more."""

    def ends_at(self, num_gpus: int) -> float:
        """Returns the number of GPUs that use all of it; infinite if it doesn't grow."""
        return num_gpus * self.limit / self.used if self.grows and self.used else math.inf


def resources_of(plan: Plan, found: Found, costs: Costs) -> list[Resource]:
    """Returns what the run uses."""
    per_s = found.num_episodes / found.seconds
    core_s = found.core_cpu_s / found.num_episodes
    num_nodes = sum(region.num_nodes for region in plan.regions)
    cores = per_s * (costs.cpu_s + core_s) + num_nodes * PER_SERVICE_CORES
    nic_mb_s = NIC_GBIT_S / 8 * 1000
    rows = [
        Resource("dataflow process, one core", cores, 1.0, "cores"),
        Resource("journal's disk", per_s * costs.journal_bytes / 1e6, DISK_MB_S, "MB/s"),
        Resource("dataflow's network, episodes in", per_s * costs.sent_bytes / 1e6, nic_mb_s, "MB/s"),
        Resource(
            "dataflow's network, batches out",
            per_s * costs.sent_bytes / 1e6 * found.num_trained / found.num_sampled,
            nic_mb_s,
            "MB/s",
        ),
    ]
    for region in plan.regions:
        sent_gb = found.sent_gb.get(region.name, 0.0)
        used = 8 * sent_gb / found.seconds
        rows.append(Resource(f"link to {region.name}, weights", used, region.gbit_s, "Gbit/s", grows=False))
    return rows


def show(plan: Plan, found: Found, calm: Found, rows: list[Resource]) -> None:
    """Prints the tables."""
    slots = GPUS_PER_NODE * plan.slots_per_gpu
    capacity = sum(region.num_nodes * slots * region.tokens_per_s for region in plan.regions)
    show_table(
        f"{plan.num_gpus} GPUs, {plan.num_policies} policies, VIRTUAL time, failures x {FAILURES:g}",
        ("run", "M tokens/s", "of capacity", "trained", "staleness", "max", "trainers busy"),
        [
            (
                name,
                run.num_sampled / run.seconds / 1e6,
                run.num_sampled / run.seconds / capacity,
                run.num_trained / run.num_sampled,
                statistics.fmean(run.staleness),
                run.staleness_max,
                run.train_s / run.seconds / plan.num_policies,
            )
            for name, run in (("without failures", calm), ("with failures", found))
        ],
    )
    show_table(
        "what the run uses, and the size at which that ends, if batches grow with the fleet",
        ("resource", "used", "of", "unit", "GPUs"),
        [
            (
                row.name,
                row.used,
                row.limit,
                row.unit,
                round(row.ends_at(plan.num_gpus)) if row.grows else "any",
            )
            for row in rows
        ],
    )


def figures_of(plan: Plan, found: Found, calm: Found, rows: list[Resource]) -> dict[str, object]:
    """Returns the figures of the last line."""
    first = min(rows, key=lambda row: row.ends_at(plan.num_gpus))
    by_name: Mapping[str, Resource] = {row.name: row for row in rows}
    figures: dict[str, object] = {
        "is_virtual": True,
        "num_gpus": plan.num_gpus,
        "goodput_frac": found.num_trained / calm.num_trained,
        "lost_tokens_frac": found.num_lost / found.num_sampled,
        "staleness_mean": statistics.fmean(found.staleness),
        "node_losses": found.num_node_losses,
        "trainer_losses": found.num_trainer_losses,
        "episodes_per_s": found.num_episodes / found.seconds,
        "dataflow_cores": by_name["dataflow process, one core"].used,
        "journal_tb_per_day": by_name["journal's disk"].used * 86_400 / 1e6,
        "first_limit": first.name,
        "first_limit_gpus": round(first.ends_at(plan.num_gpus)),
        "busiest_link_frac": max(row.used / row.limit for row in rows if not row.grows),
    }
    if found.resumed_after_s:
        figures["resumed_after_s"] = statistics.median(found.resumed_after_s)
    return figures


async def main(args: argparse.Namespace) -> None:
    """Measures the costs, simulates both runs, and prints."""
    short, long, checked = await measure_medians((*LENGTHS, CHECKED_LENGTH), args.episodes)
    predicted = short.at(CHECKED_LENGTH, long, LENGTHS)
    plan = make_plan(args.scale, FAILURES)
    calm_plan = make_plan(args.scale, 0.0)
    found, calm = [
        Fleet(each).run(minutes=args.minutes, warm_minutes=args.warm_minutes) for each in (plan, calm_plan)
    ]
    if not (found.staleness and calm.staleness):
        raise SystemExit(f"no policy was trained in {args.minutes:g} minutes; give it more with --minutes")
    tokens = found.num_sampled / found.num_episodes
    rows = resources_of(plan, found, short.at(tokens, long, LENGTHS))
    show(plan, found, calm, rows)
    figures = figures_of(plan, found, calm, rows)
    figures["cpu_check"] = checked.cpu_s / predicted.cpu_s
    figures["journal_check"] = checked.journal_bytes / predicted.journal_bytes
    report(
        figures,
        at_least={"cpu_check": 0.9, "journal_check": 0.9},
        at_most={"cpu_check": 1.1, "journal_check": 1.1},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="virtual minutes that count")
    parser.add_argument("--warm-minutes", type=float, default=8.0, help="virtual minutes before them")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the fleet, in 1,000 GPUs")
    parser.add_argument("--episodes", type=int, default=1600, help="measured episodes of each length")
    asyncio.run(main(parser.parse_args()))
