"""Calls the limiter, sampler and remover of a table, and checks their answers before the core uses them.

Built-in components and a user's own go through the same calls, and cannot change their arguments. If one
raises an error, calls `exit()`, or returns an impossible answer, the run ends with a `ComponentError`.
"""

import operator
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from astraflow.algorithms.own import call_component, check_methods, make_part
from astraflow.config import Config, Use
from astraflow.dataflow.config import TableConfig
from astraflow.errors import ComponentError, ConfigError
from astraflow.protocols import BatchObserver, CompleteGroup, Limiter, Remover, Sampler, TableView, TakenBatch

__all__ = ["TableParts", "component_name"]

_METHODS = {
    "limiter": ("max_tickets", "tickets"), "sampler": ("pick", "worst_staleness"), "remover": ("remove",)
}  # fmt: skip
_MEMORY = ("observe", "state", "restore")
"""Methods of a stateful component. Without one of them, a restart would lose its state."""


def component_name(kind: str, config: Config) -> str:
    """The name of a component in messages. Example: `sampler fifo`, or `sampler my_module:MySampler`."""
    name: str = config.use if isinstance(config, Use) else getattr(config, "name", "")
    return f"{kind} {name}"


class TableParts:
    """The limiter, sampler and remover of one policy's table.

    Example: `TableParts("actor", table).pick(waiting, ready, 32)` returns the ids of the next batch, or None.

    Raises: ConfigError if a user's own component cannot be created or does not work with the table's sizes.
    """

    def __init__(self, policy: str, table: TableConfig) -> None:
        self._sizes = table.sizes
        configs = {"limiter": table.limiter, "sampler": table.sampler, "remover": table.remover}
        parts = {kind: make_part(config, f"table.{kind}", _METHODS[kind]) for kind, config in configs.items()}
        self._limiter: Limiter = parts["limiter"]
        self._sampler: Sampler = parts["sampler"]
        self._remover: Remover = parts["remover"]
        self._names = {
            kind: f"policy {policy!r}: {component_name(kind, config)}" for kind, config in configs.items()
        }
        self.sampler_name = component_name("sampler", table.sampler)
        """For messages that already name the policy."""
        self.max_tickets = self._read_max_tickets()
        """Largest number of groups that may ever be in flight."""
        self.worst_staleness = self._read_worst_staleness()
        """The worst staleness of a group in its first batch, as stated by the sampler."""
        learners = {kind: _as_observer(part, configs[kind], f"table.{kind}") for kind, part in parts.items()}
        self._observers = {kind: part for kind, part in learners.items() if part is not None}

    def _read_max_tickets(self) -> int:
        what = f"{self._names['limiter']}.max_tickets()"
        try:
            answer: Any = call_component(what, self._limiter.max_tickets, self._sizes)
        except ComponentError as err:
            raise ConfigError(str(err)) from err
        least = self._sizes.groups_per_batch
        if not _is_count(answer) or answer < least:
            raise ConfigError(f"{what} gave {answer!r}; a batch needs at least {least} groups in flight")
        return answer

    def _read_worst_staleness(self) -> int:
        what = f"{self._names['sampler']}.worst_staleness()"
        try:
            answer: Any = call_component(
                what, self._sampler.worst_staleness, self._sizes, max_tickets=self.max_tickets
            )
        except ComponentError as err:
            raise ConfigError(str(err)) from err
        if not _is_count(answer) or answer > self._sizes.max_staleness:
            raise ConfigError(
                f"{what} gave {answer!r}; it is a number from 0 to max_staleness "
                f"({self._sizes.max_staleness})"
            )
        return answer

    def tickets(self, view: TableView) -> int:
        """How many groups may be in flight now. Raises: ComponentError."""
        what = f"{self._names['limiter']}.tickets()"
        answer: Any = call_component(what, self._limiter.tickets, view, self._sizes)
        if not _is_count(answer) or answer > self.max_tickets:
            raise ComponentError(
                f"{what} gave {answer!r}; it is a number from 0 to max_tickets() ({self.max_tickets})"
            )
        return answer

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> tuple[int, ...] | None:
        """The ids of the next batch's fresh groups, or None if it must wait. Raises: ComponentError."""
        what = f"{self._names['sampler']}.pick()"
        answer: Any = call_component(what, self._sampler.pick, waiting, MappingProxyType(ready), num_groups)
        if answer is None:
            return None
        picked = _check_ids(what, answer, ready)
        if len(picked) != num_groups:
            raise ComponentError(f"{what} gave {len(picked)} groups; a batch holds {num_groups}")
        return picked

    def remove(self, ready: Mapping[int, CompleteGroup]) -> tuple[int, ...]:
        """The ids of the complete groups to evict now. At least one batch remains. Raises: ComponentError."""
        num_groups = self._sizes.groups_per_batch
        if len(ready) <= num_groups:
            return ()
        what = f"{self._names['remover']}.remove()"
        answer: Any = call_component(what, self._remover.remove, MappingProxyType(ready), num_groups)
        removed = _check_ids(what, answer, ready)
        if len(ready) - len(removed) < num_groups:
            raise ComponentError(
                f"{what} gave {len(removed)} of {len(ready)} groups; a batch of {num_groups} must stay"
            )
        return removed

    def observe(self, batch: TakenBatch) -> None:
        """Passes a taken batch to the stateful components. Raises: ComponentError."""
        for kind, part in self._observers.items():
            call_component(f"{self._names[kind]}.observe()", part.observe, batch)

    @property
    def with_memory(self) -> Mapping[str, tuple[str, BatchObserver]]:
        """Kind -> (name in messages, component), for the components whose state snapshots must keep."""
        return {kind: (self._names[kind], part) for kind, part in self._observers.items()}


def _as_observer(part: object, config: Config, where: str) -> BatchObserver | None:
    """The component if it is stateful, else None. Raises: ConfigError if it lacks some of the methods."""
    if isinstance(config, Use) and any(hasattr(part, method) for method in _MEMORY):
        check_methods(part, _MEMORY, config, where=where)
    return part if isinstance(part, BatchObserver) else None


def _is_count(value: object) -> bool:
    """Whether a value is an integer >= 0. `True` does not count as an integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_ids(what: str, answer: object, ready: Mapping[int, CompleteGroup]) -> tuple[int, ...]:
    """Returns an answer as ids. Raises: ComponentError if one of them is not ready or comes twice."""
    ids = call_component(f"the answer {answer!r} of {what}", _to_ints, cast("Any", answer))
    seen: set[int] = set()
    for group_id in ids:
        if group_id not in ready:
            raise ComponentError(f"{what} gave group {group_id}, which is not ready")
        if group_id in seen:
            raise ComponentError(f"{what} gave group {group_id} twice")
        seen.add(group_id)
    return ids


def _to_ints(ids: Iterable[Any]) -> tuple[int, ...]:
    """Converts ids to plain integers. Accepts numpy integers too. Raises: TypeError for anything else."""
    return tuple(int(operator.index(group_id)) for group_id in ids)
