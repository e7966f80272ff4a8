import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from astraflow.addons.view.commands import write_report
from astraflow.addons.view.svg_chart import Line, svg_chart
from astraflow.errors import DataError
from drivers.view_runs import RunWriter

STEP = '{"kind":"step","policy":"actor","step":%d,"version":1,"at_s":5.0,"reward_mean":%s}\n'
EVAL = (
    '{"kind":"eval","policy":"actor","eval_set":"heldout","step":0,"version":0,"at_s":5.0,'
    '"score_mean":0.5,"score_stderr":0.1}\n'
)


class Tags(HTMLParser):
    """The names of all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        self.names.append(tag)


def make_run(folder: Path, task: str = "heldout/1") -> None:
    run = RunWriter(folder)
    run.eval_result("e0.0.0", 0.0)
    run.transcript(0, 0.0, "What is <b>1 + 1</b>?", kind="eval", task=task)
    run.close()
    rows = [EVAL, *(STEP % (step, step / 10) for step in range(1, 5)), STEP % (5, "null")]
    (folder / "metrics.jsonl").write_text("".join(rows))


def test_a_report_is_one_file_with_curves_and_episodes(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", task="<script>alert(1)</script>")
    out = tmp_path / "report.html"
    write_report([tmp_path / "a", tmp_path / "b"], out)
    text = out.read_text()
    names = Tags(text).names
    assert names.count("svg") == 2
    assert names.count("polyline") == 4
    assert {"script", "img", "link", "iframe"}.isdisjoint(names)
    assert re.findall(r"(?:src|href)=", text) == []
    assert "What is &lt;b&gt;1 + 1&lt;/b&gt;?" in text
    assert "default-src 'none'" in text
    assert "Where their recipes differ" in text


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        write_report([tmp_path], tmp_path / "report.html")


def test_a_chart_leaves_out_what_is_no_number() -> None:
    nan = float("nan")
    assert svg_chart("loss", [Line("actor", [(1.0, nan), (2.0, float("inf"))])]) == ""
    chart = svg_chart("loss", [Line("a & b", [(1.0, 3.0), (2.0, nan), (3.0, 3.0)])])
    assert "a &amp; b" in chart
    assert "nan" not in chart
    (points,) = re.findall(r'points="([^"]*)"', chart)
    assert len(points.split()) == 2


def test_a_long_line_is_thinned_and_keeps_its_end() -> None:
    points = [(float(x), float(x)) for x in range(10_000)]
    (drawn,) = re.findall(r'points="([^"]*)"', svg_chart("t", [Line("a", points)]))
    assert len(drawn.split()) <= 601
    assert "<b>9999</b>" in svg_chart("t", [Line("a", points)])
