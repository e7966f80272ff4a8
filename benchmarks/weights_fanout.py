"""Measures how long N receivers take to get a version when the publisher's upload is limited.

There are three cases: without peers, with peers, and with peers whose upload is equally limited.

The publisher is a separate process that sends at most `--upload` MB/s to all receivers together. The
receivers share one process, each with its own sockets, files, and memory. Every version is verified. The cap
is low, so the link takes the time and not the machine's cores. tests/unit/weights/test_fanout.py does the
same in virtual time.

    python benchmarks/weights_fanout.py [--megabytes 16] [--upload 2] [--plot docs/images/fanout.png]
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from astraflow.service.client import ServiceClient
from astraflow.service.process import run_service
from astraflow.types import Manifest, PublisherHealth, SourceLink
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.config import WeightsConfig
from astraflow.weights.peers.peer import Spool, serve_spool
from astraflow.weights.publisher import run_publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from harness import report, show_table
from plots import use_style

__all__ = ["measure_fanout"]

NUM_RECEIVERS = (1, 2, 4, 8)
CHUNK_BYTES = 333_334
"""Gives 48 chunks, which is what a version of 800 MB has by default."""
MODES = {"publisher alone": "alone", "with peers": "peers", "all uploads capped": "capped"}


@dataclass(frozen=True)
class Spread:
    """The distribution of one version to all receivers."""

    seconds: float
    copies: float
    """Bytes sent by the publisher, in multiples of a version."""


def make_tensors(megabytes: int) -> list[HostTensor]:
    data = np.random.default_rng(0).integers(0, 256, megabytes * 1_000_000, np.uint8)
    return [HostTensor("w", (data.size // 2,), "bfloat16", data)]


@contextlib.contextmanager
def publisher(folder: str, upload: float) -> Iterator[str]:
    """Runs a publisher's process; yields its URL."""
    argv = [sys.executable, __file__, "--serve", folder, "--upload", str(upload)]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"ASTRAFLOW_LOG": "WARNING"}
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=30)


async def spread(url: str, manifest: Manifest, count: int, *, peers: bool, upload: float) -> Spread:
    """Sends the version to `count` fresh receivers at the same time."""
    service = ServiceClient(url)
    with tempfile.TemporaryDirectory(prefix="fanout-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(service.close)
            receivers: list[Receiver] = []
            links: list[SourceLink] = []
            for idx in range(count):
                cache = Path(folder) / str(idx)
                spool = Spool(cache / "chunks") if peers else None
                if spool is not None:
                    await stack.enter_async_context(serve_spool(spool, "127.0.0.1", max_upload_mb_s=upload))
                    links.append(SourceLink(kind="http", url=spool.url, labels={"peer": str(idx)}))
                receivers.append(Receiver(cache, spool=spool, range_bytes=CHUNK_BYTES))
                stack.push_async_callback(receivers[-1].close)
            known = msgspec.structs.replace(manifest, sources=(*manifest.sources, *links))
            before = (await service.call("GET", "/v1/health", PublisherHealth)).sent_bytes
            start = time.perf_counter()
            await asyncio.gather(*(receiver.fetch(known) for receiver in receivers))
            seconds = time.perf_counter() - start
            after = (await service.call("GET", "/v1/health", PublisherHealth)).sent_bytes
    return Spread(seconds, (after - before) / manifest.num_bytes)


async def measure_fanout(
    megabytes: int = 16, upload: float = 2.0, counts: tuple[int, ...] = NUM_RECEIVERS
) -> dict[str, object]:
    """Measures the figures, and prints the table. Growth is from the first of `counts` to the last."""
    spreads: dict[tuple[str, int], Spread] = {}
    with tempfile.TemporaryDirectory(prefix="fanout-") as folder, publisher(folder, upload) as url:
        service = ServiceClient(url)
        client = PublisherClient(service, Path(folder) / "incoming")
        manifest = await client.publish("actor", 0, make_tensors(megabytes), {})
        await service.close()
        for count in counts:
            for mode in MODES.values():
                cap = upload if mode == "capped" else 0.0
                spreads[mode, count] = await spread(url, manifest, count, peers=mode != "alone", upload=cap)
    rows: list[list[object]] = [
        [count, *(x for m in MODES.values() for x in (spreads[m, count].seconds, spreads[m, count].copies))]
        for count in counts
    ]
    header = ["receivers", *(text for label in MODES for text in (f"{label} s", "copies sent"))]
    show_table(f"until all have {megabytes} MB from a publisher that sends {upload:g} MB/s", header, rows)
    first = counts[0]
    last = counts[-1]
    growth = {m: spreads[m, last].seconds / spreads[m, first].seconds for m in MODES.values()}
    return {
        "fanout_growth": growth["peers"],
        "fanout_growth_all_capped": growth["capped"],
        "fanout_growth_without_peers": growth["alone"],
        "fanout_copies": spreads["peers", last].copies,
        "fanout_s": {f"{mode} {count}": round(s.seconds, 2) for (mode, count), s in spreads.items()},
    }


def plot(figures: dict[str, object], path: Path, title: str) -> None:
    from matplotlib import pyplot

    use_style()

    seconds = figures["fanout_s"]
    assert isinstance(seconds, dict)
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for (label, mode), color in zip(MODES.items(), ("C1", "C0", "C2"), strict=True):
        axes.plot(
            NUM_RECEIVERS, [seconds[f"{mode} {n}"] for n in NUM_RECEIVERS], "o-", label=label, color=color
        )
    axes.set(xlabel="receivers", ylabel="seconds until all have it", title=title, xticks=NUM_RECEIVERS)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


async def serve(stop: asyncio.Event, folder: Path, upload: float) -> None:
    config = WeightsConfig(chunk_bytes=CHUNK_BYTES, max_upload_mb_s=upload)
    await run_publisher(folder, config, stop, on_ready=lambda url: print(url, flush=True))


async def measure(stop: asyncio.Event, args: argparse.Namespace) -> None:
    figures = await measure_fanout(args.megabytes, args.upload)
    if args.plot:
        plot(figures, args.plot, f"{args.megabytes} MB; the publisher sends {args.upload:g} MB/s")
    report(figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--upload", type=float, default=2.0, help="MB/s of the publisher")
    parser.add_argument("--plot", type=Path, help="write the picture here")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return run_service(lambda stop: serve(stop, args.serve, args.upload), name="publisher")
    return run_service(lambda stop: measure(stop, args), name="benchmark")


if __name__ == "__main__":
    sys.exit(main())
