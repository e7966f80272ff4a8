"""metrics.jsonl: one line a record, each once, across restarts."""

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from astraflow.report.metrics_log import MetricsLog
from astraflow.types import EvalRecord, MetricItem, StepRecord


def make_step(step: int, policy: str = "actor") -> StepRecord:
    return StepRecord(
        policy=policy, step=step, version=step + 1, at_s=1.0, reward_mean=0.5, staleness_mean=0.0,
        staleness_max=0, num_groups=1, num_samples=2, num_trained_tokens=3, num_discarded_groups=0,
        metrics=(MetricItem("loss", 0.25),),
    )  # fmt: skip


def make_eval() -> EvalRecord:
    return EvalRecord(
        policy="actor", version=0, step=0, eval_set="heldout", num_tasks=1, num_samples=1, num_failed=0,
        score_mean=0.5, score_stderr=0.0, at_s=1.0, metrics=(MetricItem("turns", 2.0),),
        best_by="max heldout",
    )  # fmt: skip


def test_a_reopened_log_knows_where_to_go_on(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert (log.last_step("actor"), log.num_evals) == (-1, 0)
    log.write(make_step(0))
    log.write(make_eval())
    log.write(make_step(1))
    log.write(make_step(0, "verifier"))
    log.close()
    again = MetricsLog(tmp_path / "metrics.jsonl")
    assert (again.last_step("actor"), again.last_step("verifier"), again.num_evals) == (1, 0, 1)
    assert again.earlier_evals == [make_eval()]
    again.close()


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(make_step(0))
    log.write(make_step(1))
    log.close()
    path.write_bytes(path.read_bytes()[:-5])
    again = MetricsLog(path)
    assert again.last_step("actor") == 0
    again.write(make_step(1))
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_line_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(make_step(0))
    log.write(make_eval())
    log.close()
    step, evaluated = (json.loads(line) for line in path.read_text().splitlines())
    assert (step["kind"], step["step"], step["reward_mean"], step["loss"]) == ("step", 1, 0.5, 0.25)
    assert (evaluated["kind"], evaluated["step"], evaluated["score_mean"]) == ("eval", 0, 0.5)


def test_pandas_opens_the_file_as_one_flat_table(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(make_eval())
    for step in range(2):
        log.write(make_step(step))
    log.close()
    table = pd.read_json(path, lines=True)
    assert table["kind"].tolist() == ["eval", "step", "step"]
    assert {str(kind) for kind in table.dtypes} <= {"str", "int64", "float64"}
    assert table.set_index("step")["loss"].dropna().to_dict() == {1: 0.25, 2: 0.25}


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel lets no file grow beyond this: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_lines_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(make_step(0))
    size = path.stat().st_size
    with largest_file(size + 10):
        log.write(make_step(1))
        log.write(make_eval())
        assert log.failure is not None
        assert path.stat().st_size == size
    log.write(make_step(2))
    assert log.failure is None
    log.close()
    kinds = [(fields["kind"], fields["step"]) for fields in map(json.loads, path.read_text().splitlines())]
    assert kinds == [("step", 1), ("step", 2), ("eval", 0), ("step", 3)]


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "[]",
        "7",
        "{}",
        '{"kind": "eval"}',
        '{"kind": "step", "step": {}}',
        '{"kind":"step","policy":"actor","step":0,"version":1,"at_s":1.0,"metrics":[["loss",0.5,"mean"]]}',
        "\xff",
    ],
)
def test_a_damaged_log_is_set_aside_and_written_anew(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(make_step(0))
    log.write(make_eval())
    log.close()
    damaged = path.read_bytes() + line.encode("latin-1") + b"\n"
    path.write_bytes(damaged)
    again = MetricsLog(path)
    assert (again.last_step("actor"), again.num_evals, again.earlier_evals) == (-1, 0, [])
    again.write(make_step(0))
    again.close()
    assert (tmp_path / "metrics.damaged-1.jsonl").read_bytes() == damaged
    assert len(path.read_bytes().splitlines()) == 1
