"""Curation: decides which task is drawn next, with the chain of curators that a recipe lists.

One curator of the chain proposes tasks in some order (`task_orders`). The others may skip them
(`task_gates`).
"""

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field

from astraflow.algorithms.own import call_component, check_methods, make_own_object, read_state
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
"""Takes the name of a component and the component; returns its state."""

_MAX_LOOKS = 1000
"""Largest number of tasks that one draw may skip. Skipping that many takes about 10 ms."""


class Curation:
    """Draws the first proposed task that no gate skips, and counts why others were skipped.

    A draw that has skipped 1,000 tasks takes the next proposed task without asking the gates, and counts as
    `forced`. So a run never stops because all of its tasks look useless.
    Example: shuffle proposes 4, 2, 7; `solved` skips 4 and `greso` skips 2, so task 7 is drawn.
    """

    def __init__(
        self,
        order: Curator,
        gates: Sequence[tuple[str, TaskGate]],
        *,
        order_name: str = "shuffle",
        own: Collection[str] = (),
    ) -> None:
        """`own`: names of the curators that are the user's own."""
        self._own = own
        self._order = order
        self.order_name = order_name
        """Name of the curator that proposes tasks, for messages."""
        self._gates = dict(gates)
        self._counts = {"selected": 0, "forced": 0}

    def next(self) -> int:
        """Index of the next task to draw. Raises: ComponentError if a curator fails."""
        self._counts["selected"] += 1
        for _ in range(_MAX_LOOKS):
            task_idx = self._propose()
            if not self._is_skipped(task_idx):
                return task_idx
        self._counts["forced"] += 1
        return self._propose()

    def _propose(self) -> int:
        what = f"curator {self.order_name}.next()"
        return call_component(f"the answer of {what}", operator.index, call_component(what, self._order.next))

    def _is_skipped(self, task_idx: int) -> bool:
        for name, gate in self._gates.items():
            if reason := call_component(f"curator {name}.why_skip()", gate.why_skip, task_idx):
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
        call_component(f"curator {self.order_name}.observe()", self._order.observe, outcome)
        for name, gate in self._gates.items():
            call_component(f"curator {name}.observe()", gate.observe, outcome)

    def metrics(self) -> tuple[MetricItem, ...]:
        """Counts since the start of the run (tasks selected, forced, and skipped per gate and reason), the
        finite floats in each gate's state, and the finite numbers in the state of each curator of the user's
        own. Empty without gates and own curators.

        Raises: ComponentError.
        """
        order = {self.order_name: self._order} if self.order_name in self._own else {}
        if not order and not self._gates:
            return ()
        values = {key: float(num) for key, num in self._counts.items()}
        for name, curator in {**order, **self._gates}.items():
            kinds = (float, int) if name in self._own else (float,)
            state = read_state(f"curator {name}", curator)
            values |= {
                f"{name}/{key}": float(value)
                for key, value in state.items()
                if type(value) in kinds and math.isfinite(value)
            }
        return tuple(MetricItem(f"curation/{key}", value, "last") for key, value in values.items())

    def state(self, get: _StateGetter = read_state) -> dict[str, Any]:
        """The counts, and the state of each curator as `get` returns it. Raises: ComponentError."""
        return {
            "order": get(f"curator {self.order_name}", self._order),
            "gates": {name: get(f"curator {name}", gate) for name, gate in self._gates.items()},
            "counts": self._counts,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned.

        Raises: DataError if the state belongs to other curators; ComponentError if a curator fails.
        """
        if list(state["gates"]) != list(self._gates):
            raise DataError(
                f"the state belongs to the curators {', '.join(state['gates']) or 'none'}; the recipe names "
                f"{', '.join(self._gates) or 'none'}"
            )
        curators = [(self.order_name, self._order, state["order"])]
        curators += [(name, gate, state["gates"][name]) for name, gate in self._gates.items()]
        for name, curator, curator_state in curators:
            # A curator that could not return its state when the run failed starts without one.
            if curator_state is not None:
                call_component(f"curator {name}.restore()", curator.restore, curator_state)
        self._counts = {str(key): int(num) for key, num in state["counts"].items()}


def make_curation(configs: Sequence[CuratorConfig], *, sources: Mapping[str, int], seed: int) -> Curation:
    """The chain over all tasks of the sources (name -> size), in the recipe's order.

    A user's own curator is a class or function that takes `num_tasks` and `seed` in addition to its `args`.
    It proposes tasks if it has `next`, and skips them if it has `why_skip`. If no curator proposes tasks,
    `shuffle` is used.
    Raises: ConfigError if a curator cannot be loaded, takes other arguments, or lacks a method, if two
    curators propose tasks, or if two have the same name.
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
                curator = _make_users_own(config, num_tasks=num_tasks, seed=seed)
                if callable(getattr(curator, "next", None)):
                    orders.append((config.use, curator))
                else:
                    gates.append((config.use, curator))
            case _:  # one of `task_gates`
                name = f"{config.name}:{config.policy}" if config.policy else config.name
                gates.append((name, config.make(seed=seed)))
    if len(orders) > 1:
        proposers = ", ".join(name for name, _ in orders)
        raise ConfigError(f"tasks.curators: {len(orders)} curators propose tasks ({proposers}); keep one")
    names = [name for name, _ in gates]
    if len(set(names)) < len(names):
        raise ConfigError(f"tasks.curators: a name occurs twice in {', '.join(names)}; each may occur once")
    order_name, order = orders[0] if orders else ("shuffle", Shuffle(num_tasks=num_tasks, seed=seed))
    own = [config.use for config in configs if isinstance(config, Use)]
    return Curation(order, gates, order_name=order_name, own=own)


def _make_users_own(config: Use, *, num_tasks: int, seed: int) -> Any:
    where = "tasks.curators"
    curator = make_own_object(config, where=where, methods=(), num_tasks=num_tasks, seed=seed)
    main_method = "why_skip" if callable(getattr(curator, "why_skip", None)) else "next"
    check_methods(curator, (main_method, "observe", "state", "restore"), config, where=where)
    return curator
