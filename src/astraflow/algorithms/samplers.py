"""Samplers: choose the complete groups of a batch, and the trained groups to replay.

Every take first drops the groups that would be staler than `max_staleness`, whatever the sampler.
"""

from collections.abc import Collection, Mapping
from heapq import nlargest, nsmallest
from itertools import islice
from typing import Annotated, Literal

from pydantic import Field, model_validator

from astraflow.algorithms.seeded import chance
from astraflow.config import Config, Use
from astraflow.protocols import CompleteGroup, TableSizes

__all__ = [
    "EdfSampler",
    "FifoSampler",
    "OnPolicySampler",
    "ReplayConfig",
    "SamplerConfig",
    "SweepSampler",
    "WindowSampler",
]


class FifoSampler(Config):
    """Takes groups in the order in which they were drawn, so it waits for slow ones and drops none; worst
    staleness is `tickets / groups_per_batch - 1 + L`. The `fifo` of AstraFlow's prototype is `sweep`."""

    name: Literal["fifo"] = "fifo"

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> tuple[int, ...] | None:
        """The first `num_groups` of `waiting` if all are in `ready`. The batch waits for slow groups.

        Example: groups 4, 5 and 6 were drawn; 5 and 6 are ready. A batch of two waits for group 4.
        """
        if len(ready) < num_groups:
            return None
        head = tuple(islice(waiting, num_groups))
        return head if all(group_id in ready for group_id in head) else None

    def worst_staleness(self, sizes: TableSizes, *, max_tickets: int) -> int:
        """`ceil(max_tickets / n) - 1 + L`, n = `least_fresh`, at most `max_staleness`.

        A group drawn at version v has at most `max_tickets - 1` groups before it, so it is taken at version
        `v + ceil(max_tickets / n) - 1` at the latest; its oldest token is of version `v - L` or newer. The
        sweep at the take acts only after a trainer's restart, when versions jump.
        """
        num_batches = -(-max_tickets // sizes.least_fresh)
        return min(num_batches - 1 + sizes.engine_lag, sizes.max_staleness)


class SweepSampler(Config):
    """Takes groups in the order in which they completed, which AstraFlow's prototype calls `fifo`; groups
    over `max_staleness` at the take are dropped as stale."""

    name: Literal["sweep"] = "sweep"

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> tuple[int, ...] | None:
        """The first `num_groups` of `ready`; slow groups are skipped and may become stale.

        Example: groups 4, 5 and 6 were drawn; 6 completed first, and then 5. A batch of two holds 6 and 5.
        """
        return tuple(islice(ready, num_groups)) if len(ready) >= num_groups else None

    def worst_staleness(self, sizes: TableSizes, *, max_tickets: int) -> int:
        """`max_staleness`: the take drops staler groups. Without that, nothing would bound a slow group."""
        return sizes.max_staleness


class EdfSampler(Config):
    """Takes complete groups with the oldest tokens first; groups over `max_staleness` at the take are dropped
    as stale."""

    name: Literal["edf"] = "edf"

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> tuple[int, ...] | None:
        """The `num_groups` of `ready` with the earliest deadlines. A group's deadline is the last trainer
        version at which it may be taken, `oldest_version + max_staleness`. Ties are broken by draw order.

        Example: groups 4 (version 3) and 5 (version 1) are ready. A batch of one holds 5.
        """
        if len(ready) < num_groups:
            return None
        return tuple(nsmallest(num_groups, ready, key=lambda i: (ready[i].oldest_version, i)))

    def worst_staleness(self, sizes: TableSizes, *, max_tickets: int) -> int:
        """`max_staleness`: a group that completes after its deadline is dropped at the take."""
        return sizes.max_staleness


class WindowSampler(Config):
    """The same as `fifo`, except that groups drawn soon after a slow group may overtake it; worst staleness
    is `(tickets + span - 2) // groups_per_batch + L`, and must not exceed `max_staleness`."""

    name: Literal["window"] = "window"
    span: int = Field(default=128, ge=1)
    """Number of draws, counted from the oldest waiting group, among which a batch is chosen."""

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> tuple[int, ...] | None:
        """The first `num_groups` ready groups within the span, in draw order.

        This lies between `fifo`, where no group overtakes another, and `sweep`, where any group may. If the
        span holds fewer groups than a batch, because others were filtered, it is widened to one batch, and
        the choice is that of `fifo`.
        Example: span 4, batches of 2, groups 4 to 9 wait, and all but 4 are ready. The first batch holds 5
        and 6; the second waits for 4, and holds 4 and 7.
        """
        if len(ready) < num_groups:
            return None
        end = next(iter(waiting)) + self.span
        head = islice(waiting, max(num_groups, self.span))
        within = [i for position, i in enumerate(head) if i < end or position < num_groups]
        picked = tuple(islice((i for i in within if i in ready), num_groups))
        return picked if len(picked) == num_groups else None

    def worst_staleness(self, sizes: TableSizes, *, max_tickets: int) -> int:
        """`(max_tickets + max(span, groups_per_batch) - 2) // least_fresh + L`, at most `max_staleness`.

        A group has at most `max_tickets - 1` groups before it when it is drawn, and at most `max(span,
        groups_per_batch) - 1` later ones overtake it.
        """
        num_overtaking = max(self.span, sizes.groups_per_batch) - 1
        num_batches = (max_tickets - 1 + num_overtaking) // sizes.least_fresh
        return min(num_batches + sizes.engine_lag, sizes.max_staleness)


class OnPolicySampler(SweepSampler):
    """Takes only groups that were generated entirely by the version that is updated; needs `max_staleness:
    0`."""

    name: Literal["on_policy"] = "on_policy"  # pyright: ignore[reportIncompatibleVariableOverride] - another variant

    def worst_staleness(self, sizes: TableSizes, *, max_tickets: int) -> int:
        """0. Raises: ValueError if `max_staleness` is not 0.

        With a staleness of 0 the tickets are one batch: nothing is drawn for the next version before it is
        published.
        """
        if sizes.max_staleness > 0:
            raise ValueError(
                f"sampler on_policy needs max_staleness 0 (got {sizes.max_staleness}); set max_staleness and "
                "engine_lag to 0"
            )
        return 0


SamplerConfig = Annotated[
    FifoSampler | SweepSampler | EdfSampler | WindowSampler | OnPolicySampler | Use,
    Field(discriminator="name"),
]


class ReplayConfig(Config):
    """Trains on groups again in later batches, never above `max_staleness`; by default, there is none."""

    ratio: float = Field(default=0.0, ge=0)
    """Largest number of replayed groups per fresh group of a batch. They are added to `groups_per_batch`
    fresh ones, so rollouts per step stay the same."""
    share: float = Field(default=0.0, ge=0, lt=1)
    """Largest share of a batch of `groups_per_batch` groups that is replayed; the rest is fresh, so rollouts
    per step fall. AstraFlow's prototype calls this `replay_ratio`."""
    size: int = Field(default=256, ge=1)
    """Number of trained groups that are kept for replay, the latest ones."""
    select: Literal["latest", "uniform", "priority"] = "uniform"
    """`latest`: the newest tokens first. `uniform`: at random. `priority`: at random, in proportion to the
    size of the advantages."""
    max_uses: int = Field(default=2, ge=2)
    """Largest number of steps that may train on the same group, including the first."""
    reserve: int = Field(default=0, ge=0)
    """Number of versions of `max_staleness` that are reserved for replayed groups; fresh groups get
    correspondingly fewer tickets."""

    @model_validator(mode="after")
    def _has_one_meaning(self) -> "ReplayConfig":
        if self.ratio > 0 and self.share > 0:
            raise ValueError(
                f"ratio ({self.ratio:g}) adds replayed groups to a batch, and share ({self.share:g}) "
                "replaces fresh ones; set one of them, and the other to 0"
            )
        return self

    def pick(self, groups: Mapping[int, CompleteGroup], num: int, *, seed: str) -> tuple[int, ...]:
        """The ids of at most `num` groups. Deterministic: the same arguments give the same ids.

        `latest`: the groups whose oldest token is newest. `uniform`: each set is equally likely. `priority`:
        drawn one after the other without replacement, in proportion to w, the root mean square of a group's
        advantages, so groups without a gradient come last. The draw takes the largest keys u^(1/w), u
        uniform in [0, 1).
        Source: Efraimidis & Spirakis 2006, "Weighted random sampling with a reservoir".
        """
        if self.select == "latest":
            return tuple(nlargest(num, groups, key=lambda i: (groups[i].oldest_version, i)))
        keys = {i: chance(seed, i) for i in groups}
        if self.select == "priority":
            keys = {i: _weighted_key(key, groups[i]) for i, key in keys.items()}
        return tuple(nlargest(num, groups, key=lambda i: (keys[i], i)))


def _weighted_key(key: float, group: CompleteGroup) -> float:
    """u^(1/w) of `pick`; `key` is u."""
    weight = (group.advantage_square_sum / max(1, group.num_trained_tokens)) ** 0.5
    return key ** (1.0 / weight) if weight > 0 else -1.0
