"""Measures how small and how fast a new version of the weights is, compared with memcpy and a naive coder.

The weights are about 500 MB of bfloat16, of which a share has changed by one step at random places. All cases
are lossless and verified. The publisher is a separate process; sender and receiver share this one.
"Received" means verified and in the receiver's host memory. The link of 1 Gbit/s is a proxy in its own
process.

    python benchmarks/weights.py [--megabytes 500] [--repeats 5]
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.service.client import ServiceClient
from astraflow.service.process import run_service
from astraflow.types import SourceLink
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.config import WeightsConfig
from astraflow.weights.delta.delta import apply_delta, parse_delta
from astraflow.weights.delta.encoder import encode_delta
from astraflow.weights.delta.kernels import choose_kernel
from astraflow.weights.manifest import digest_of, lay_out
from astraflow.weights.publisher import run_publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from harness import Runs, interleaved, report, show_table
from shaped_link import Link, ShapedLink

DENSITIES = (0.001, 0.01, 0.03)
TENSOR_ELEMENTS = 8 * 1024 * 1024
Words = NDArray[np.uint16]

_NUM_WARM = 4
"""Number of versions until each of the two alternating files has been written and mapped on both sides."""


# --- weights --------------------------------------------------------------------------------------


def make_words(megabytes: int, rng: np.random.Generator) -> Words:
    """Makes weights of a typical magnitude as bfloat16."""
    size = megabytes * 500_000 // TENSOR_ELEMENTS * TENSOR_ELEMENTS or TENSOR_ELEMENTS
    some = (0.02 * rng.standard_normal(TENSOR_ELEMENTS, dtype=np.float32)).view(np.uint32) >> 16
    return np.tile(some.astype(np.uint16), size // TENSOR_ELEMENTS)


def stepped(words: Words, density: float, rng: np.random.Generator) -> tuple[Words, int]:
    """Makes a version with about this share of elements one step up or down. Returns it and the number of
    changed elements."""
    gaps = rng.geometric(density, int(words.size * density * 1.1) + 100)
    positions = np.cumsum(gaps) - 1
    positions = positions[positions < words.size]
    new = words.copy()
    new[positions] += rng.choice(np.array([1, 0xFFFF], np.uint16), positions.size)
    return new, positions.size


def tensors_from(words: Words) -> list[HostTensor]:
    parts = words.reshape(-1, TENSOR_ELEMENTS)
    return [
        HostTensor(f"layers.{i}.weight", (2048, TENSOR_ELEMENTS // 2048), "bfloat16", part.view(np.uint8))
        for i, part in enumerate(parts)
    ]


def scaled(runs: Runs, factor: float) -> Runs:
    """Converts the values to another unit."""
    return Runs(tuple(factor * value for value in runs.values))


def entropy_bytes(size: int, changed: int) -> float:
    """Returns the bytes for independent positions with one direction each. No code is shorter on average."""
    p = changed / size
    return size * (-p * np.log2(p) - (1 - p) * np.log2(1 - p) + p) / 8


# --- codec ----------------------------------------------------------------------------------------


def naive(old: Words, new: Words) -> tuple[NDArray[np.uint32], Words]:
    """Finds the index and value of each changed element, as other systems do."""
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return positions, new[positions]


@dataclass
class Codec:
    """Our codec, on one pair of versions that are laid out as a publisher sees them."""

    old: Words
    new: Words

    def __post_init__(self) -> None:
        self.table = lay_out(tensors_from(self.new))
        self.digests = [self._digest(self.old), self._digest(self.new)]
        self.buffer = self.old.copy()

    def _digest(self, words: Words) -> str:
        return digest_of(words.view(np.uint8))

    def encode(self) -> bytes:
        base_digest, digest = self.digests
        pieces = encode_delta(
            self.old.view(np.uint8),
            self.new.view(np.uint8),
            self.table,
            base_digest=base_digest,
            digest=digest,
            kernel=choose_kernel(1 << 40),
        )
        return b"".join(pieces)

    def apply(self, data: bytes, repeats: int) -> Runs:
        """Measures the seconds from encoded bytes to a patched and verified buffer."""
        seconds: list[float] = []
        for _ in range(repeats):
            np.copyto(self.buffer, self.old)
            start = time.perf_counter()
            apply_delta(parse_delta(data, self.table), self.buffer.view(np.uint8))
            seconds.append(time.perf_counter() - start)
        assert np.array_equal(self.buffer, self.new)
        return Runs(tuple(seconds))


def measure_codec(old: Words, rng: np.random.Generator, repeats: int) -> dict[str, object]:
    figures: dict[str, object] = {}
    rows: list[list[object]] = []
    for density in DENSITIES:
        new, changed = stepped(old, density, rng)
        codec = Codec(old, new)
        target = np.empty_like(old)
        data = codec.encode()
        runs: dict[str, Callable[[], object]] = {
            "memcpy": lambda target=target: np.copyto(target, old),
            "naive": lambda new=new: naive(old, new),
            "ours": codec.encode,
        }
        seconds = interleaved(runs, repeats=repeats)
        sizes = {"memcpy": old.nbytes, "naive": 6 * changed, "ours": len(data)}
        apply_s = codec.apply(data, repeats)
        bound = entropy_bytes(old.size, changed)
        for name, num_bytes in sizes.items():
            rows.append(
                [
                    *(f"{density:.1%}", name, num_bytes / 1e6, old.nbytes / num_bytes, num_bytes / bound),
                    *(scaled(seconds[name], 1e3), old.nbytes / seconds[name].median / 1e9),
                    scaled(apply_s, 1e3) if name == "ours" else "-",
                ]
            )
        if density == 0.01:
            figures = {
                "entropy_ratio": len(data) / bound,
                "compression_1pct": old.nbytes / len(data),
                "encode_vs_naive": seconds["naive"].median / seconds["ours"].median,
                "encode_ms": scaled(seconds["ours"], 1e3),
                "memcpy_gb_s": old.nbytes / seconds["memcpy"].median / 1e9,
                "apply_ms": scaled(apply_s, 1e3),
            }
        del codec, target, new
    header = ["changed", "coder", "MB", "x smaller", "of entropy", "encode ms", "GB/s", "apply+verify ms"]
    show_table(f"codec, {old.nbytes / 1e6:.0f} MB of bfloat16", header, rows)
    return figures


# --- stream ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def child(*args: str) -> Iterator[str]:
    """Runs this script in another role, and yields the URL that it prints. The process ends with the
    context."""
    process = subprocess.Popen(
        [sys.executable, __file__, *args],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"ASTRAFLOW_LOG": "WARNING"},
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=30)


@dataclass
class Timing:
    """Seconds of one version."""

    publish_s: float
    fetch_s: float

    @property
    def total_s(self) -> float:
        return self.publish_s + self.fetch_s


async def stream(words: Words, num_versions: int, folder: Path, *, delta: bool, link: str) -> list[Timing]:
    """Publishes and fetches version after version. The first `_NUM_WARM` are not counted."""
    timings: list[Timing] = []
    rng = np.random.default_rng(1)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(child("--serve", str(folder), "--delta" if delta else "--full"))
        source = stack.enter_context(child("--shape", url)) if link != "loopback" else url
        service = ServiceClient(url)
        client = PublisherClient(service, folder / "incoming", delta=delta)
        receiver = Receiver(folder / "cache")
        for number in range(num_versions):
            start = time.perf_counter()
            manifest = await client.publish("actor", number, tensors_from(words), {})
            published = time.perf_counter()
            assert manifest.kind == ("delta" if delta and number else "full")
            links = (SourceLink(kind="http", url=source),)
            snapshot = await receiver.fetch(msgspec.structs.replace(manifest, sources=links))
            timings.append(Timing(published - start, time.perf_counter() - published))
            assert is_same(snapshot.tensors, words)
            del snapshot
            words, _ = stepped(words, 0.01, rng)
            await client.forget("actor", [number])
        await receiver.close()
        await service.close()
    return timings[_NUM_WARM:]


def is_same(tensors: tuple[HostTensor, ...], words: Words) -> bool:
    return all(np.array_equal(a.data, b.data) for a, b in zip(tensors, tensors_from(words), strict=True))


async def measure_stream(old: Words, repeats: int) -> dict[str, object]:
    times: dict[str, dict[str, Runs]] = {}
    rows: list[list[object]] = []
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for link in ("loopback", "1 Gbit/s"):
        for kind in ("full", "delta"):
            with tempfile.TemporaryDirectory(dir=shared, prefix="weights-") as folder:
                num_versions = _NUM_WARM + (repeats if link == "loopback" else 3)
                timings = await stream(old, num_versions, Path(folder), delta=kind == "delta", link=link)
            name = f"{kind}, {link}"
            times[name] = {
                part: Runs(tuple(getattr(timing, f"{part}_s") for timing in timings))
                for part in ("publish", "fetch", "total")
            }
            rows.append([name, *(scaled(runs, 1e3) for runs in times[name].values())])
    header = ["stream, 1 % changed", "publish ms", "fetch+verify ms", "in all ms"]
    show_table(f"from the trainer's memory to the receiver's, {old.nbytes / 1e6:.0f} MB", header, rows)
    delta = times["delta, loopback"]
    full = times["full, loopback"]
    slow = {kind: times[f"{kind}, 1 Gbit/s"]["total"].median for kind in ("full", "delta")}
    return {
        "delta_ms": scaled(delta["total"], 1e3),
        "delta_publish_ms": scaled(delta["publish"], 1e3),
        "delta_vs_full": full["total"].median / delta["total"].median,
        "delta_vs_full_1gbit": slow["full"] / slow["delta"],
        "full_gb_s": Runs(tuple(old.nbytes / seconds / 1e9 for seconds in full["fetch"].values)),
    }


# --- other roles of this script -------------------------------------------------------------------


async def serve(stop: asyncio.Event, folder: Path, delta: bool) -> None:
    config = WeightsConfig(delta=delta, keep=1, full_every=1000 if delta else 1)
    await run_publisher(folder, config, stop, on_ready=lambda url: print(url, flush=True))


async def shape(stop: asyncio.Event, url: str) -> None:
    link = ShapedLink(Link(delay_s=0.0, bits_per_s=1e9))
    print(await link.to(url), flush=True)
    await stop.wait()
    await link.close()


async def measure(stop: asyncio.Event, megabytes: int, repeats: int) -> None:
    rng = np.random.default_rng(0)
    old = make_words(megabytes, rng)
    figures = measure_codec(old, rng, repeats)
    figures |= await measure_stream(old, repeats)
    at_least = {"delta_vs_full": 2.5, "delta_vs_full_1gbit": 20, "full_gb_s": 1.5, "encode_vs_naive": 2}
    report(figures, at_least=at_least, at_most={"delta_ms": 200, "apply_ms": 60})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--delta", action="store_true", help=argparse.SUPPRESS)
    kind.add_argument("--full", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return run_service(lambda stop: serve(stop, args.serve, args.delta), name="publisher")
    if args.shape:
        return run_service(lambda stop: shape(stop, args.shape), name="shaper")
    return run_service(lambda stop: measure(stop, args.megabytes, args.repeats), name="benchmark")


if __name__ == "__main__":
    sys.exit(main())
