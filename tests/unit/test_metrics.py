import json

import msgspec
import pytest

from astraflow.metrics import MetricRow, row_from_record
from astraflow.types import EvalRecord, MetricItem, StepRecord

STEP = StepRecord(
    policy="actor", step=0, version=1, at_s=12.5, reward_mean=0.5, staleness_mean=0.25, staleness_max=1,
    num_groups=1, num_samples=2, num_trained_tokens=3, num_discarded_groups=4,
    metrics=(MetricItem("loss", 0.25), MetricItem("episode/turns", 3.0)),
)  # fmt: skip
EVAL = EvalRecord(
    policy="actor", version=0, step=0, eval_set="heldout", num_tasks=1, num_samples=0, num_failed=1,
    score_mean=None, score_stderr=0.0, at_s=13.5,
    metrics=(MetricItem("turns", 3.0), MetricItem("pass@1", 0.5)),
)  # fmt: skip


def test_a_step_is_a_flat_row_and_counts_from_1() -> None:
    assert row_from_record(STEP).flat == {
        "kind": "step",
        "policy": "actor",
        "step": 1,
        "version": 1,
        "at_s": 12.5,
        "reward_mean": 0.5,
        "staleness_mean": 0.25,
        "staleness_max": 1,
        "num_groups": 1,
        "num_samples": 2,
        "num_trained_tokens": 3,
        "num_discarded_groups": 4,
        "num_replayed_groups": 0,
        "loss": 0.25,
        "episode/turns": 3.0,
    }


def test_an_evaluation_is_a_flat_row_whose_episodes_metrics_are_named_as_those_of_training() -> None:
    row = row_from_record(EVAL).flat
    assert (row["kind"], row["eval_set"], row["step"], row["score_mean"]) == ("eval", "heldout", 0, None)
    assert (row["episode/turns"], row["pass@1"]) == (3.0, 0.5)


@pytest.mark.parametrize("record", [STEP, EVAL])
def test_a_row_is_read_back_from_its_columns(record: StepRecord | EvalRecord) -> None:
    row = row_from_record(record)
    assert MetricRow.from_flat(json.loads(json.dumps(row.flat))) == row


@pytest.mark.parametrize("name", ["policy", "step", "kind", "reward_mean", "score_mean", "eval_set"])
def test_a_metric_does_not_overwrite_a_column(name: str) -> None:
    row = row_from_record(msgspec.structs.replace(STEP, metrics=(MetricItem(name, 77.0),)))
    assert row.flat[f"metric/{name}"] == 77.0
    assert 77.0 not in [value for column, value in row.flat.items() if column != f"metric/{name}"]
