"""Traces from the journal: one per episode, with what each service did for it."""

from pathlib import Path
from typing import Any

from astraflow.addons.view.trace_export import TraceExport, follow
from astraflow.addons.view.traces import Span
from astraflow.recipe.run_folder import RunFolder
from drivers.view_runs import RunWriter


class Kept:
    """A collector that keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.rows: list[dict[str, Any]] = []

    def send(self, spans: Any) -> None:
        self.spans += spans

    def send_rows(self, rows: Any) -> None:
        self.rows += rows


def traced(folder: Path, *, every: int = 1) -> Kept:
    kept = Kept()
    follow(TraceExport(RunFolder(folder), kept, run_id="run-1", every=every), folder, until_end=True)
    return kept


def write_run(folder: Path) -> None:
    run = RunWriter(folder)
    for group in range(3):
        run.group(group, [0.0, 1.0], version=2)
    run.draw(3)
    run.fail("3.0.0", "no answer")
    run.close()


def test_each_episode_is_one_trace_across_the_services(tmp_path: Path) -> None:
    write_run(tmp_path)
    kept = traced(tmp_path)
    by_trace: dict[int, list[Span]] = {}
    for span in kept.spans:
        by_trace.setdefault(span.trace_id, []).append(span)
    whole = [spans for spans in by_trace.values() if any(span.parent_id == 0 for span in spans)]
    assert len(whole) == 6
    spans = {span.name: span for span in whole[0]}
    root = spans["episode"]
    assert (root.service, root.attributes["task"], root.attributes["fate actor"]) == (
        "dataflow", "sums/0", "trained",
    )  # fmt: skip
    attempt = spans["attempt 0"]
    assert (attempt.service, attempt.parent_id) == ("rollout-0", root.span_id)
    assert spans["workflow 0"].parent_id == attempt.span_id
    agent = spans["invoke_agent actor"]
    assert agent.parent_id == spans["workflow 0"].span_id
    assert agent.attributes["gen_ai.request.model"] == "actor"
    assert agent.attributes["gen_ai.usage.output_tokens"] == 2
    assert spans["table actor"].attributes["fate"] == "trained"
    for span in spans.values():
        assert root.start_s <= span.start_s <= span.end_s <= root.end_s


def test_an_attempt_that_failed_is_an_error_with_its_class(tmp_path: Path) -> None:
    write_run(tmp_path)
    (failed,) = [span for span in traced(tmp_path).spans if span.is_error]
    assert failed.name == "attempt 0"
    assert failed.attributes["error"]


def test_a_run_that_is_traced_twice_gives_the_same_ids_and_no_span_has_two(tmp_path: Path) -> None:
    write_run(tmp_path)
    first, second = traced(tmp_path).spans, traced(tmp_path).spans
    assert first == second
    assert len({(span.trace_id, span.span_id) for span in first}) == len(first)


def test_only_one_group_in_so_many_is_traced(tmp_path: Path) -> None:
    write_run(tmp_path)
    roots = [span for span in traced(tmp_path, every=2).spans if span.parent_id == 0]
    assert sorted({span.attributes["group"] for span in roots}) == [0, 2]


def test_rows_are_handed_over_once_and_broken_lines_are_said(tmp_path: Path) -> None:
    write_run(tmp_path)
    metrics = RunFolder(tmp_path).metrics
    metrics.write_bytes(b'{"kind": "step", "step": 1}\nno row\n{"kind"')
    kept = Kept()
    export = TraceExport(RunFolder(tmp_path), kept, run_id="run-1")
    export.take()
    export.take()
    assert [row["step"] for row in kept.rows] == [1]
    assert len(export.problems) == 1
