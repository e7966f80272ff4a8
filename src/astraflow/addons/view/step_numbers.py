"""The numbers of a policy's newest step, in one line."""

from collections.abc import Mapping

from astraflow.report.terminal_text import printable
from astraflow.types import StepRecord

__all__ = ["numbers_text"]

_SHOWN = (
    ("loss", "loss", "{:.4g}"),
    ("entropy", "entropy", "{:.3f}"),
    ("episode/turns", "turns", "{:.1f}"),
    ("episode/truncated_frac", "truncated", "{:.0%}"),
    ("episode/generate_s", "generate", "{:.2f} s"),
    ("episode/score_s", "score", "{:.2f} s"),
    ("batch_wait_s", "wait for batch", "{:.2f} s"),
    ("train_s", "train", "{:.2f} s"),
)
"""(metric, name on the screen, format)."""
_BUILT_IN = (
    *("turns", "sampled_tokens", "truncated_frac", "forks", "overflows"),
    *("generate_s", "score_s", "score_call_s_p50", "score_call_s_p95", "score_timeouts"),
)
"""Metrics that every episode has."""
_MOST_OWN = 4
"""Maximum number of the user's own metrics to show. `metrics.jsonl` has all of them."""


def numbers_text(record: StepRecord) -> str:
    """Lists loss, entropy, episode statistics, and times, then the first few of the user's own metrics."""
    values = {item.name: item.value for item in record.metrics}
    known = [f"{shown} {form.format(values[name])}" for name, shown, form in _SHOWN if name in values]
    own = [f"{printable(name)} {value:.4g}" for name, value in _own(values).items()]
    return "  ".join((*known, *own))


def _own(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the first few metrics that the workflow added to its episodes."""
    names = [name for name in values if name.startswith("episode/")]
    own = [name for name in names if name.removeprefix("episode/") not in _BUILT_IN]
    return {name.removeprefix("episode/"): values[name] for name in own[:_MOST_OWN]}
