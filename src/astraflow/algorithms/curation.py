"""Curation: decides which task is drawn next, with a chain built from a recipe's curators.

One curator of the chain proposes tasks in some order (`task_orders`); the others may skip them
(`task_gates`).
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field

from astraflow.algorithms.own import called, check_methods, own_object, state_of
from astraflow.algorithms.task_gates import (
    CurriculumConfig,
    GresoConfig,
    GresoFloorsConfig,
    PriorityConfig,
    SolvedConfig,
)
from astraflow.algorithms.task_orders import Shuffle, ShuffleConfig, Weighted, WeightedConfig
from astraflow.config import Use
from astraflow.errors import ConfigError, DataError
from astraflow.protocols import Curator, Stateful, TaskGate
from astraflow.types import MetricItem
from astraflow.types.facts import Outcome

__all__ = ["Curation", "CuratorConfig", "make_curation"]

CuratorConfig = Annotated[
    ShuffleConfig
    | WeightedConfig
    | SolvedConfig
    | CurriculumConfig
    | PriorityConfig
    | GresoConfig
    | GresoFloorsConfig
    | Use,
    Field(discriminator="name"),
]

_StateGetter = Callable[[str, Stateful], Mapping[str, Any] | msgspec.Raw | None]
"""From the name of a component and the component to its state."""

_MAX_LOOKS = 1000
"""Largest number of tasks that one draw may skip; about 10 ms."""


class Curation:
    """Draws the first proposed task that no gate skips, and counts why others were skipped.

    A draw that has skipped 1,000 tasks takes the next one proposed, whatever the gates say, and counts as
    `forced`, so a run never stops because all of its tasks look useless.
    Example: shuffle proposes 4, 2, 7; `solved` skips 4, `greso` skips 2: task 7 is drawn.
    """

    def __init__(
        self, order: Curator, gates: Sequence[tuple[str, TaskGate]], *, order_name: str = "shuffle"
    ) -> None:
        self._order = order
        self.order_name = order_name
        """The name of the curator that proposes, for messages."""
        self._gates = dict(gates)
        self._counts = {"selected": 0, "forced": 0}

    def next(self) -> int:
        """Index of the next task to draw. Raises: ComponentError if a curator fails."""
        self._counts["selected"] += 1
        for _ in range(_MAX_LOOKS):
            task_idx = self._proposed()
            if not self._is_skipped(task_idx):
                return task_idx
        self._counts["forced"] += 1
        return self._proposed()

    def _proposed(self) -> int:
        what = f"curator {self.order_name}.next()"
        return called(f"the answer of {what}", operator.index, called(what, self._order.next))

    def _is_skipped(self, task_idx: int) -> bool:
        for name, gate in self._gates.items():
            if reason := called(f"curator {name}.why_skip()", gate.why_skip, task_idx):
                key = f"{name}/skipped_{reason}"
                self._counts[key] = self._counts.get(key, 0) + 1
                return True
        return False

    @property
    def heeds_outcomes(self) -> bool:
        """Whether `observe` has any effect. If not, the caller need not build an outcome."""
        return bool(self._gates) or type(self._order) not in {Shuffle, Weighted}

    def observe(self, outcome: Outcome) -> None:
        """Passes the outcome of a group to every curator. Raises: ComponentError."""
        called(f"curator {self.order_name}.observe()", self._order.observe, outcome)
        for name, gate in self._gates.items():
            called(f"curator {name}.observe()", gate.observe, outcome)

    def metrics(self) -> tuple[MetricItem, ...]:
        """Counts since the start of the run (tasks selected, forced, and skipped by gate and reason), and the
        gates' current numbers (the finite floats of their state). Empty without gates.

        Raises: ComponentError.
        """
        if not self._gates:
            return ()
        values = {key: float(num) for key, num in self._counts.items()}
        for name, gate in self._gates.items():
            own = state_of(f"curator {name}", gate).items()
            values |= {
                f"{name}/{key}": value
                for key, value in own
                if isinstance(value, float) and math.isfinite(value)
            }
        return tuple(MetricItem(f"curation/{key}", value, "last") for key, value in values.items())

    def state(self, get: _StateGetter = state_of) -> dict[str, Any]:
        """The states of all curators, as returned by `get`, and the counts. Raises: ComponentError."""
        return {
            "order": get(f"curator {self.order_name}", self._order),
            "gates": {name: get(f"curator {name}", gate) for name, gate in self._gates.items()},
            "counts": self._counts,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned. Raises: DataError if it belongs to other curators;
        ComponentError."""
        if list(state["gates"]) != list(self._gates):
            raise DataError(
                f"the state is of the curators {', '.join(state['gates']) or 'none'}; the recipe names "
                f"{', '.join(self._gates) or 'none'}"
            )
        own = [(self.order_name, self._order, state["order"])]
        own += [(name, gate, state["gates"][name]) for name, gate in self._gates.items()]
        for name, curator, kept in own:
            # A curator that could not give its state when the run failed starts without one.
            if kept is not None:
                called(f"curator {name}.restore()", curator.restore, kept)
        self._counts = {str(key): int(num) for key, num in state["counts"].items()}


def make_curation(configs: Sequence[CuratorConfig], *, sources: Mapping[str, int], seed: int) -> Curation:
    """The chain over all tasks of the sources (name -> size), in the recipe's order.

    A user's own curator is a class or function that takes `num_tasks` and `seed` in addition to its `args`.
    It proposes tasks if it has `next`, and skips them if it has `why_skip`. If no curator proposes, `shuffle`
    does. Raises: ConfigError if one cannot be loaded, takes other arguments, or lacks a method, if two
    propose tasks, or if two have the same name.
    """
    num_tasks = sum(sources.values())
    orders: list[tuple[str, Curator]] = []
    gates: list[tuple[str, TaskGate]] = []
    for config in configs:
        match config:
            case ShuffleConfig():
                orders.append((config.name, Shuffle(num_tasks=num_tasks, seed=seed)))
            case WeightedConfig():
                order = Weighted(sources=sources, weights=config.weights, seed=seed)
                orders.append((config.name, order))
            case Use():
                own = _users_own(config, num_tasks=num_tasks, seed=seed)
                if callable(getattr(own, "next", None)):
                    orders.append((config.use, own))
                else:
                    gates.append((config.use, own))
            case _:  # one of `task_gates`
                name = f"{config.name}:{config.policy}" if config.policy else config.name
                gates.append((name, config.make(seed=seed)))
    if len(orders) > 1:
        raise ConfigError(f"tasks.curators: {len(orders)} of them propose tasks; choose one")
    names = [name for name, _ in gates]
    if len(set(names)) < len(names):
        raise ConfigError(f"tasks.curators: {', '.join(names)}: one of them is named twice")
    order_name, order = orders[0] if orders else ("shuffle", Shuffle(num_tasks=num_tasks, seed=seed))
    return Curation(order, gates, order_name=order_name)


def _users_own(config: Use, *, num_tasks: int, seed: int) -> Any:
    where = "tasks.curators"
    curator = own_object(config, where=where, methods=(), num_tasks=num_tasks, seed=seed)
    does = "why_skip" if callable(getattr(curator, "why_skip", None)) else "next"
    check_methods(curator, (does, "observe", "state", "restore"), config, where=where)
    return curator
