"""The context of every rule of the core: the plan, the state, the algorithms, and the decision being made.

The rules are functions `(ctx, command) -> answer`, one file per subject. They share only `Context`.

"""

import hashlib
import math
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

__all__ = ["Context", "derive_seed", "refuse"]

_NUM_SEED_BITS = 53
"""Seeds of this size stay exact in JSON readers that store numbers as doubles."""


class Context:
    """Everything that the core holds. `begin` starts a command; `emit` and `wake` collect its decision."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        """The plan with the schedule that holds now."""
        self.state = RunStateData(
            policies={name: PolicyState() for name in plan.policies}, schedule=plan.schedule
        )
        self.parts = {name: TableParts(name, p.table) for name, p in plan.policies.items()}
        self.valuations = {name: Valuation(p.table) for name, p in plan.policies.items()}
        # A user's own part may read how much a trajectory repeats itself, so it counts too.
        has_own_curator = any(isinstance(config, Use) for config in plan.curators)
        self.repetition_of = frozenset(
            name
            for name, p in plan.policies.items()
            if has_own_curator
            or self.valuations[name].has_own
            or any(isinstance(config, RepetitionFilter) for config in p.table.filters)
        )
        self.num_tasks = sum(plan.sources.values())
        self.curation = make_curation(plan.curators, sources=plan.sources, seed=plan.seed)
        self.fresh_by_worker: dict[str, dict[int, None]] = {}
        """`state.fresh` by preferred service, in the same order. Derived, so not in snapshots."""
        self.gone_workers: set[str] = set()
        """The services in `fresh_by_worker` that are gone. Derived too."""
        self.oldest_ready: dict[str, int] = {}
        """Policy -> a version that no ready group's oldest token is before. Derived; not known at first."""
        self.now_s = 0.0
        self.events: list[Event] = []
        self.wakes: dict[str, None] = {}

    def set_schedule(self, schedule: Schedule) -> None:
        """Replaces the schedule from now on."""
        self.state.schedule = schedule
        self.plan = self.plan.with_schedule(schedule)

    def begin(self, now_s: float) -> None:
        """Starts a new decision, for one command."""
        self.now_s = now_s
        self.events = []
        self.wakes = {}

    def add_fresh(self, group_id: int) -> None:
        """Records that a group has episodes that were never leased."""
        preferred = self.state.groups[group_id].preferred_worker
        self.state.fresh[group_id] = None
        self.fresh_by_worker.setdefault(preferred, {})[group_id] = None
        if preferred not in self.state.workers:
            self.gone_workers.add(preferred)

    def drop_fresh(self, group_id: int, preferred_worker: str) -> None:
        """Records that every episode of a group has been leased at least once."""
        if group_id in self.state.fresh:
            del self.state.fresh[group_id]
            groups = self.fresh_by_worker[preferred_worker]
            del groups[group_id]
            if not groups:
                del self.fresh_by_worker[preferred_worker]
                self.gone_workers.discard(preferred_worker)

    def emit(self, event: Event) -> None:
        """Adds an event to the decision."""
        self.events.append(event)

    def wake(self, topic: str) -> None:
        """Adds a topic whose waiters should ask again."""
        self.wakes[topic] = None

    def num_steps(self, name: str) -> int:
        """Number of steps after which a policy's training ends, as far as is known."""
        most = self.plan.policies[name].num_steps
        stops_at = self.state.policies[name].stops_at
        return most if stops_at is None else min(most, stops_at)

    def num_fresh(self, name: str) -> int:
        """Number of fresh groups in the next batch: what replayed ones don't replace by `replay.share`."""
        table = self.plan.policies[name].table
        policy = self.state.policies[name]
        if not table.replay.share:
            return table.batch_groups
        version = policy.session.version_at(policy.taken) if policy.session else policy.newest
        ages = [version - entry.group.oldest_version for entry in policy.replay.values()]
        return table.batch_groups - min(sum(age <= table.max_staleness for age in ages), table.max_replayed)

    @property
    def draws_left(self) -> float:
        """Number of groups that may still be drawn. Infinite if the plan has no epochs."""
        if not self.plan.stop.epochs:
            return math.inf
        state = self.state
        num_drawn = state.next_group_id - (state.num_pushed - len(state.pushed_queue))
        return max(0, self.plan.most_drawn - num_drawn) + len(state.pushed_queue)

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


def derive_seed(*parts: object) -> int:
    """Returns a seed in `[0, 2**53)` that depends only on `parts`."""
    text = "/".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _NUM_SEED_BITS)
