"""The instruments of `dataflow.py`: server processes, their clients, and the messages of rollout services and
trainers."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow import wire
from astraflow.dataflow.client import DataflowClient
from astraflow.service.client import HttpReply, ServiceClient, Transport
from astraflow.service.process import settle_memory
from astraflow.types import (
    Batch,
    Commit,
    Episode,
    EpisodeResult,
    EpisodeResults,
    Fingerprints,
    LeaseRequest,
    Manifest,
    Message,
    MetricItem,
    Publication,
    RegisterWorker,
    Release,
    ServedVersions,
    Session,
    SessionRequest,
    TensorInfo,
    Trajectory,
    Turn,
    VersionSpan,
)
from lean_http import LeanTransport

SERVER = Path(__file__).with_name("dataflow_server.py")
GROUPS_PER_BATCH = 32

# --- servers --------------------------------------------------------------------------------------


class Server:
    """A server's process. `cpu_s` covers only this process."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, str(SERVER), *argv]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def cpu_s(self) -> float:
        """Returns the user and system time of its threads so far."""
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def close(self) -> None:
        """Lets the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


class Recording:
    """A transport that keeps the last response for each path, which the bare server then returns."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.answers: dict[str, bytes] = {}

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> HttpReply:
        """Sends one request."""
        reply = await self._transport.request(method, target, headers=headers, body=body, timeout_s=timeout_s)
        if reply.status == 200:
            self.answers[target.partition("?")[0]] = reply.body
        return reply

    async def close(self) -> None:
        """Closes the connections."""
        await self._transport.close()


@dataclass
class Side:
    """One server and its client."""

    server: Server
    client: DataflowClient
    transport: Recording
    is_bare: bool = False
    worker_id: str = "w.0"
    session: Session = field(
        default_factory=lambda: Session(epoch=1, step=0, next_version=0, num_steps=10**9)
    )
    version: int = 0


@dataclass(frozen=True)
class Setting:
    """Options of the command line."""

    folder: Path
    is_quick: bool
    rounds: int
    offered_per_s: float

    def scaled(self, num: int) -> int:
        """Returns a smaller number for `--quick`."""
        return num // 8 if self.is_quick else num


@asynccontextmanager
async def open_side(server: Server, *, connections: int, is_bare: bool) -> AsyncGenerator[Side]:
    """Opens a client with its own connections."""
    transport = Recording(LeanTransport(server.url, num_connections=connections))
    calls = ServiceClient(server.url, transport=transport)
    try:
        yield Side(server, DataflowClient(calls), transport, is_bare)
    finally:
        await calls.close()


@asynccontextmanager
async def open_sides(
    setting: Setting, *, connections: int, groups_per_batch: int = GROUPS_PER_BATCH, staleness: int = 100_000
) -> AsyncGenerator[tuple[Side, Side]]:
    """Opens a fresh service with a trainer and a rollout service, and a bare server."""
    folder = Path(tempfile.mkdtemp(dir=setting.folder))
    argv = ("service", str(folder / "journal"), str(groups_per_batch), str(staleness))
    service = Server(*argv)
    bare = Server("bare")
    try:
        async with (
            open_side(service, connections=connections, is_bare=False) as ours,
            open_side(bare, connections=connections, is_bare=True) as theirs,
        ):
            ours.session = await ours.client.attach(
                "actor", SessionRequest(trainer_id="t", durable_step=0, fingerprints=Fingerprints())
            )
            await publish(ours, 0)
            ours.worker_id = await join(ours, "w")
            settle_memory()  # as the processes of rollout services and trainers do
            yield ours, theirs
    finally:
        service.close()
        bare.close()
        shutil.rmtree(folder)


async def can(ours: Side, theirs: Side) -> None:
    """Makes the bare server return the last responses of the service from now on.

    Clears the recordings. A client that kept ten batches would work in cold memory, and only on one side.
    """
    while ours.transport.answers:
        path, body = ours.transport.answers.popitem()
        await theirs.transport.request("POST", f"/canned?path={path}", headers={}, body=body, timeout_s=10.0)


# --- what clients say -----------------------------------------------------------------------------


def make_trajectory(num_tokens: int, version: int = 0) -> Trajectory:
    """Makes a trajectory: a quarter is prompt, the rest is sampled."""
    rng = np.random.default_rng(0)
    mask = np.arange(num_tokens) >= num_tokens // 4
    num_sampled = int(mask.sum())
    return Trajectory(
        policy="actor",
        role="actor",
        token_ids=wire.column(rng.integers(0, 1000, num_tokens), "int32"),
        mask=wire.column(mask, "uint8"),
        behavior_logprobs=wire.column(np.where(mask, -rng.random(num_tokens), 0.0), "float32"),
        versions=(VersionSpan(num_tokens - num_sampled, num_sampled, version),),
        temperature=1.0,
        finish_reason="stop",
        turns=(Turn(start=num_tokens - num_sampled, end=num_tokens, reward=1.0),),
        reward=1.0,
    )


def make_results(worker_id: str, lease_ids: Sequence[str], trajectory: Trajectory) -> EpisodeResults:
    """Makes one episode per lease."""
    messages = (
        Message(role="user", content="Calculate 378 + 937."),
        Message(role="assistant", content="1315"),
    )
    episode = Episode(
        trajectories=(trajectory,),
        score=1.0,
        metrics=(MetricItem("length", 18.0), MetricItem("truncated", 0.0)),
        messages=messages,
        duration_s=0.1,
    )
    results = tuple(EpisodeResult(lease_id=lease_id, outcome=episode) for lease_id in lease_ids)
    return EpisodeResults(worker_id=worker_id, results=results)


async def join(side: Side, name: str) -> str:
    request = RegisterWorker(
        name=name, hosts=("actor",), engine="none", num_slots=8, fingerprints=Fingerprints()
    )
    return (await side.client.register(request)).worker_id


async def lease(side: Side, num: int, worker_id: str = "") -> list[str]:
    """Returns ids of leases. The bare server always returns the same ones."""
    served = (ServedVersions(policy="actor", versions=(side.version,)),)
    request = LeaseRequest(worker_id=worker_id or side.worker_id, num_free=num, served=served, wait_s=0.0)
    return [item.id for item in (await side.client.leases(request)).leases]


async def publish(side: Side, step: int) -> None:
    table = TensorInfo(
        name="embed_tokens.weight", shape=(1000, 8), dtype="float32", offset=0, num_bytes=32_000
    )
    manifest = Manifest(
        policy="actor", version=step, kind="full", tensors=(table,), chunks=(), digest="0", num_bytes=0
    )
    publication = Publication(epoch=side.session.epoch, step=step, manifest=manifest)
    await side.client.publish("actor", publication)
    side.version = step


async def finish_step(side: Side, step: int) -> None:
    """Publishes, commits, and releases a step, as a trainer does after it has taken the batch."""
    if side.is_bare:
        return
    await publish(side, step + 1)
    await side.client.commit("actor", Commit(epoch=side.session.epoch, step=step, version=step + 1))
    await side.client.release("actor", Release(epoch=side.session.epoch, step=step + 1, version=step + 1))


async def fetch(side: Side, step: int) -> Batch:
    batch = await side.client.batch("actor", step, epoch=side.session.epoch)
    assert batch is not None
    return batch


def padded(batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float32]]:
    """Returns ids, mask and logprobs [B, T] of a batch."""
    items = [sample.trajectory for sample in batch.samples]
    shape = (len(items), max(len(item.mask) for item in items))
    arrays = np.zeros(shape, np.int32), np.zeros(shape, np.uint8), np.zeros(shape, np.float32)
    for idx, item in enumerate(items):
        num_tokens = len(item.mask)
        arrays[0][idx, :num_tokens] = wire.array(item.token_ids, "int32")
        arrays[1][idx, :num_tokens] = wire.array(item.mask, "uint8")
        arrays[2][idx, :num_tokens] = wire.array(item.behavior_logprobs, "float32")
    return arrays
