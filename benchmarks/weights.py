"""Measures how small and how fast a delta of the weights is, compared with memcpy and a naive coder.

The weights are about 500 MB of bfloat16, of which a share has changed by one step at random places. All cases
are lossless and verified.

    python benchmarks/weights.py [--megabytes 500] [--repeats 5]
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow.types.host_tensors import HostTensor
from astraflow.weights.delta.delta import apply_delta, parse_delta
from astraflow.weights.delta.encoder import encode_blocks, encode_header, encode_trailer
from astraflow.weights.delta.kernels import choose_kernel
from astraflow.weights.manifest import digest_of, lay_out
from harness import Runs, interleaved, report, show_table

DENSITIES = (0.001, 0.01, 0.03)
TENSOR_ELEMENTS = 8 * 1024 * 1024
Words = NDArray[np.uint16]


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
        header = encode_header(self.table, base_digest=base_digest, digest=digest)
        versions = (self.old.view(np.uint8), self.new.view(np.uint8))
        blocks = [*encode_blocks(*versions, self.table, kernel=choose_kernel(1 << 40))]
        return b"".join([header, *blocks, encode_trailer(self.table, len(blocks))])

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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    found = measure_codec(make_words(args.megabytes, random), random, args.repeats)
    report(found, at_least={"encode_vs_naive": 2}, at_most={"apply_ms": 60})
