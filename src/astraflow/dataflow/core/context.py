"""What every rule of the core works on: the plan, the state, the algorithms, and the decision in the making.

The rules are functions `(ctx, command) -> answer`, in one file per subject. `Context` is the only object that
they share.
"""

import hashlib
from typing import NoReturn

from astraflow.algorithms.curation import make_curation
from astraflow.algorithms.filters import RepetitionFilter
from astraflow.config import Use
from astraflow.dataflow.core.commands import Event
from astraflow.dataflow.core.plan import RunPlan, Schedule
from astraflow.dataflow.core.state import PolicyState, RunStateData
from astraflow.dataflow.core.table_parts import TableParts
from astraflow.dataflow.core.valuation import Valuation
from astraflow.errors import RefusedError

__all__ = ["Context", "derived_seed", "refuse"]

_NUM_SEED_BITS = 53
"""Seeds stay exact in JSON readers that hold numbers as doubles."""


class Context:
    """The core's insides. `begin` opens a command; `emit` and `wake` collect its decision."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        """The plan with the schedule that holds now."""
        self.state = RunStateData(
            policies={name: PolicyState() for name in plan.policies}, schedule=plan.schedule
        )
        self.parts = {name: TableParts(name, p.table) for name, p in plan.policies.items()}
        self.valuations = {name: Valuation(p.table) for name, p in plan.policies.items()}
        # A filter of the user's own may read how much a trajectory repeats itself, so it counts as well.
        self.repetition_of = frozenset(
            name
            for name, p in plan.policies.items()
            if any(isinstance(config, RepetitionFilter | Use) for config in p.table.filters)
        )
        self.num_tasks = sum(plan.sources.values())
        self.curation = make_curation(plan.curators, sources=plan.sources, seed=plan.seed)
        self.fresh_at: dict[str, dict[int, None]] = {}
        """The groups of `state.fresh` by their homes, in the same order. Derived, so in no snapshot."""
        self.lost_homes: set[str] = set()
        """The homes in `fresh_at` whose services are gone. Derived as well."""
        self.now_s = 0.0
        self.events: list[Event] = []
        self.wakes: dict[str, None] = {}

    def set_schedule(self, schedule: Schedule) -> None:
        """Lets another schedule hold from now on."""
        self.state.schedule = schedule
        self.plan = self.plan.with_schedule(schedule)

    def begin(self, now_s: float) -> None:
        """Starts the decision of one command."""
        self.now_s = now_s
        self.events = []
        self.wakes = {}

    def add_fresh(self, group_id: int) -> None:
        """Notes that a group has episodes that were never leased."""
        home = self.state.groups[group_id].home
        self.state.fresh[group_id] = None
        self.fresh_at.setdefault(home, {})[group_id] = None
        if home not in self.state.workers:
            self.lost_homes.add(home)

    def drop_fresh(self, group_id: int, home: str) -> None:
        """Notes that a group has no episode left that was never leased."""
        if group_id in self.state.fresh:
            del self.state.fresh[group_id]
            del self.fresh_at[home][group_id]
            if not self.fresh_at[home]:
                del self.fresh_at[home]
                self.lost_homes.discard(home)

    def emit(self, event: Event) -> None:
        """Adds an event to the decision."""
        self.events.append(event)

    def wake(self, topic: str) -> None:
        """Adds a topic whose waiters should ask again."""
        self.wakes[topic] = None

    @property
    def is_running(self) -> bool:
        """False once the run is over."""
        return self.state.run_state == "running"

    def policy(self, name: str) -> PolicyState:
        """The state of a trained policy. Raises: RefusedError for another name."""
        policy = self.state.policies.get(name)
        if policy is None:
            choices = ", ".join(self.state.policies)
            refuse("unknown_policy", f"policy {name!r} is not trained in this run (trained: {choices})", 404)
        return policy


def refuse(code: str, message: str, status: int = 409) -> NoReturn:
    """Raises RefusedError with a stable code."""
    raise RefusedError(message, code=code, status=status)


def derived_seed(*parts: object) -> int:
    """A seed in `[0, 2**53)` that depends on nothing but `parts`."""
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _NUM_SEED_BITS)
