"""Measures what a pool of thousands of rollout services costs one dataflow process.

Each emulated service has its own connection and holds eight leases. It sends heartbeats as often as the
dataflow told it when it joined. The phases are:

    join      all services join and get their leases
    beats     for a while, they only send heartbeats
    episodes  in addition, 300 episodes per second arrive, and each is replaced by a new lease
    restart   the dataflow is killed and restarts from its journal, and all services find it again
    silence   2,000 services fall silent at once, and are dropped

At the end, the journal is audited.

A probe asks for the run's state every 10 ms. The longest time to its answer is how long the event loop was
blocked, including waits for a processor. The clients run on the same cores as the service.

    python benchmarks/pool.py [--workers 10000] [--seconds 20]
"""

import argparse
import asyncio
import random
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop

from astraflow import wire
from astraflow.dataflow.audit import audit
from astraflow.dataflow.client import DataflowClient
from astraflow.service.client import ServiceClient
from astraflow.service.process import settle_memory
from astraflow.types import (
    Fingerprints,
    Heartbeat,
    LeaseRequest,
    Load,
    RegisterWorker,
    ServedVersions,
    SessionRequest,
    Trajectory,
)
from dataflow import training
from dataflow_peers import Server, Side, make_results, make_trajectory, open_side, publish
from harness import report, show_table
from lean_http import LeanTransport

NUM_SLOTS = 8
EPISODES_PER_S = 300.0
JOINERS = 64
"""Services that join at the same time."""
PROBE_S = 0.01
GROUPS_PER_BATCH = 64
MAX_STALENESS = 10_000
LEASE_TIMEOUT_S = 20.0
AT_MOST = {
    "heartbeat_cores": 0.5,
    "lease_p99_ms": 50.0,
    "rss_mb": 1000.0,
    "silence_blocked_ms": 1000.0,
    "reconnect_s": 60.0,
    "lost_leases": 0.0,
    "audit_problems": 0.0,
}


@dataclass
class EmulatedService:
    """One rollout service, with one connection for all of its requests."""

    calls: ServiceClient
    side: Side
    worker_id: str = ""
    heartbeat_s: float = 0.0
    leases: set[str] = field(default_factory=set[str])
    num_lost: int = 0
    """Leases that the dataflow has revoked."""
    beat_at_s: float = 0.0
    """When its last heartbeat was answered."""

    def __post_init__(self) -> None:
        self.client = DataflowClient(self.calls)

    async def join(self, name: str) -> None:
        request = RegisterWorker(
            name=name, hosts=("actor",), engine="none", num_slots=NUM_SLOTS, fingerprints=Fingerprints()
        )
        registration = await self.client.register(request)
        self.worker_id = registration.worker_id
        self.heartbeat_s = registration.heartbeat_s
        await self.lease(NUM_SLOTS)

    async def lease(self, num: int) -> None:
        """Asks for leases without waiting."""
        request = LeaseRequest(worker_id=self.worker_id, num_free=num, served=self._served(), wait_s=0.0)
        self.leases.update(item.id for item in (await self.client.leases(request)).leases)

    async def beat_forever(self) -> None:
        """Sends heartbeats, the first after a random part of the interval."""
        pause_s = random.random() * self.heartbeat_s
        while True:
            await asyncio.sleep(pause_s)
            await self.beat()
            pause_s = self.heartbeat_s

    async def beat(self) -> None:
        load = Load(num_slots=NUM_SLOTS, num_running=len(self.leases), versions=self._served())
        reply = await self.client.heartbeat(
            self.worker_id, Heartbeat(lease_ids=tuple(self.leases), load=load)
        )
        self.num_lost += len(reply.revoked)
        self.leases.difference_update(reply.revoked)
        self.beat_at_s = time.perf_counter()

    async def finish_one(self, trajectory: Trajectory) -> float:
        """Sends one episode and replaces it by a new lease. Returns the seconds until it has the lease."""
        await self.client.episodes(make_results(self.worker_id, [self.leases.pop()], trajectory))
        asked_s = time.perf_counter()
        await self.lease(1)
        return time.perf_counter() - asked_s

    def _served(self) -> tuple[ServedVersions, ...]:
        return (ServedVersions(policy="actor", versions=(self.side.version,)),)


class Pool:
    """All services, and the heartbeats of those that are not silent."""

    def __init__(self, side: Side, num: int) -> None:
        self.services = [EmulatedService(make_calls(side.server.url), side) for _ in range(num)]
        self._beats: dict[int, asyncio.Task[None]] = {}

    async def join(self) -> None:
        gate = asyncio.Semaphore(JOINERS)

        async def join(idx: int) -> None:
            async with gate:
                await self.services[idx].join(f"w{idx}")
            self._beats[idx] = asyncio.create_task(self.services[idx].beat_forever())

        await asyncio.gather(*(join(idx) for idx in range(len(self.services))))

    async def silence(self, num: int) -> None:
        """Stops the first services without a word."""
        for idx in range(num):
            await _end(self._beats.pop(idx))
        self.services = self.services[num:]

    async def until_heard(self, since_s: float) -> float:
        """Returns the seconds until every service has had an answer to a heartbeat."""
        while any(service.beat_at_s < since_s for service in self.services):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return max(service.beat_at_s for service in self.services) - since_s

    async def close(self) -> None:
        await asyncio.gather(*(_end(task) for task in self._beats.values()))
        for service in self.services:
            await service.calls.close()


def make_calls(url: str) -> ServiceClient:
    """Makes a client with one connection of its own."""
    return ServiceClient(url, transport=LeanTransport(url, num_connections=1))


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


class Probe:
    """Asks for the run's state again and again. Example: `async with Probe(url) as probe: ...`."""

    def __init__(self, url: str) -> None:
        self.longest_s = 0.0
        self._calls = make_calls(url)
        self._client = DataflowClient(self._calls)

    async def __aenter__(self) -> "Probe":
        self._task = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task.done():
            self._task.result()
        await _end(self._task)
        await self._calls.close()

    async def _ask(self) -> None:
        while True:
            began_s = time.perf_counter()
            await self._client.run()
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s)
            await asyncio.sleep(PROBE_S)


@asynccontextmanager
async def opened(server: Server) -> AsyncGenerator[Side]:
    """Opens a side with a trainer that has published version 0."""
    async with open_side(server, connections=JOINERS, is_bare=False) as side:
        request = SessionRequest(trainer_id="t", durable_step=0, fingerprints=Fingerprints())
        side.session = await side.client.attach("actor", request)
        await publish(side, 0)
        yield side


async def run_beats(side: Side, seconds: float) -> dict[str, float]:
    """Measures a time in which services only send heartbeats."""
    cpu_s = side.server.cpu_s()
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    return {"heartbeat_cores": (side.server.cpu_s() - cpu_s) / (time.perf_counter() - began_s)}


async def run_episodes(side: Side, pool: Pool, seconds: float) -> dict[str, float]:
    """Measures a time in which episodes arrive at a fixed rate, and a trainer trains on them."""
    trajectory = make_trajectory(1024, side.version)
    waits: list[float] = []
    began_s = time.perf_counter()
    cpu_s = side.server.cpu_s()
    choose = random.Random(0)

    async def finish() -> None:
        service = choose.choice(pool.services)
        if service.leases:
            waits.append(await service.finish_one(trajectory))

    async with training(side), asyncio.TaskGroup() as tasks:
        for idx in range(int(seconds * EPISODES_PER_S)):
            await asyncio.sleep(max(0.0, began_s + idx / EPISODES_PER_S - time.perf_counter()))
            tasks.create_task(finish())
    wall_s = time.perf_counter() - began_s
    return {
        "episodes_per_s": len(waits) / wall_s,
        "lease_p50_ms": statistics.median(waits) * 1e3,
        "lease_p99_ms": statistics.quantiles(waits, n=100)[98] * 1e3,
        "all_cores": (side.server.cpu_s() - cpu_s) / wall_s,
    }


async def run_silence(side: Side, pool: Pool, num: int) -> dict[str, float]:
    """Measures how long the event loop is blocked while services that fell silent at once are dropped."""
    num_left = len(pool.services) - num
    await pool.silence(num)
    began_s = time.perf_counter()
    async with Probe(side.server.url) as probe:
        while await _num_known(side) > num_left:  # noqa: ASYNC110
            await asyncio.sleep(5.0)
    return {"silence_s": time.perf_counter() - began_s, "silence_blocked_ms": probe.longest_s * 1e3}


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Runs all phases."""
    argv = ("service", str(folder), str(GROUPS_PER_BATCH), str(MAX_STALENESS), str(LEASE_TIMEOUT_S))
    argv = (*argv, str(_free_port()))
    server = Server(*argv)
    figures: dict[str, float] = {}
    try:
        async with opened(server) as side:
            pool = Pool(side, args.workers)
            began_s = time.perf_counter()
            await pool.join()
            figures["join_s"] = time.perf_counter() - began_s
            # The garbage of 10,000 clients in one process would be collected in pauses that no real one has.
            settle_memory()
            print(f"joined in {figures['join_s']:.0f} s", flush=True)
            await asyncio.sleep(max(service.heartbeat_s for service in pool.services))
            figures["heartbeat_s"] = max(service.heartbeat_s for service in pool.services)
            figures |= await run_beats(side, args.seconds)
            figures |= await run_episodes(side, pool, args.seconds)
            figures["rss_mb"] = server.rss_mb()
            held = sum(len(service.leases) for service in pool.services)
            server.kill()
            began_s = time.perf_counter()
            side.server = server = Server(*argv)
            figures["restart_s"] = time.perf_counter() - began_s
            figures["reconnect_s"] = await pool.until_heard(began_s)
            figures["lost_leases"] = sum(service.num_lost for service in pool.services)
            figures["held_leases"] = held
            figures |= await run_silence(side, pool, args.workers // 5)
            await pool.close()
    finally:
        server.close()
    figures["audit_problems"] = len(audit(folder).problems)
    return figures


class _Workers(msgspec.Struct):
    """The part of the status that is counted. Decoding all of it would block the probe."""

    workers: list[msgspec.Raw]


async def _num_known(side: Side) -> int:
    reply = await side.transport.request(
        "GET", "/v1/status", headers={"Accept": wire.MSGPACK}, body=b"", timeout_s=60.0
    )
    return len(msgspec.msgpack.decode(reply.body, type=_Workers).workers)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def main(args: argparse.Namespace) -> None:
    """Measures, and prints a table."""
    with tempfile.TemporaryDirectory() as folder:
        figures = await measure(args, Path(folder))
    show_table(f"{args.workers} rollout services", ("figure", "value"), [*figures.items()])
    report({name: round(value, 4) for name, value in figures.items()}, at_most=AT_MOST)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the two phases in between")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parser.parse_args()))
