"""Metrics: a metric is (name, value, reduction), and a `MetricRow` has those of a step or an evaluation.

`metrics.jsonl` and every tracker get one row per committed step or finished evaluation: a flat mapping from
names to numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from astraflow.errors import WireError
from astraflow.types import EvalRecord, MetricItem, StepRecord

__all__ = [
    "MetricRow",
    "eval_from_columns",
    "row_from_record",
]

_COLUMNS = frozenset({"kind", *StepRecord.__struct_fields__, *EvalRecord.__struct_fields__})
"""Column names that metrics cannot have."""
_EPISODE = "episode/"
"""Prefix of the metrics that workflows add to episodes."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """The numbers of one committed step, or of one finished evaluation, of one policy.

    Example: `MetricRow("step", "actor", 1, 1, 1700000000.0, {"reward_mean": 0.5, "loss": 0.1})`.
    """

    kind: Literal["step", "eval"]
    policy: str
    step: int
    """Number of steps done: 1 after the first step, 0 for an evaluation of the starting weights."""
    version: int
    """The version that the step produced, or that was evaluated."""
    at_s: float
    """Unix time of the commit, or of the end of the evaluation."""
    values: Mapping[str, float | None]
    """Finite numbers by name; None if there is none, as for the score of a failed evaluation."""
    eval_set: str = ""
    """The evaluation set; empty for a step."""
    best_by: str = ""
    """The rule by which the evaluated version was the best so far; empty if it was not, and for a step."""

    @property
    def flat(self) -> dict[str, Any]:
        """All columns as one mapping, in the order of writing."""
        columns: dict[str, Any] = {"kind": self.kind, "policy": self.policy}
        if self.kind == "eval":
            columns |= {"eval_set": self.eval_set, "best_by": self.best_by}
        return {**columns, "step": self.step, "version": self.version, "at_s": self.at_s, **self.values}

    @property
    def named(self) -> dict[str, float]:
        """The numbers that are not None, under names that are unique in the run.

        Example: `actor/loss` of a step, `actor/eval/heldout/score_mean` of an evaluation.
        """
        prefix = f"{self.policy}/eval/{self.eval_set}" if self.kind == "eval" else self.policy
        return {f"{prefix}/{name}": value for name, value in self.values.items() if value is not None}

    @classmethod
    def from_flat(cls, columns: Mapping[str, Any]) -> "MetricRow":
        """The inverse of `flat`. Raises: WireError if the columns are not those of a row."""
        rest = dict(columns)
        named = {name: rest.pop(name, "") for name in cls.__dataclass_fields__ if name != "values"}
        try:
            return msgspec.convert({**named, "values": rest}, cls)
        except msgspec.ValidationError as err:
            raise WireError(f"not a row of metrics: {err}") from err


def row_from_record(record: StepRecord | EvalRecord) -> MetricRow:
    """Converts a record to a row.

    Metrics of a workflow have the prefix `episode/` in both kinds of rows. A metric with the name of a column
    of the record gets the prefix `metric/`.
    """
    is_step = isinstance(record, StepRecord)
    fields = msgspec.structs.asdict(record)
    metrics = cast("tuple[MetricItem, ...]", fields.pop("metrics"))
    eval_set = str(fields.pop("eval_set", ""))
    best_by = str(fields.pop("best_by", ""))
    policy, step, version, at_s = (fields.pop(name) for name in ("policy", "step", "version", "at_s"))
    named = {
        item.name if is_step or item.name.startswith("pass@") else f"{_EPISODE}{item.name}": item.value
        for item in metrics
    }
    values = {(f"metric/{name}" if name in _COLUMNS else name): value for name, value in named.items()}
    return MetricRow(
        kind="step" if is_step else "eval",
        policy=policy,
        step=step + 1 if is_step else step,
        version=version,
        at_s=at_s,
        values={**fields, **values},
        eval_set=eval_set,
        best_by=best_by,
    )


def eval_from_columns(columns: Mapping[str, Any]) -> EvalRecord:
    """Converts the columns of a row back to an evaluation, without the reductions of its metrics.

    Raises: msgspec.ValidationError if the columns are not those of an evaluation.
    """
    fields = {name: value for name, value in columns.items() if name in EvalRecord.__struct_fields__}
    rest = {name: value for name, value in columns.items() if name not in _COLUMNS}
    metrics = [
        MetricItem(name.removeprefix("metric/").removeprefix(_EPISODE), value) for name, value in rest.items()
    ]
    return msgspec.convert({**fields, "metrics": msgspec.to_builtins(metrics)}, EvalRecord)
