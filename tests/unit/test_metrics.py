import io
import json
import math
from pathlib import Path
from typing import get_args

import pytest

from astraflow.errors import WireError
from astraflow.metrics import ConsoleSink, JsonlSink, reduce_metrics
from astraflow.types import MetricItem, Reduction


def test_each_reduction_does_what_its_name_says() -> None:
    groups = [[MetricItem(name, value, name) for name in get_args(Reduction)] for value in (1.0, 5.0, 3.0)]
    reduced = {item.name: item.value for item in reduce_metrics(groups)}
    assert reduced == {"mean": 3.0, "sum": 9.0, "max": 5.0, "min": 1.0, "last": 3.0}


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


def test_jsonl_has_a_line_per_step_with_null_for_nan(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path, clock=lambda: 12.5)
    sink.write("actor", 3, [MetricItem("reward", 0.5), MetricItem("loss", math.nan)])
    assert json.loads(path.read_text()) == {
        "policy": "actor",
        "step": 3,
        "at_s": 12.5,
        "reward": 0.5,
        "loss": None,
    }
    sink.close()


def test_a_reopened_file_is_appended_to_without_its_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, clock=lambda: 1.0)
    sink.write("actor", 1, [])
    sink.close()
    with path.open("ab") as file:
        file.write(b'{"policy": "act')
    sink = JsonlSink(path, clock=lambda: 2.0)
    sink.write("actor", 2, [])
    sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"policy": "actor", "step": step, "at_s": float(step)} for step in (1, 2)]


def test_a_metric_does_not_overwrite_a_column(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(WireError, match="'step' is the name of another column"):
        sink.write("actor", 1, [MetricItem("step", 1.0)])
    sink.close()


def test_the_console_gets_a_plain_line_per_step() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.write("actor", 3, [MetricItem("reward", 1 / 3), MetricItem("tokens", 1234.0)])
    sink.close()
    assert stream.getvalue() == "actor step 3: reward 0.3333  tokens 1234\n"
