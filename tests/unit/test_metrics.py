import io
import json
import math
from pathlib import Path
from typing import get_args

import pytest

from astraflow.errors import DataError, WireError
from astraflow.metrics import ConsoleSink, JsonlSink, MetricRow, MultiSink, load_jsonl, reduce_metrics
from astraflow.types import MetricItem, Reduction


def test_each_reduction_does_what_its_name_says() -> None:
    groups = [[MetricItem(name, value, name) for name in get_args(Reduction)] for value in (1.0, 5.0, 3.0)]
    reduced = {item.name: item.value for item in reduce_metrics(groups)}
    assert reduced == {"mean": 3.0, "sum": 9.0, "max": 5.0, "min": 1.0, "last": 3.0}


def test_only_the_mean_is_weighted() -> None:
    groups = [
        [MetricItem("a", 1.0), MetricItem("n", 10.0, "sum")],
        [MetricItem("a", 4.0), MetricItem("n", 20.0, "sum")],
    ]
    assert reduce_metrics(groups, weights=[3, 1]) == (MetricItem("a", 1.75), MetricItem("n", 30.0, "sum"))


def test_a_name_that_some_groups_lack_is_reduced_over_the_others() -> None:
    groups = [[MetricItem("b", 1.0)], [MetricItem("a", 3.0), MetricItem("b", 3.0)]]
    assert reduce_metrics(groups, weights=[1, 3]) == (MetricItem("b", 2.5), MetricItem("a", 3.0))


def test_nan_is_not_hidden() -> None:
    for reduction in set(get_args(Reduction)) - {"last"}:
        groups = [[MetricItem("a", x, reduction)] for x in (1.0, math.nan, 2.0)]
        assert math.isnan(reduce_metrics(groups)[0].value)
    assert math.isnan(reduce_metrics([[MetricItem("a", 1.0)]], weights=[0.0])[0].value)


def test_metrics_that_disagree_are_refused() -> None:
    with pytest.raises(WireError, match="'a' has reductions 'mean' and 'sum'"):
        reduce_metrics([[MetricItem("a", 1.0)], [MetricItem("a", 1.0, "sum")]])
    with pytest.raises(WireError, match="1 weights for 2 groups"):
        reduce_metrics([[], []], weights=[1.0])
    assert reduce_metrics([]) == ()


def test_jsonl_comes_back(tmp_path: Path) -> None:
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
    (row,) = load_jsonl(path)
    assert (row.policy, row.step, row.at_s, row.metrics["reward"]) == ("actor", 3, 12.5, 0.5)
    assert math.isnan(row.metrics["loss"])


def test_a_reopened_file_is_appended_to_without_its_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, clock=lambda: 1.0)
    sink.write("actor", 1, [])
    sink.close()
    with path.open("ab") as file:
        file.write(b'{"policy": "act')
    assert [row.step for row in load_jsonl(path)] == [1]
    sink = JsonlSink(path, clock=lambda: 2.0)
    sink.write("actor", 2, [])
    sink.close()
    expected = [MetricRow(policy="actor", step=step, at_s=float(step), metrics={}) for step in (1, 2)]
    assert list(load_jsonl(path)) == expected


def test_a_metric_does_not_overwrite_a_column(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(WireError, match="'step' is taken"):
        sink.write("actor", 1, [MetricItem("step", 1.0)])
    sink.close()


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"policy": "a", "step": 1}', '{"policy": 1, "step": 1}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"policy": "a", "step": 1, "at_s": 1.0}\n' + line + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        load_jsonl(path)
    with pytest.raises(DataError, match="cannot be read"):
        load_jsonl(tmp_path / "absent.jsonl")


def test_sinks_write_side_by_side(tmp_path: Path) -> None:
    stream = io.StringIO()
    sink = MultiSink([ConsoleSink(stream), JsonlSink(tmp_path / "metrics.jsonl")])
    sink.write("actor", 3, [MetricItem("reward", 1 / 3), MetricItem("tokens", 1234.0)])
    sink.close()
    assert stream.getvalue() == "actor step 3: reward 0.3333  tokens 1234\n"
    assert len(load_jsonl(tmp_path / "metrics.jsonl")) == 1
