"""Compares the dataflow service with TransferQueue on the same samples: speed, CPU time, and guarantees.

TransferQueue (used by verl, ROLL, and NeMo-RL) is a data store between rollouts and trainers. It has a
controller with metadata, storage units with tensors, and ZeroMQ between them and the clients; Ray starts the
processes. Producers hand over whole groups, and a trainer takes batches, both in one client process. Both
sides have the same number of producers, which may be equally far ahead. Each sample has token ids (int32), a
mask (uint8), behavior logprobs (float32), and a reward. The two sides alternate.

The two systems give different guarantees, so the table of guarantees belongs to the figures. The dataflow
service responds to a producer when its samples are on disk (fsync), leases what it expects, counts every
sample once, bounds staleness, computes advantages, and follows the trainer's commits. TransferQueue's default
storage keeps samples in memory. TransferQueue selects, splits, and balances fields of samples, which the
dataflow does not.

CPU time per sample is that of the servers' processes (dataflow: one; TransferQueue: a controller and two
storage units), and of the client's process. Ray's own processes are shown separately.

    python benchmarks/transfer_queue.py [--quick] [--rounds 3]
"""

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import uvloop

from dataflow_peers import (
    Setting,
    Side,
    fetch,
    finish_step,
    lease,
    make_results,
    make_trajectory,
    open_sides,
    padded,
)
from environments import make_environment
from harness import Runs, report, show_table
from transfer_queue_side import PACKAGES, QueueJob, QueueResult, run_job

ROOT = Path(__file__).resolve().parent.parent
GROUP = 8
GROUPS_PER_BATCH = 32
NUM_PRODUCERS = 4
MOST_AHEAD = 2
SIZES = {"tiny": 25, "long": 4096}
"""Name -> tokens of a sample: those of the quickstart, and those of answers with some reasoning."""
NUM_BATCHES = {"tiny": 64, "long": 16}
PROMISES = (
    ("a sample that was acknowledged survives kill -9", "yes (fsync)", "no (memory)"),
    ("a sample sent twice counts once", "yes (lease id)", "producer's task"),
    ("samples of a step were sampled at most N versions ago", "yes", "producer's task"),
    ("a batch that was lost with its trainer is served again", "yes", "reset_consumption"),
    ("every sample is accounted for at the end (audit)", "yes", "no"),
    ("fields of a sample written and read one by one", "no", "yes"),
    ("storage on several machines", "no", "yes"),
)
"""What each side guarantees, with the settings of this benchmark."""


@dataclass(frozen=True)
class Moved:
    """Figures of one side, by round."""

    per_s: Runs
    server_us: Runs
    """CPU time of the servers per sample."""
    client_us: Runs

    @staticmethod
    def of(result: QueueResult, num: int) -> "Moved":
        """Computes the figures per sample, for rounds that moved `num` samples each."""
        return Moved(
            per_s=Runs(tuple(num / value for value in result.wall_s)),
            server_us=Runs(tuple(value / num * 1e6 for value in result.server_cpu_s)),
            client_us=Runs(tuple(value / num * 1e6 for value in result.client_cpu_s)),
        )


async def move(side: Side, job: QueueJob, steps: "itertools.count[int]") -> None:
    """Moves one round through the dataflow service."""
    trajectory = make_trajectory(job.num_tokens, side.version)
    num_left = job.num_batches * job.groups_per_batch

    async def produce() -> None:
        nonlocal num_left, trajectory
        while num_left > 0:
            num_left -= 1
            ids: list[str] = []
            while len(ids) < job.group_size:
                ids += await lease(side, job.group_size - len(ids), wait_s=5.0)
            if trajectory.versions[0].version != side.version:
                trajectory = make_trajectory(job.num_tokens, side.version)
            receipts = await side.client.episodes(make_results(side.worker_id, ids, trajectory))
            assert all(receipt.status == "accepted" for receipt in receipts.receipts), receipts

    async def train() -> None:
        for _ in range(job.num_batches):
            step = next(steps)
            arrays = padded(await fetch(side, step))
            assert arrays[0].shape == (job.groups_per_batch * job.group_size, job.num_tokens)
            await finish_step(side, step)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(job.num_producers):
            tasks.create_task(produce())
        tasks.create_task(train())


async def through_dataflow(setting: Setting, job: QueueJob) -> QueueResult:
    """Moves all rounds through their own dataflow service, after one warm-up batch."""
    result = QueueResult(wall_s=[], server_cpu_s=[], client_cpu_s=[], ray_cpu_s=[])
    sides = open_sides(
        setting,
        connections=NUM_PRODUCERS + 2,
        groups_per_batch=job.groups_per_batch,
        staleness=job.most_ahead,
    )
    async with sides as (side, _):
        steps = itertools.count()
        await move(side, QueueJob(**{**_fields(job), "num_batches": 1}), steps)
        for _turn in range(job.rounds):
            server_cpu_s = side.server.cpu_s()
            client_cpu_s = time.process_time()
            start = time.perf_counter()
            await move(side, job, steps)
            result.wall_s.append(time.perf_counter() - start)
            result.client_cpu_s.append(time.process_time() - client_cpu_s)
            result.server_cpu_s.append(side.server.cpu_s() - server_cpu_s)
            result.ray_cpu_s.append(0.0)
    return result


def _fields(job: QueueJob) -> dict[str, int]:
    return {name: getattr(job, name) for name in QueueJob.__struct_fields__}


def joined(results: list[QueueResult]) -> QueueResult:
    """Joins the rounds of several runs."""
    return QueueResult(
        **{
            name: [value for result in results for value in getattr(result, name)]
            for name in QueueResult.__struct_fields__
        }
    )


def measure(args: argparse.Namespace, python: Path, name: str) -> tuple[Moved, Moved, Runs]:
    """Moves one size through both sides, alternating. The last value is the CPU time of Ray's other
    processes."""
    job = QueueJob(
        num_tokens=SIZES[name],
        group_size=GROUP,
        groups_per_batch=GROUPS_PER_BATCH,
        num_batches=NUM_BATCHES[name] // (4 if args.quick else 1),
        rounds=1,
        num_producers=NUM_PRODUCERS,
        most_ahead=MOST_AHEAD,
    )
    num = job.num_batches * job.groups_per_batch * job.group_size
    setting = Setting(args.folder, args.quick, 1, 0.0)
    ours: list[QueueResult] = []
    theirs: list[QueueResult] = []
    for _ in range(args.rounds):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ours.append(runner.run(through_dataflow(setting, job)))
        with tempfile.TemporaryDirectory(dir=args.folder) as work:
            theirs.append(run_job(python, job, Path(work)))
    ray_us = Runs(tuple(value / num * 1e6 for value in joined(theirs).ray_cpu_s))
    return Moved.of(joined(ours), num), Moved.of(joined(theirs), num), ray_us


def main() -> None:
    """Runs both sizes, and prints the tables and the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-transfer-queue")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    args = parser.parse_args()
    python = make_environment(args.venv, PACKAGES)
    rows: list[tuple[object, ...]] = []
    figures: dict[str, object] = {"cores": os.cpu_count()}
    for name in args.sizes:
        ours, theirs, ray_us = measure(args, python, name)
        figures |= figures_of(name, ours, theirs)
        rows.append((name, "dataflow", ours.per_s, ours.server_us, ours.client_us, ""))
        rows.append((name, "TransferQueue", theirs.per_s, theirs.server_us, theirs.client_us, ray_us))
    header = ("samples", "through", "samples/s", "servers' CPU us", "client's CPU us", "Ray's CPU us")
    show_table(f"groups of {GROUP}, batches of {GROUP * GROUPS_PER_BATCH} samples, per sample", header, rows)
    show_table("what each promises", ("", "dataflow", "TransferQueue"), PROMISES)
    report(figures)


def figures_of(name: str, ours: Moved, theirs: Moved) -> Mapping[str, object]:
    """Returns the figures of one size for the JSON. Ratios above 1 favor the dataflow."""
    our_us = ours.server_us.median + ours.client_us.median
    their_us = theirs.server_us.median + theirs.client_us.median
    return {
        f"{name}_per_s": ours.per_s,
        f"{name}_queue_per_s": theirs.per_s,
        f"{name}_cpu_us": our_us,
        f"{name}_queue_cpu_us": their_us,
        f"{name}_throughput_ratio": ours.per_s.median / theirs.per_s.median,
        f"{name}_cpu_ratio": their_us / our_us,
    }


if __name__ == "__main__":
    main()
