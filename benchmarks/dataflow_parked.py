"""Measures what thousands of rollout services that wait at one dataflow cost, and how fast they get leases.

All services join over HTTP, each with its own connection, and ask for leases. There is room for 64 episodes,
so nearly all services wait in a long poll. Each sends heartbeats in the meantime. Then, in each round, the 64
episodes arrive, and the trainer takes the batch, publishes a version, which all services announce as loaded,
and commits its step. 64 of the waiting services get the new leases, and all others keep waiting. Every round
wakes all waiting services, so its duration shows the cost of a crowd. The baseline is the same with 100
services. The clients run on the same cores as the service.

    python benchmarks/dataflow_parked.py [--workers 2000]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from astraflow.types import Commit, Heartbeat, Load, ServedVersions
from dataflow_peers import (
    Setting,
    Side,
    fetch,
    join,
    lease,
    make_results,
    make_trajectory,
    open_sides,
    publish,
)
from harness import report, show_table

GROUPS = 8
GROUP = 8
BATCH = GROUPS * GROUP
BEAT_S = 10.0
BASELINE = 100
JOINERS = 64
"""Services that join at the same time."""


@dataclass
class Crowd:
    """Services that ask for leases forever."""

    side: Side
    workers: Sequence[str]
    leased: "asyncio.Queue[tuple[str, str, float]]" = field(default_factory=asyncio.Queue)
    """(service, lease, time)."""
    beats_s: list[float] = field(default_factory=list)

    async def ask(self, worker: str) -> None:
        """Runs one service's lease loop."""
        while True:
            for lease_id in await lease(self.side, 1, worker):
                self.leased.put_nowait((worker, lease_id, time.perf_counter()))

    async def beat(self, worker: str, offset_s: float) -> None:
        """Sends one service's heartbeats. They don't name leases, because the lease timeout is longer than
        the benchmark."""
        await asyncio.sleep(offset_s)
        while True:
            began_s = time.perf_counter()
            await self._beat(worker)
            self.beats_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(BEAT_S)

    async def announce(self) -> float:
        """Announces for all services that they have loaded the newest version. Returns the time until all
        have a response."""
        began_s = time.perf_counter()
        await asyncio.gather(*(self._beat(worker) for worker in self.workers))
        return time.perf_counter() - began_s

    async def _beat(self, worker: str) -> None:
        served = (ServedVersions(policy="actor", versions=(self.side.version,)),)
        load = Load(num_slots=1, versions=served)
        await self.side.client.heartbeat(worker, Heartbeat(lease_ids=(), load=load))


async def measure(folder: Path, *, num_workers: int, rounds: int) -> dict[str, float]:
    """Measures one dataflow with this number of workers."""
    setting = Setting(folder, is_quick=False, rounds=1, offered_per_s=0.0)
    sides = open_sides(setting, connections=2 * num_workers + 16, groups_per_batch=GROUPS, staleness=1)
    async with sides as (side, _):
        before_mb = side.server.rss_mb()
        gate = asyncio.Semaphore(JOINERS)

        async def joined(idx: int) -> str:
            async with gate:
                return await join(side, f"w{idx}")

        began_s = time.perf_counter()
        workers = await asyncio.gather(*(joined(idx) for idx in range(num_workers)))
        join_s = time.perf_counter() - began_s
        crowd = Crowd(side, workers)
        tasks = [asyncio.create_task(crowd.ask(worker)) for worker in workers]
        tasks += [
            asyncio.create_task(crowd.beat(worker, BEAT_S * idx / num_workers))
            for idx, worker in enumerate(workers)
        ]
        try:
            waits_s, loads_s, cpu_s = await run_rounds(crowd, rounds)
            parked_mb = side.server.rss_mb()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "join_s": join_s,
        "rss_kb_per_worker": (parked_mb - before_mb) * 1e3 / num_workers,
        "rss_mb": parked_mb,
        "lease_p50_ms": statistics.median(waits_s) * 1e3,
        "lease_p99_ms": statistics.quantiles(waits_s, n=100)[98] * 1e3,
        "beat_p50_ms": statistics.median(crowd.beats_s) * 1e3,
        "beat_p99_ms": statistics.quantiles(crowd.beats_s, n=100)[98] * 1e3,
        "announce_ms": statistics.median(loads_s) * 1e3,
        "round_cpu_ms": cpu_s / rounds * 1e3,
    }


async def run_rounds(crowd: Crowd, rounds: int) -> tuple[list[float], list[float], float]:
    """Runs rounds of 64 leases.

    Returns the times from the commit to each lease, the times until all services have announced a version,
    and the total CPU time of the dataflow.
    """
    side = crowd.side
    waits_s = list[float]()
    loads_s = list[float]()
    cpu_s = 0.0
    committed_s = time.perf_counter()
    for step in range(rounds + 1):
        got = [await crowd.leased.get() for _ in range(BATCH)]
        if step:
            waits_s += [at_s - committed_s for _, _, at_s in got]
        await asyncio.sleep(1.0)
        begin_cpu_s = side.server.cpu_s()
        trajectory = make_trajectory(1024, side.version)
        for worker, lease_id, _ in got:
            await side.client.episodes(make_results(worker, [lease_id], trajectory))
        await fetch(side, step)
        await publish(side, step + 1)
        loads_s.append(await crowd.announce())
        committed_s = time.perf_counter()
        await side.client.commit("actor", Commit(epoch=side.session.epoch, step=step, version=step + 1))
        cpu_s += side.server.cpu_s() - begin_cpu_s
    return waits_s, loads_s, cpu_s


async def main(args: argparse.Namespace) -> None:
    """Measures both crowds, one after the other."""
    found: dict[int, dict[str, float]] = {}
    for num_workers in (BASELINE, args.workers):
        found[num_workers] = await measure(args.folder, num_workers=num_workers, rounds=args.rounds)
    few = found[BASELINE]
    many = found[args.workers]
    rows = [(name, few[name], many[name]) for name in many]
    show_table("waiting rollout services", ("figure", f"{BASELINE}", f"{args.workers}"), rows)
    figures = {f"parked_{name}": round(value, 3) for name, value in many.items()}
    report(
        figures | {f"base_{name}": round(value, 3) for name, value in few.items()} | {"workers": args.workers}
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parser.parse_args()))
