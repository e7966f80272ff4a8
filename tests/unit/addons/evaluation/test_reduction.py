"""The metrics of several episodes, combined."""

import math
from typing import get_args

import pytest

from astraflow.addons.evaluation.reduction import reduce_metrics
from astraflow.errors import WireError
from astraflow.types import MetricItem, Reduction


def test_each_reduction_does_what_its_name_says() -> None:
    groups = [[MetricItem(name, value, name) for name in get_args(Reduction)] for value in (1.0, 5.0, 3.0)]
    reduced = {item.name: item.value for item in reduce_metrics(groups)}
    assert reduced == {"mean": 3.0, "sum": 9.0, "max": 5.0, "min": 1.0, "last": 3.0, "p50": 3.0, "p95": 5.0}


def test_a_name_that_some_groups_lack_is_reduced_over_the_others() -> None:
    groups = [[MetricItem("b", 1.0)], [MetricItem("a", 3.0), MetricItem("b", 4.0)]]
    assert reduce_metrics(groups) == (MetricItem("b", 2.5), MetricItem("a", 3.0))


def test_nan_is_not_hidden() -> None:
    for reduction in set(get_args(Reduction)) - {"last"}:
        groups = [[MetricItem("a", x, reduction)] for x in (1.0, math.nan, 2.0)]
        assert math.isnan(reduce_metrics(groups)[0].value)


def test_metrics_that_disagree_are_refused() -> None:
    with pytest.raises(WireError, match="'a' has reductions 'mean' and 'sum'"):
        reduce_metrics([[MetricItem("a", 1.0)], [MetricItem("a", 1.0, "sum")]])
    assert reduce_metrics([]) == ()
