"""How much changes from version to version of a real RL run in bfloat16, and how small its deltas are.

Reads the versions that runs kept, made for example by

    astraflow run recipes/quickstart.yaml --run-dir runs/lr-1e-6 policies.actor.train.lr=1.0e-6 \\
      policies.actor.train.steps=16 'policies.actor.train.backend={name: torch, publish_dtype: bfloat16}' \\
      policies.actor.train.optimizer.warmup_steps=1 weights.delta=true weights.keep=64 weights.full_every=64

    python benchmarks/weights_real.py runs/lr-1e-6 runs/lr-5e-6 [--plot docs/images/real_deltas.png]
"""

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow.addons.export.saved_versions import SavedVersion, SavedVersions
from astraflow.recipe.run_folder import RunFolder
from astraflow.weights.delta.encoder import encode_delta
from astraflow.weights.manifest import lay_out, pack
from harness import report, show_table
from plots import use_style


@dataclass(frozen=True)
class Step:
    """The change from one version to the next."""

    density: float
    """Share of the elements that changed."""
    one_ulp: float
    """Share of the changes that are one step up or down."""
    delta_bytes: int
    entropy_bytes: float
    """Entropy of the positions and of one direction per position, if they were independent."""
    full_bytes: int


def ordered(words: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Converts bfloat16 patterns to integers in the order of their values."""
    signed = words.astype(np.int32)
    return np.where(signed & 0x8000, 0x8000 - signed, signed)


def step_between(old: SavedVersion, new: SavedVersion) -> Step:
    before = pack(old.tensors)
    after = pack(new.tensors)
    table = lay_out(new.tensors)
    spans = [slice(t.offset, t.offset + t.num_bytes) for t in table]
    a, b = (np.concatenate([data[span] for span in spans]).view(np.uint16) for data in (before, after))
    is_changed = a != b
    distance = np.abs(ordered(a[is_changed]) - ordered(b[is_changed]))
    digests = {"base_digest": old.manifest.digest, "digest": new.manifest.digest}
    delta = b"".join(encode_delta(before, after, table, **digests))
    p = is_changed.mean()
    bits = 0.0 if p in {0.0, 1.0} else -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    return Step(
        density=float(p),
        one_ulp=float((distance == 1).mean()) if distance.size else 0.0,
        delta_bytes=len(delta),
        entropy_bytes=float(a.size * (bits + p) / 8),
        full_bytes=a.nbytes,
    )


def steps_of(run_dir: Path) -> list[Step]:
    stored = SavedVersions(RunFolder(run_dir).weights / "actor", "actor")
    versions = [stored.read(number) for number in stored.versions()]
    assert all(t.dtype == "bfloat16" for t in versions[0].tensors), "publish in bfloat16"
    return [step_between(old, new) for old, new in itertools.pairwise(versions)]


def plot(steps: dict[str, list[Step]], path: Path) -> None:
    from matplotlib import pyplot

    use_style()

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.4))
    for name, series in steps.items():
        numbers = range(1, len(series) + 1)
        left.plot(numbers, [100 * s.density for s in series], "o-", ms=3, label=name)
        right.plot(numbers, [s.full_bytes / s.delta_bytes for s in series], "o-", ms=3, label=name)
    left.set(xlabel="version", ylabel="% of the elements that changed", ylim=(0, None))
    right.set(xlabel="version", ylabel="times smaller than the version", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    steps = {run.name: steps_of(run) for run in args.runs}
    rows: list[list[object]] = []
    for name, series in steps.items():
        densities = [s.density for s in series]
        total = sum(s.delta_bytes for s in series)
        rows.append(
            [
                *(
                    name,
                    len(series),
                    f"{np.median(densities):.2%}",
                    f"{min(densities):.2%}",
                    f"{max(densities):.2%}",
                ),
                f"{np.mean([s.one_ulp for s in series]):.0%}",
                float(np.median([s.delta_bytes for s in series])),
                sum(s.full_bytes for s in series) / total,
                total / sum(s.entropy_bytes for s in series),
            ]
        )
    header = ["run", "steps", "changed", "least", "most", "one ulp", "delta bytes", "x smaller", "of entropy"]
    show_table("consecutive versions in bfloat16", header, rows)
    if args.plot and steps:
        plot(steps, args.plot)
    report({name: float(np.median([s.density for s in series])) for name, series in steps.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
