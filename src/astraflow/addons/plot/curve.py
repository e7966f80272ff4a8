"""Draws the learning curve of a run that has ended: `learning_curve.png` in its folder."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from astraflow.dataflow.journal.reader import JournalReader
from astraflow.report.view import RunPage, ShownRun
from astraflow.types import EvalRecord, StepRecord

__all__ = ["CurvePage", "draw_curve", "plot_curve"]


class CurvePage(RunPage):
    """Draws the curve when the run has ended. Without matplotlib, it does nothing."""

    def __init__(self, run: ShownRun) -> None:
        self._folder = run.folder

    async def close(self, deadline_s: float) -> None:
        """Imports matplotlib while the services end, because the import takes a second."""
        del deadline_s
        await asyncio.to_thread(_load_drawing)

    def report(self) -> None:
        """Draws the curve. Raises: JournalError or OSError."""
        with JournalReader(self._folder.journal) as journal:
            steps = journal.steps()
            evals = journal.evals()
        draw_curve(self._folder.curve, steps, evals)


_STYLE = Path(__file__).with_name("astraflow.mplstyle")
"""How all plots look; `make web` makes it from the page's design."""


def _load_drawing() -> None:
    with suppress(ImportError):
        import_module("matplotlib.figure")


def draw_curve(path: Path, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> bool:
    """Draws the held-out score and the training reward over steps and over seconds.

    Returns False if matplotlib or the data is missing.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not steps and not evals:
        return False
    part = path.with_name(f".{path.name}.part.png")
    with mpl.rc_context(mpl.rc_params_from_file(_STYLE, use_default_template=False)):
        figure = Figure(figsize=(9.2, 3.7), layout="constrained")
        FigureCanvasAgg(figure)
        plot_curve(figure, steps, evals)
        figure.savefig(part)
    part.replace(path)
    return True


def plot_curve(figure: Any, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> None:
    """Draws the curve over steps and over seconds into a figure of matplotlib."""
    start_s = min([record.at_s for record in steps] + [record.at_s for record in evals])
    axes: Any = figure.subplots(1, 2, sharey=True)
    for axis, label in zip(axes, ("step", "seconds"), strict=True):
        _draw_axis(axis, steps, evals, start_s=start_s, over=label)
        axis.set_xlabel(label)
    axes[0].set_ylabel("score")
    axes[0].legend(loc="lower right")


def _draw_axis(
    axis: Any, steps: Sequence[StepRecord], evals: Sequence[EvalRecord], *, start_s: float, over: str
) -> None:
    def x_of(record: StepRecord | EvalRecord) -> float:
        if over == "seconds":
            return record.at_s - start_s
        return record.number if isinstance(record, StepRecord) else record.step

    for policy in dict.fromkeys(record.policy for record in steps):
        own = [record for record in steps if record.policy == policy]
        rewards = [record.reward_mean for record in own]
        axis.plot([x_of(r) for r in own], rewards, alpha=0.4, linewidth=1, label=f"{policy}: training reward")
    for policy, eval_set in dict.fromkeys((record.policy, record.eval_set) for record in evals):
        own = [r for r in evals if (r.policy, r.eval_set) == (policy, eval_set)]
        rounds = [(r, r.score_mean) for r in own if r.score_mean is not None]
        axis.errorbar(
            [x_of(r) for r, _ in rounds],
            [score for _, score in rounds],
            yerr=[2 * r.score_stderr for r, _ in rounds],
            marker="o",
            capsize=2,
            label=f"{policy}: held-out {eval_set}",
        )
