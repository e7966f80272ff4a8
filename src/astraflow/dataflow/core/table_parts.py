"""The limiter, sampler and remover of a table, guarded: an impossible answer never reaches the core's state.

Built-in objects and the user's own go through the same calls. They cannot change what they are shown, and
their answers are checked before they are used. An object that raises, calls `exit()` or answers nonsense
causes a `ComponentError` that names it, and the run ends with that message.
"""

import operator
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from astraflow.algorithms.limiters import make_limiter
from astraflow.algorithms.own import called, check_methods
from astraflow.algorithms.removers import make_remover
from astraflow.algorithms.samplers import make_sampler
from astraflow.config import Config, Use
from astraflow.dataflow.config import TableConfig
from astraflow.errors import ComponentError, ConfigError
from astraflow.protocols import BatchObserver, CompleteGroup, TableView, TakenBatch

__all__ = ["TableParts", "component_name"]

_MEMORY = ("observe", "state", "restore")
"""The methods of a part with a memory. If one of them were missing, a restart would lose the memory."""


def component_name(kind: str, config: Config) -> str:
    """E.g. `sampler fifo`, or `sampler my_module:MySampler`."""
    name: str = config.use if isinstance(config, Use) else getattr(config, "name", "")
    return f"{kind} {name}"


class TableParts:
    """What bounds, picks and evicts the groups of one policy.

    Example: `TableParts("actor", table).pick(waiting, ready)` is the ids of the next batch, or None.
    Raises: ConfigError if a part of the user's own cannot be made, or does not work with the table's sizes.
    """

    def __init__(self, policy: str, table: TableConfig) -> None:
        self._sizes = table.sizes
        self._limiter = make_limiter(table.limiter)
        self._sampler = make_sampler(table.sampler)
        self._remover = make_remover(table.remover)
        configs = {"limiter": table.limiter, "sampler": table.sampler, "remover": table.remover}
        self._names = {
            kind: f"policy {policy!r}: {component_name(kind, config)}" for kind, config in configs.items()
        }
        self.sampler_name = component_name("sampler", table.sampler)
        """For messages that already name the policy."""
        self.max_tickets = self._checked_max_tickets()
        """Largest number of groups that may ever be in flight."""
        self.worst_staleness = self._checked_worst_staleness()
        """The worst staleness of a fresh group, as the sampler states it."""
        parts = {"limiter": self._limiter, "sampler": self._sampler, "remover": self._remover}
        learners = {kind: _learner(part, configs[kind], f"table.{kind}") for kind, part in parts.items()}
        self._learners = {kind: part for kind, part in learners.items() if part is not None}

    def _checked_max_tickets(self) -> int:
        what = f"{self._names['limiter']}.max_tickets()"
        try:
            given: Any = called(what, self._limiter.max_tickets, self._sizes)
        except ComponentError as err:
            raise ConfigError(str(err)) from err
        least = self._sizes.groups_per_batch
        if not _is_count(given) or given < least:
            raise ConfigError(f"{what} gave {given!r}; a batch needs at least {least} groups in flight")
        return given

    def _checked_worst_staleness(self) -> int:
        what = f"{self._names['sampler']}.worst_staleness()"
        try:
            given: Any = called(
                what, self._sampler.worst_staleness, self._sizes, max_tickets=self.max_tickets
            )
        except ComponentError as err:
            raise ConfigError(str(err)) from err
        if not _is_count(given) or given > self._sizes.max_staleness:
            raise ConfigError(
                f"{what} gave {given!r}; it is a number from 0 to max_staleness ({self._sizes.max_staleness})"
            )
        return given

    # --- questions --------------------------------------------------------------------------------

    def tickets(self, view: TableView) -> int:
        """How many groups may be in flight now. Raises: ComponentError."""
        what = f"{self._names['limiter']}.tickets()"
        given: Any = called(what, self._limiter.tickets, view, self._sizes)
        if not _is_count(given) or given > self.max_tickets:
            raise ComponentError(
                f"{what} gave {given!r}; it is a number from 0 to max_tickets() ({self.max_tickets})"
            )
        return given

    def pick(self, waiting: Collection[int], ready: Mapping[int, CompleteGroup]) -> tuple[int, ...] | None:
        """The groups of the next batch, or None if it has to wait. Raises: ComponentError."""
        num_groups = self._sizes.groups_per_batch
        what = f"{self._names['sampler']}.pick()"
        given: Any = called(what, self._sampler.pick, waiting, MappingProxyType(ready), num_groups)
        if given is None:
            return None
        picked = _checked_ids(what, given, ready)
        if len(picked) != num_groups:
            raise ComponentError(f"{what} gave {len(picked)} groups; a batch holds {num_groups}")
        return picked

    def remove(self, ready: Mapping[int, CompleteGroup]) -> tuple[int, ...]:
        """The complete groups that are evicted now; a batch of them always stays. Raises: ComponentError."""
        num_groups = self._sizes.groups_per_batch
        if len(ready) <= num_groups:
            return ()
        what = f"{self._names['remover']}.remove()"
        given: Any = called(what, self._remover.remove, MappingProxyType(ready), num_groups)
        removed = _checked_ids(what, given, ready)
        if len(ready) - len(removed) < num_groups:
            raise ComponentError(
                f"{what} gave {len(removed)} of {len(ready)} groups; a batch of {num_groups} must stay"
            )
        return removed

    # --- memory -----------------------------------------------------------------------------------

    def observe(self, batch: TakenBatch) -> None:
        """Tells the parts with a memory about a batch. Raises: ComponentError."""
        for kind, part in self._learners.items():
            called(f"{self._names[kind]}.observe()", part.observe, batch)

    @property
    def with_memory(self) -> Mapping[str, tuple[str, BatchObserver]]:
        """Kind -> (its name in messages, the part), for the parts whose state a snapshot has to keep."""
        return {kind: (self._names[kind], part) for kind, part in self._learners.items()}


def _learner(part: object, config: Config, where: str) -> BatchObserver | None:
    """The part, if it has a memory, else None. Raises: ConfigError if it has only some of the methods."""
    if isinstance(config, Use) and any(hasattr(part, method) for method in _MEMORY):
        check_methods(part, _MEMORY, config, where=where)
    return part if isinstance(part, BatchObserver) else None


def _is_count(value: object) -> bool:
    """Whether it is an integer that is not negative. `True` does not count as one."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checked_ids(what: str, given: object, ready: Mapping[int, CompleteGroup]) -> tuple[int, ...]:
    """The ids of ready groups, each once. Raises: ComponentError that names the first that is not."""
    ids = called(f"the answer {given!r} of {what}", _as_ints, cast("Any", given))
    seen: set[int] = set()
    for group_id in ids:
        if group_id not in ready:
            raise ComponentError(f"{what} gave group {group_id}, which is not ready")
        if group_id in seen:
            raise ComponentError(f"{what} gave group {group_id} twice")
        seen.add(group_id)
    return ids


def _as_ints(ids: Iterable[Any]) -> tuple[int, ...]:
    """The ids as plain integers; numpy's are accepted too. Raises: TypeError for anything else."""
    return tuple(int(operator.index(group_id)) for group_id in ids)
