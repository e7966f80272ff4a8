"""Measures the speed of the dataflow service: real processes, durable journal, HTTP on loopback, clients on
its cores.

Trajectories have 4,096 tokens, sent as bytes. Those of `tiny` have 25, as in the quickstart. Each figure is
compared with that of a bare HTTP server of the same stack (`dataflow_server.py`), which handles the same
bodies in the same run. CPU time is that of the server's process, per trajectory or cycle.

    python benchmarks/dataflow.py [--only ingest,grouped,tiny,cycles,batch] [--quick]
"""

import argparse
import asyncio
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import uvloop

from astraflow.types import Trajectory
from dataflow_peers import (
    GROUPS_PER_BATCH,
    Setting,
    Side,
    can,
    fetch,
    finish_step,
    join,
    lease,
    make_results,
    make_trajectory,
    open_sides,
    padded,
)
from harness import Runs, report, show_table

LONG = 4096
TINY = 25
GROUP = 8
BATCH = GROUP * GROUPS_PER_BATCH
CONNECTIONS = 32
NUM_WORKERS = 500


# --- what is measured -----------------------------------------------------------------------------

Figures = dict[str, float]
Found = tuple[dict[str, Runs], dict[str, Runs]]
"""The figures of the dataflow and of the bare server in all rounds."""


async def send_all(side: Side, chunks: Iterator[Sequence[str]], trajectory: Trajectory) -> None:
    async def send() -> None:
        for chunk in chunks:
            receipts = await side.client.episodes(make_results(side.worker_id, chunk, trajectory))
            assert all(receipt.status == "accepted" for receipt in receipts.receipts), receipts

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(send())


async def ingest(side: Side, *, num: int, per_request: int) -> Figures:
    """Measures trajectories per second over 32 connections. Their leases are handed out before."""
    trajectory = make_trajectory(LONG)
    ids = [f"{i // GROUP}.{i % GROUP}.0" for i in range(num)] if side.is_bare else await lease(side, num)
    chunks = iter([ids[i : i + per_request] for i in range(0, num, per_request)])
    cpu_s = side.server.cpu_s()
    start = time.perf_counter()
    await send_all(side, chunks, trajectory)
    wall_s = time.perf_counter() - start
    return {"per_s": num / wall_s, "cpu_us": (side.server.cpu_s() - cpu_s) / num * 1e6}


@asynccontextmanager
async def training(side: Side) -> AsyncGenerator[None]:
    """Runs a trainer in the background that takes, publishes, commits, and releases."""

    async def train() -> None:
        for step in itertools.count():
            await fetch(side, step)
            await finish_step(side, step)

    task = asyncio.create_task(train())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def tiny(side: Side, *, num: int, per_request: int) -> Figures:
    """Measures whole cycles of the quickstart's size: lease, then send."""
    num_left = num
    num_done = 0
    trajectory = make_trajectory(TINY, side.version)

    async def work() -> None:
        nonlocal num_left, num_done, trajectory
        while num_left > 0:
            ids = await lease(side, per_request)
            num_left -= len(ids)
            if trajectory.versions[0].version != side.version:
                trajectory = make_trajectory(TINY, side.version)
            await side.client.episodes(make_results(side.worker_id, ids, trajectory))
            num_done += len(ids)

    cpu_s = side.server.cpu_s()
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(work())
    wall_s = time.perf_counter() - start
    return {"per_s": num_done / wall_s, "cpu_us": (side.server.cpu_s() - cpu_s) / num_done * 1e6}


async def cycles(side: Side, *, workers: Sequence[str], seconds: float, offered: float) -> Figures:
    """Measures cycles in which each worker in turn leases one episode and sends it. Cycles begin at the
    offered rate."""
    trajectory = make_trajectory(LONG)
    waits = list[float]()
    num_done = 0
    cpu_s = side.server.cpu_s()
    start = time.perf_counter()

    async def work(idx: int) -> None:
        nonlocal num_done
        for turn in itertools.count():
            begin = start + (idx + turn * len(workers)) / offered
            if begin > start + seconds:
                return
            await asyncio.sleep(max(0.0, begin - time.perf_counter()))
            asked = time.perf_counter()
            ids = await lease(side, 1, workers[idx])
            waits.append(time.perf_counter() - asked)
            await side.client.episodes(make_results(workers[idx], ids, trajectory))
            num_done += 1

    async with asyncio.TaskGroup() as tasks:
        for idx in range(len(workers)):
            tasks.create_task(work(idx))
    wall_s = time.perf_counter() - start
    return {
        "per_s": num_done / wall_s,
        "p99_ms": statistics.quantiles(waits, n=100)[98] * 1e3,
        "cpu_us": (side.server.cpu_s() - cpu_s) / num_done * 1e6,
    }


async def batch_ready(side: Side, *, step: int) -> Figures:
    """Measures the time from sending the episode that fills a batch to padded arrays in the waiting
    trainer."""
    trajectory = make_trajectory(LONG)
    ids = [f"0.{i}.0" for i in range(BATCH)] if side.is_bare else await lease(side, BATCH)
    waiting = asyncio.create_task(fetch(side, step))
    for first in range(0, BATCH - GROUP, GROUP):
        await side.client.episodes(make_results(side.worker_id, ids[first : first + GROUP], trajectory))
    await side.client.episodes(make_results(side.worker_id, ids[BATCH - GROUP : -1], trajectory))
    if side.is_bare:
        await waiting
    gc.collect()
    start = time.perf_counter()
    last = asyncio.create_task(side.client.episodes(make_results(side.worker_id, ids[-1:], trajectory)))
    arrays = padded(await fetch(side, step) if side.is_bare else await waiting)
    wall_s = time.perf_counter() - start
    del waiting  # this still holds the first batch; on both sides, the next batch reuses its memory
    await last
    num_bytes = sum(array.nbytes for array in arrays)
    fetched = time.perf_counter()
    padded(await fetch(side, step))
    again_s = time.perf_counter() - fetched
    await finish_step(side, step)
    return {"ms": wall_s * 1e3, "mb_s": num_bytes / again_s / 1e6}


# --- scenarios ------------------------------------------------------------------------------------


async def compare(
    rounds: int, ours: Side, theirs: Side, measure: Callable[[Side], Awaitable[Figures]]
) -> Found:
    """Measures both servers. Rounds alternate, so that other load on the machine affects both equally."""
    found: tuple[list[Figures], list[Figures]] = [], []
    for _ in range(rounds):
        found[0].append(await measure(ours))
        await can(ours, theirs)
        found[1].append(await measure(theirs))
    ours_found, theirs_found = (
        {name: Runs(tuple(figures[name] for figures in side)) for name in side[0]} for side in found
    )
    return ours_found, theirs_found


async def run_ingest(setting: Setting, per_request: int) -> Found:
    async with open_sides(setting, connections=CONNECTIONS, groups_per_batch=GROUPS_PER_BATCH) as sides:
        num = setting.scaled(4096)
        return await compare(
            setting.rounds, *sides, lambda side: ingest(side, num=num, per_request=per_request)
        )


async def run_tiny(setting: Setting) -> Found:
    num = setting.scaled(16_384)
    async with (
        open_sides(setting, connections=4, groups_per_batch=64, staleness=2) as sides,
        training(sides[0]),
    ):
        return await compare(setting.rounds, *sides, lambda side: tiny(side, num=num, per_request=16))


async def run_cycles(setting: Setting) -> Found:
    async with open_sides(setting, connections=NUM_WORKERS) as sides:
        workers = [await join(sides[0], f"w{idx}") for idx in range(NUM_WORKERS)]
        seconds = 2.0 if setting.is_quick else 5.0
        return await compare(
            setting.rounds,
            *sides,
            lambda side: cycles(side, workers=workers, seconds=seconds, offered=setting.offered_per_s),
        )


async def run_batch(setting: Setting) -> Found:
    async with open_sides(setting, connections=CONNECTIONS) as sides:
        steps = itertools.count()
        return await compare(
            2 * setting.rounds + 1,
            *sides,
            lambda side: batch_ready(side, step=0 if side.is_bare else next(steps)),
        )


SCENARIOS: dict[str, Callable[[Setting], Awaitable[Found]]] = {
    "ingest": lambda setting: run_ingest(setting, 1),
    "grouped": lambda setting: run_ingest(setting, 8),
    "tiny": run_tiny,
    "cycles": run_cycles,
    "batch": run_batch,
}

REPORTED: dict[str, tuple[str, str, str]] = {
    "ingest_per_s": ("ingest", "per_s", ">= 2500"),
    "ingest_cpu_us": ("ingest", "cpu_us", ""),
    "ingest_grouped_per_s": ("grouped", "per_s", ">= 5000"),
    "ingest_grouped_cpu_us": ("grouped", "cpu_us", ""),
    "tiny_per_s": ("tiny", "per_s", ""),
    "tiny_cpu_us": ("tiny", "cpu_us", ""),
    "cycles_per_s": ("cycles", "per_s", ">= 1200"),
    "lease_p99_ms": ("cycles", "p99_ms", "<= 20"),
    "cycles_cpu_us": ("cycles", "cpu_us", ""),
    "batch_ms": ("batch", "ms", "<= 30"),
    "batch_mb_s": ("batch", "mb_s", ">= 400"),
}
"""Name of the figure -> scenario, its figure, and target."""

MOST_OVER_BARE = {"ingest": 2.8, "ingest_grouped": 3.5, "cycles": 2.0}
"""Targets for `NAME_over_bare`, the CPU time divided by that of the bare server, on any machine."""


async def main(setting: Setting, only: Sequence[str]) -> None:
    """Runs the scenarios, and prints the table and the figures."""
    found = {name: await SCENARIOS[name](setting) for name in only}
    rows: list[tuple[object, ...]] = []
    figures: dict[str, object] = {"cores": os.cpu_count(), "is_quick": setting.is_quick}
    bounds: dict[str, dict[str, float]] = {">=": {}, "<=": {}}
    for name, (scenario, figure, target) in REPORTED.items():
        if scenario not in found:
            continue
        ours, bare = found[scenario]
        figures[name] = ours[figure]
        if figure in bare:
            figures[f"bare_{name}"] = bare[figure]
        if target:
            side, _, bound = target.partition(" ")
            bounds[side][name] = float(bound)
        rows.append((name, ours[figure], bare.get(figure, ""), target))
    for name, most in MOST_OVER_BARE.items():
        if f"bare_{name}_cpu_us" not in figures:
            continue
        ours, bare = (cast("Runs", figures[f"{prefix}{name}_cpu_us"]) for prefix in ("", "bare_"))
        ratio = figures[f"{name}_over_bare"] = ours.median / bare.median
        bounds["<="][f"{name}_over_bare"] = most
        rows.append((f"{name}_over_bare", ratio, "", f"<= {most}"))
    show_table(
        "dataflow service, durable, over HTTP on loopback", ("figure", "dataflow", "bare", "target"), rows
    )
    report(figures, at_least=bounds[">="], at_most=bounds["<="])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, comma separated")
    parser.add_argument("--quick", action="store_true", help="an eighth of the work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--offered", type=float, default=1250.0, help="cycles that begin in a second")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    args = parser.parse_args()
    chosen = Setting(args.folder, args.quick, args.rounds, args.offered)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(chosen, args.only.split(",")))
