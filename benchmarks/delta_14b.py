"""Computes how large the delta of a 14B model would be if its weights changed like those of a real run.

The quickstart trains for 16 steps in bfloat16 at each learning rate, and keeps all versions. For each kind of
tensor (embedding, head, attention, MLP, norms), all pairs (weight before, weight after) of these steps form
one pool. For each kind, a tensor of 8M weights is drawn at random from its pool, encoded by the real codec,
decoded, and compared bit by bit. The size in the table is its bytes per weight times the number of weights of
that kind in a Qwen3-14B: COMPUTED, not measured. Random drawing removes any order in the changes, and such
order could only make a delta smaller. A larger model at the same learning rate may change more or fewer of
its weights.

For comparison, the table also has the full version, and the index (4 bytes) and value (2 bytes) of each
changed weight.

    python benchmarks/delta_14b.py [--rates 1e-6 5e-6] [--out runs/deltas] [--picture FILE]
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from astraflow.addons.export.saved_versions import SavedVersions
from astraflow.recipe.run_folder import RunFolder
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.delta.delta import apply_delta, parse_delta
from astraflow.weights.delta.encoder import encode_blocks, encode_header, encode_trailer
from astraflow.weights.manifest import digest_of, lay_out
from harness import report, show_table
from plots import use_style

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = 5120
LAYERS = 40
KV = 1024
MLP = 17_408
VOCABULARY = 151_936
HEAD_DIM = 128
SHAPES = {
    "embedding": VOCABULARY * HIDDEN,
    "head": VOCABULARY * HIDDEN,
    "attention": LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV),
    "mlp": LAYERS * 3 * HIDDEN * MLP,
    "norm": LAYERS * (2 * HIDDEN + 2 * HEAD_DIM) + HIDDEN,
}
"""Number of weights of each kind in a Qwen3-14B."""
SAMPLE = 8 * 1024 * 1024
Words = NDArray[np.uint16]


@dataclass(frozen=True)
class Kind:
    """How tensors of one kind change in a step."""

    density: float
    bytes_per_weight: float


def kind_of(name: str) -> str:
    """Returns the kind of a tensor, by its Hugging Face name."""
    if "embed_tokens" in name:
        return "embedding"
    if "lm_head" in name:
        return "head"
    if "norm" in name:
        return "norm"
    return "mlp" if ".mlp." in name else "attention"


def train(rate: float, out: Path) -> Path:
    """Makes a run that keeps all its versions, unless it exists already."""
    run_dir = out / f"lr-{rate:g}"
    model = out / "model"
    argv = [sys.executable, "-m", "astraflow.cli.main"]
    if not model.is_dir():
        spec = str(ROOT / "recipes" / "models" / "quickstart.yaml")
        subprocess.run(
            [*argv, "model", "init", spec, "--out", str(model)], cwd=ROOT, check=True, stdout=sys.stderr
        )
    if not (run_dir / "summary.json").is_file():
        settings = [
            f"policies.actor.model={model}",
            f"policies.actor.train.lr={rate}",
            "policies.actor.train.steps=16",
            "policies.actor.train.backend={name: torch, publish_dtype: bfloat16}",
            "policies.actor.train.optimizer.warmup_steps=1",
            "weights.delta=true",
            "weights.keep=64",
            "weights.full_every=64",
        ]
        command = [*argv, "run", "recipes/quickstart.yaml", "--run-dir", str(run_dir), "--plain", *settings]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return run_dir


def pools_of(run_dir: Path) -> dict[str, tuple[Words, Words]]:
    """Returns kind -> all weights before and after a step, over all steps."""
    stored = SavedVersions(RunFolder(run_dir).weights / "actor", "actor")
    versions = [stored.read(number) for number in stored.versions()]
    before: defaultdict[str, list[Words]] = defaultdict(list)
    after: defaultdict[str, list[Words]] = defaultdict(list)
    for old, new in itertools.pairwise(versions):
        for a, b in zip(old.tensors, new.tensors, strict=True):
            before[kind_of(a.name)].append(a.data.view(np.uint16))
            after[kind_of(b.name)].append(b.data.view(np.uint16))
    return {kind: (np.concatenate(before[kind]), np.concatenate(after[kind])) for kind in before}


def measure(pool: tuple[Words, Words], num: int) -> Kind:
    """Encodes `num` weights of a kind. Raises: AssertionError if decoding does not restore them bit by
    bit."""
    chosen = np.random.default_rng(0).integers(len(pool[0]), size=num)
    before = pool[0][chosen]
    after = pool[1][chosen]
    table = lay_out([HostTensor("weight", (num,), "bfloat16", before.view(np.uint8))])
    digests = {"base_digest": digest_of(before.view(np.uint8)), "digest": digest_of(after.view(np.uint8))}
    blocks = [*encode_blocks(before.view(np.uint8), after.view(np.uint8), table)]
    data = b"".join([encode_header(table, **digests), *blocks, encode_trailer(table, len(blocks))])
    copy = before.copy()
    apply_delta(parse_delta(data, table), copy.view(np.uint8))
    assert np.array_equal(copy, after)
    return Kind(density=float((before != after).mean()), bytes_per_weight=len(data) / num)


def show(rate: float, kinds: Mapping[str, Kind]) -> dict[str, float]:
    """Prints the table of a learning rate. Returns the bytes of a full version, its delta, and index and
    value."""
    sizes = {
        "full": 2.0 * sum(SHAPES.values()),
        "delta": sum(SHAPES[name] * kind.bytes_per_weight for name, kind in kinds.items()),
        "index and value": sum(6 * SHAPES[name] * kind.density for name, kind in kinds.items()),
    }
    rows = [
        (name, SHAPES[name] / 1e6, f"{kind.density:.2%}", 2 * SHAPES[name] / 1e6,
         SHAPES[name] * kind.bytes_per_weight / 1e6, 2 / kind.bytes_per_weight)
        for name, kind in kinds.items()
    ]  # fmt: skip
    header = ("kind", "million weights", "changed", "full MB", "delta MB", "times smaller")
    show_table(f"Qwen3-14B at learning rate {rate:g}, COMPUTED from a real run", header, rows)
    travel = [(name, size / 1e6, sizes["full"] / size) for name, size in sizes.items()]
    show_table(f"one version at learning rate {rate:g}", ("what travels", "MB", "times smaller"), travel)
    return sizes


def draw(found: Mapping[float, Mapping[str, float]], image: Path) -> None:
    """Plots the sizes on a logarithmic scale."""
    use_style()
    figure, axes = plt.subplots(figsize=(7, 3))
    names = [f"{name}, lr {rate:g}" for rate, sizes in found.items() for name in sizes]
    values = [size / 1e9 for sizes in found.values() for size in sizes.values()]
    bars = axes.barh(names, values, color=["0.7", "C0", "C1"] * len(found))
    axes.bar_label(bars, labels=[f"{value:.2f} GB" for value in values], padding=3, fontsize=8)
    axes.set(xscale="log", xlabel="GB per version of a 14B model (computed)", xlim=(None, 4 * max(values)))
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(image)
    plt.close(figure)


def main(rates: Sequence[float], out: Path, num: int, image: Path | None) -> None:
    """Trains, encodes, prints, and plots."""
    found: dict[float, dict[str, float]] = {}
    for rate in rates:
        kinds = {kind: measure(pool, num) for kind, pool in pools_of(train(rate, out)).items()}
        found[rate] = show(rate, kinds)
    if image is not None:
        draw(found, image)
    report(
        {
            "is_computed": True,
            "num_weights": sum(SHAPES.values()),
            "delta_gb": {f"{rate:g}": sizes["delta"] / 1e9 for rate, sizes in found.items()},
            "times_smaller": {f"{rate:g}": sizes["full"] / sizes["delta"] for rate, sizes in found.items()},
            "times_smaller_than_index_and_value": {
                f"{rate:g}": sizes["index and value"] / sizes["delta"] for rate, sizes in found.items()
            },
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 5e-6])
    parser.add_argument("--weights", type=int, default=SAMPLE, help="weights that are encoded per kind")
    parser.add_argument("--out", type=Path, help="run folders; finished ones are read, not made again")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="astraflow-delta-") as scratch:
        main(given.rates, (given.out or Path(scratch)).resolve(), given.weights, given.picture)
