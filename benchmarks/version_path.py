"""Measures the way of a version from the trainer's host memory to the folder that a server reads, in GB/s.

    before    in full: one file is handed over and copied into chunks; one thread checks, hashes, and writes
    full      in full: the chunks that the trainer wrote become the publisher's; several threads do the rest
    delta     the same for a version that differs from the previous one in 2 % of its elements

A run of a full-size recipe publishes deltas, and each 16th version in full as well: `times_faster` compares
the mean of these 16 with `before`. The weights are bfloat16 and as many as those of an 8B model, one part
after the other if memory is short. The publisher is a separate process with a folder on disk; the server's
folder is in `/dev/shm`. A rank's export and the server's loading aren't included.

    python benchmarks/version_path.py [--gigabytes 16.4] [--folder /tmp]
"""

import argparse
import asyncio
import itertools
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash

from astraflow.addons.inference_servers.weights_folder import WeightsFolder
from astraflow.service.client import ServiceClient
from astraflow.service.process import run_service
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.config import WeightsConfig
from astraflow.weights.publisher import run_publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from harness import report, show_table
from weights import TENSOR_ELEMENTS, Words, make_words, stepped, tensors_from

Seconds = dict[str, defaultdict[str, float]]
"""Seconds of each stage, by kind."""

KINDS = ("before", "full", "delta")
STAGES = ("write", "hand_over", "fetch", "check_and_hash", "write_folder", "all")
VERSIONS = itertools.count()
CONFIG = WeightsConfig()
COPIES = 12
"""Number of copies of a part that fit in free memory: those of trainer and receiver, files, and folders."""


@contextmanager
def timed(seconds: defaultdict[str, float], stage: str) -> Generator[None]:
    start_s = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - start_s


class TimedClient(ServiceClient):
    """A client of the publisher, whose seconds count in `seconds`."""

    seconds: defaultdict[str, float]

    async def call(self, *args: Any, **fields: Any) -> Any:
        with timed(self.seconds, "hand_over"):
            return await super().call(*args, **fields)


async def send(
    words: Words, folder: Path, service: TimedClient, receiver: Receiver, seconds: Seconds
) -> None:
    """Sends versions in all three ways. They differ in all chunks, because equal ones are stored once."""
    before = PublisherClient(service, folder / "incoming")
    now = PublisherClient(service, folder / "incoming", delta=True, chunk_bytes=CONFIG.chunk_bytes)
    for kind in KINDS:
        words = stepped(words, 0.02, np.random.default_rng(0))[0] if kind == "delta" else words + np.uint16(1)
        tensors = tensors_from(words)
        spent = service.seconds = seconds[kind]
        version = next(VERSIONS)
        with timed(spent, "publish"):
            client = before if kind == "before" else now
            manifest = await client.publish("actor", version, tensors, {})
        assert manifest.kind == ("delta" if kind == "delta" else "full")
        with timed(spent, "fetch"):
            snapshot = await receiver.fetch(manifest)
        assert all(np.array_equal(a.data, b.data) for a, b in zip(snapshot.tensors, tensors, strict=True))
        (write_as_before if kind == "before" else write_folder)(snapshot, spent)
        del snapshot
        service.seconds = defaultdict(float)
        await client.forget("actor", [version])


def write_as_before(snapshot: WeightSnapshot, seconds: defaultdict[str, float]) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file, timed(seconds, "folder"):
        digest = xxhash.xxh3_128()
        with timed(seconds, "check_and_hash"):
            for tensor in snapshot.tensors:
                exponents = np.frombuffer(tensor.data, "<u2") & np.uint16(0x7F80)
                assert not np.count_nonzero(exponents == np.uint16(0x7F80))
                digest.update(tensor.data.data)
        for tensor in snapshot.tensors:
            file.write(tensor.data.data)


def write_folder(snapshot: WeightSnapshot, seconds: defaultdict[str, float]) -> None:
    first, second = (WeightsFolder("path", snapshot, parent="/dev/shm") for _ in range(2))
    with timed(seconds, "folder"):
        first.write(snapshot)
    with timed(seconds, "check_and_hash"):
        second.write(snapshot)  # links to the files of the first one
    first.remove()
    second.remove()


@contextmanager
def publisher(folder: Path) -> Generator[str]:
    """Runs a publisher in its own process, as in a run, and yields its URL."""
    argv = [sys.executable, __file__, "--serve", str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


async def serve(stop: asyncio.Event, folder: Path) -> None:
    config = WeightsConfig(delta=True, keep=1, full_every=2)
    await run_publisher(folder, config, stop, on_ready=lambda url: print(url, flush=True))


async def measure(_: asyncio.Event, gigabytes: float, scratch: str) -> None:
    num_parts = math.ceil(gigabytes * 1e9 * COPIES / psutil.virtual_memory().available)
    megabytes = round(1000 * gigabytes / num_parts)
    words = make_words(megabytes, np.random.default_rng(0)).reshape(-1, TENSOR_ELEMENTS)
    words = (words + np.arange(len(words), dtype=np.uint16)[:, None]).reshape(-1)
    seconds: Seconds = {kind: defaultdict(float) for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=scratch) as run, publisher(Path(run)) as url:
        service = TimedClient(url)
        receiver = Receiver(Path(run) / "cache")
        for number in range(num_parts + 1):
            await send(words, Path(run), service, receiver, seconds)
            for spent in seconds.values() if not number else ():
                spent.clear()  # the first part loads code, and touches memory that is used again
        await receiver.close()
        await service.close()
    show(seconds, num_parts * words.nbytes / 1e9)


def show(seconds: Seconds, size: float) -> None:
    """Shows the rates for versions of so many gigabytes."""
    for spent in seconds.values():
        spent["all"] = spent["publish"] + spent["fetch"] + spent["folder"]
        spent["write"] = spent["publish"] - spent["hand_over"]
        spent["write_folder"] = spent["folder"] - spent["check_and_hash"]
    figures = {f"{kind}_{stage}_gb_s": size / seconds[kind][stage] for stage in STAGES for kind in KINDS}
    rows = [[stage, *(figures[f"{kind}_{stage}_gb_s"] for kind in KINDS)] for stage in STAGES]
    show_table(f"{size:.1f} GB of bfloat16, GB/s", ["", *KINDS], rows)
    before_s, full_s, delta_s = (seconds[kind]["all"] for kind in KINDS)
    figures |= {"gigabytes": size, "before_s": before_s, "full_s": full_s, "delta_s": delta_s}
    figures["times_faster_full"] = before_s / full_s
    figures["times_faster"] = before_s / (delta_s + seconds["full"]["publish"] / CONFIG.full_every)
    report(figures, at_least={"times_faster": 4})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=16.4)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk of the run folder")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return run_service(lambda stop: serve(stop, args.serve), name="publisher")
    return run_service(lambda stop: measure(stop, args.gigabytes, args.folder), name="benchmark")


if __name__ == "__main__":
    sys.exit(main())
