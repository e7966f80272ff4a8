"""The chain of a recipe's curators: one proposes tasks in some order, the others may pass over them."""

from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.algorithms.shuffle import Shuffle
from astraflow.algorithms.weighted import Weighted
from astraflow.errors import DataError
from astraflow.facts import Outcome
from astraflow.protocols import Curator, TaskGate
from astraflow.types import MetricItem

__all__ = ["Curation"]

_MAX_LOOKS = 1000
"""Tasks that one draw may pass over; about 10 ms."""


class Curation:
    """Draws the first proposed task that no gate passes over, and counts why others were.

    A draw that passed over 1,000 tasks takes the next one proposed, whatever the gates say, and counts as
    `forced`: a run never stops because all of its tasks look useless.
    Example: shuffle proposes 4, 2, 7; `solved` skips 4, `greso` skips 2: task 7 is drawn.
    """

    def __init__(self, order: Curator, gates: Sequence[tuple[str, TaskGate]]) -> None:
        self._order = order
        self._gates = dict(gates)
        self._counts = {"selected": 0, "forced": 0}

    def next(self) -> int:
        """Index of the next task to draw."""
        self._counts["selected"] += 1
        for _ in range(_MAX_LOOKS):
            task_idx = self._order.next()
            if not self._is_skipped(task_idx):
                return task_idx
        self._counts["forced"] += 1
        return self._order.next()

    def _is_skipped(self, task_idx: int) -> bool:
        for name, gate in self._gates.items():
            if reason := gate.why_skip(task_idx):
                key = f"{name}/skipped_{reason}"
                self._counts[key] = self._counts.get(key, 0) + 1
                return True
        return False

    @property
    def heeds_outcomes(self) -> bool:
        """Whether `observe` changes anything: an outcome takes longer to put together than to ignore."""
        return bool(self._gates) or type(self._order) not in {Shuffle, Weighted}

    def observe(self, outcome: Outcome) -> None:
        """Tells every curator how a group ended."""
        for curator in (self._order, *self._gates.values()):
            curator.observe(outcome)

    def metrics(self) -> tuple[MetricItem, ...]:
        """Since the run's start: tasks selected, forced and skipped, by gate and reason; and the gates' own
        numbers now (those of their state that are floats). Nothing for a plain order."""
        if not self._gates:
            return ()
        values = {key: float(num) for key, num in self._counts.items()}
        for name, gate in self._gates.items():
            own = gate.state().items()
            values |= {f"{name}/{key}": value for key, value in own if isinstance(value, float)}
        return tuple(MetricItem(f"curation/{key}", value, "last") for key, value in values.items())

    def state(self) -> dict[str, Any]:
        """State of all curators, and the counts."""
        gates = {name: gate.state() for name, gate in self._gates.items()}
        return {"order": self._order.state(), "gates": gates, "counts": self._counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken. Raises: DataError if it is of other curators."""
        if list(state["gates"]) != list(self._gates):
            raise DataError(
                f"the state is of the curators {', '.join(state['gates']) or 'none'}; the recipe names "
                f"{', '.join(self._gates) or 'none'}"
            )
        self._order.restore(state["order"])
        for name, gate in self._gates.items():
            gate.restore(state["gates"][name])
        self._counts = {str(key): int(num) for key, num in state["counts"].items()}
