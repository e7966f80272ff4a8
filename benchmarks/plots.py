"""The pictures that benchmarks draw, in the style of the page and of learning curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["draw_curves", "use_style"]

Curve = Sequence[tuple[float, float]]
"""(what the run has spent, its score) pairs, in order."""


def use_style() -> None:
    """Lets matplotlib draw into files, in the project's style. Imports matplotlib."""
    import matplotlib as mpl
    from matplotlib import style

    mpl.use("Agg")
    style.use("astraflow.addons.plot.astraflow")


def draw_curves(found: Mapping[str, Sequence[Curve]], image: Path, *, over: str, lowest: float) -> None:
    """Plots scores from `lowest` to 1 over the quantity named `over`, with a color per system and a line
    per run."""
    use_style()
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for idx, (system, curves) in enumerate(found.items()):
        for number, curve in enumerate(curves):
            spent, accuracies = zip(*curve, strict=True)
            label = system if number == 0 else None
            axes.plot(spent, accuracies, color=f"C{idx}", marker="o", markersize=3, label=label)
    axes.set(xlabel=over, ylabel="held-out score", ylim=(lowest, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(image)
    plt.close(figure)
