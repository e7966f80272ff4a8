"""Measures how long the dataflow takes to restart, and how long a snapshot blocks it, with many live items.

Live items are trajectories of groups that are still incomplete (half of them), complete, or in a batch. The
journal has their snapshot and the records of a whole snapshot interval after it, which is the most that a
restart replays.

`snapshot_stop_ms` is CPU time of the event loop. `snapshot_piece_ms` is that of the longest piece after it,
in the journal's thread.

    python benchmarks/dataflow_restart.py [--items 100000]
"""

import argparse
import asyncio
import gc
import shutil
import tempfile
import time
from pathlib import Path

from astraflow.algorithms.task_orders import ShuffleConfig
from astraflow.dataflow.config import DataflowConfig, TableConfig
from astraflow.dataflow.core.commands import (
    AddWorker,
    AttachTrainer,
    Command,
    EpisodeFacts,
    IssueLeases,
    LeaseView,
    PayloadRef,
    PublishVersion,
    RecordResult,
    TakeBatch,
    TrajectoryMeta,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from astraflow.dataflow.journal.journal import Journal
from astraflow.types import Manifest, ServedVersions
from harness import report, show_table

GROUP = 8
GROUPS_PER_BATCH = 512


def make_plan() -> RunPlan:
    table = TableConfig(group_size=GROUP, groups_per_batch=GROUPS_PER_BATCH, max_staleness=10_000)
    return RunPlan(
        seed=0,
        group_size=GROUP,
        policies={"actor": PolicyPlan(table=table, num_steps=10**6)},
        sources={"sums": 20_000},
        curators=(ShuffleConfig(),),
        eval=EvalPlan(sets={}, every=1, deadline_s=60.0),
        max_attempts=3,
    )


def make_facts(number: int) -> EpisodeFacts:
    meta = TrajectoryMeta(
        policy="actor",
        role="actor",
        reward=float(number % 2),
        num_tokens=4096,
        num_trained_tokens=3072,
        oldest_version=0,
        newest_version=0,
        finish_reason="stop",
        turn_spans=((1024, 4096),),
        turn_rewards=(float(number % 2),),
        num_trained_by_turn=(3072,),
        payload=PayloadRef(number // 7000, number * 36_000, 36_000),
    )
    return EpisodeFacts(trajectories=(meta,), score=1.0, metrics=(), duration_s=1.0)


class Filler:
    """Applies commands to a core and journals them."""

    def __init__(self, core: Core, journal: Journal) -> None:
        self.core = core
        self.journal = journal

    def apply(self, command: Command) -> object:
        decision = self.core.apply(command, 1.0)
        self.journal.append([command], [decision.events], at_s=1.0)
        return decision.answer

    def lease(self) -> tuple[LeaseView, ...]:
        served = (ServedVersions(policy="actor", versions=(0,)),)
        answer = self.apply(IssueLeases(worker_id="w", num_free=2 * GROUP, served=served))
        assert isinstance(answer, tuple)
        return answer

    def send(self, number: int, lease: LeaseView) -> None:
        self.apply(RecordResult(lease_id=lease.id, worker_id="w", outcome=make_facts(number)))

    def fill(self, num: int) -> None:
        """Puts half of the items into groups that lack one episode, and the others into complete groups."""
        for number in range(0, num, 2 * GROUP):
            for idx, lease in enumerate(self.lease()):
                if idx != GROUP:
                    self.send(number + idx, lease)


async def measure(folder: Path, num: int) -> dict[str, float]:
    """Fills, takes a snapshot, adds an interval of records, and restarts."""
    every = DataflowConfig().snapshot_every
    journal = Journal(folder, snapshot_every=10**9)
    filler = Filler(Core(make_plan()), journal)
    manifest = Manifest(
        policy="actor", version=0, kind="full", tensors=(), chunks=(), digest="0", num_bytes=0
    )
    filler.apply(AddWorker(worker_id="w", name="w", hosts=("actor",)))
    filler.apply(AttachTrainer(policy="actor", trainer_id="t", durable_step=0))
    filler.apply(PublishVersion(policy="actor", epoch=1, step=0, manifest=manifest))
    filler.fill(num - every)
    filler.apply(TakeBatch(policy="actor", epoch=1, step=0))
    start = time.thread_time()
    parts = filler.core.snapshot_parts()
    stop_s = time.thread_time() - start
    pieces = list[float]()
    while True:
        start = time.thread_time()
        if next(parts, None) is None:
            break
        pieces.append(time.thread_time() - start)
    journal.snapshot(filler.core)
    filler.fill(every * GROUP // (GROUP + 1))
    await journal.close()
    expected = filler.core.snapshot()
    del filler, journal
    gc.collect()
    start = time.perf_counter()
    again = Journal(folder)
    core = again.recover(
        new=lambda: Core(make_plan()), restore=lambda state: Core.from_snapshot(make_plan(), state)
    )
    restart_s = time.perf_counter() - start
    assert core.snapshot() == expected
    await again.close()
    return {
        "restart_s": restart_s,
        "snapshot_stop_ms": stop_s * 1e3,
        "snapshot_piece_ms": max(pieces) * 1e3,
        "snapshot_mb": len(expected) / 1e6,
    }


async def main(num: int) -> None:
    """Measures once in a temporary folder."""
    folder = Path(tempfile.mkdtemp())
    try:
        figures = await measure(folder, num)
    finally:
        shutil.rmtree(folder)
    targets = {"restart_s": "< 5"}
    rows = [(name, value, targets.get(name, "")) for name, value in figures.items()]
    show_table(f"restart with {num:,} live items", ("figure", "measured", "target"), rows)
    report({name: round(value, 3) for name, value in figures.items()}, at_most={"restart_s": 5})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=100_000)
    asyncio.run(main(parser.parse_args().items))
