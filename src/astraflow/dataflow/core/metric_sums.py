"""Sums of the metrics of many episodes, reduced to one number per name.

Workflows name metrics as they like, perhaps one per task. So whoever keeps sums says how many names it keeps
at most; values of further names are left out and counted.
"""

from collections.abc import Sequence

from astraflow.bounds import as_label
from astraflow.dataflow.core.finite import bounded
from astraflow.dataflow.core.state import MetricSum
from astraflow.types import MetricItem

__all__ = ["add_metrics", "reduced"]


def add_metrics(sums: dict[str, MetricSum], metrics: Sequence[MetricItem], *, most: int) -> int:
    """Adds the metrics of an episode in place. Returns how many had no room.

    `sums` holds at most `most` names. A name keeps the reduction that it came with first.
    """
    num_left_out = 0
    for item in metrics:
        total = sums.get(item.name)
        if total is not None:
            _add(total, item.value)
        elif len(sums) < most:
            sums[item.name] = MetricSum(value=item.value, num=1, reduction=item.reduction)
        else:
            num_left_out += 1
    return num_left_out


def _add(total: MetricSum, value: float) -> None:
    total.num += 1
    if total.reduction in {"mean", "sum"}:
        total.value += value
    elif total.reduction == "last":
        total.value = value
    elif total.reduction == "max":
        total.value = max(total.value, value)
    else:
        total.value = min(total.value, value)


def reduced(sums: dict[str, MetricSum], *, prefix: str = "") -> tuple[MetricItem, ...]:
    """One item per name, in the order in which the names came."""
    items: list[MetricItem] = []
    for name, total in sums.items():
        value = total.value / total.num if total.reduction == "mean" else total.value
        # The prefix may make a name longer than names may be.
        items.append(MetricItem(as_label(f"{prefix}{name}"), bounded(value), total.reduction))
    return tuple(items)
