"""Who waits for whom in a run, and why, as kinds and numbers.

Programs decide by these. `types/wait_words.py` turns them into sentences, which only people read.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from astraflow.types.bounds import Count, Label, Seconds, UnixSeconds, Version
from astraflow.types.item import Item

__all__ = [
    "DATAFLOW",
    "NO_ROOM",
    "OVERDUE",
    "PERSON",
    "POOL",
    "RUN",
    "SILENT",
    "Party",
    "PartyKind",
    "Wait",
    "WaitKind",
    "WaitReason",
    "WaitReasons",
]

PartyKind: TypeAlias = Literal["run", "trainer", "eval", "pool", "service", "dataflow", "person"]

WaitKind: TypeAlias = Literal[
    # Why a trainer has no batch.
    "groups",
    "lost_groups",
    "none_running",
    "no_service",
    "batch_failed",
    "batch_too_large",
    "not_asking",
    # Why no group may begin: the policy has no room for one.
    "tickets",
    "complete",
    "repeats_steps",
    "admission_all",
    "limiter_failed",
    # What others wait for a trainer to do.
    "not_attached",
    "unpublished",
    "overdue",
    "last_request",
    "held_back",
    # Evaluation.
    "eval_version",
    "eval_episodes",
    # A rollout service.
    "silent",
    "behind",
    "set_aside",
    "run_over",
    "no_dataflow",
    "first_version",
    "weights_failed",
    "scoring",
]

NO_ROOM: frozenset[WaitKind] = frozenset({"tickets", "complete", "repeats_steps", "limiter_failed"})
"""The reason's policy has no room for groups until its trainer continues."""

OVERDUE: frozenset[WaitKind] = frozenset({"overdue", "not_asking"})
"""A trainer has taken so long that it has probably stopped."""

SILENT: frozenset[WaitKind] = frozenset({"silent"})
"""A rollout service has missed its heartbeats."""


class Party(Item, frozen=True, kw_only=True):
    """One side of a wait. Example: `Party(kind="trainer", name="actor")`."""

    kind: PartyKind
    """`pool`: all rollout services together; `service`: one of them; `person`: whoever operates the run."""
    name: Label = ""
    """The policy of a `trainer` or `eval`, or the name of a `service`; empty for all others."""


RUN = Party(kind="run")
POOL = Party(kind="pool")
PERSON = Party(kind="person")
DATAFLOW = Party(kind="dataflow")


class WaitReason(Item, frozen=True, kw_only=True):
    """One reason for a wait. Its kind decides which other fields are set.

    Example: `WaitReason(kind="tickets", policy="actor", num=8)`. The reasons of a wait belong together: a
    trainer waits for `groups`, `none_running`, because of `tickets`.
    """

    kind: WaitKind
    policy: Label = ""
    """The policy that the reason is about."""
    version: Version = -1
    """The version that is missing (`unpublished`, `behind`), evaluated (`eval_version`), or that no retry can
    install (`weights_failed`; -1 if one may)."""
    served: Version = -1
    """`behind`: the newest version that the service has."""
    step: Count = 0
    """The number of steps before the one that the wait is about."""
    num: Count = 0
    """Groups that are ready (`groups`) or lost (`lost_groups`), tickets (`tickets`), finished episodes
    (`eval_episodes`), failures in a row (`batch_failed`, `set_aside`), bytes of a slice
    (`batch_too_large`)."""
    total: Count = 0
    """What `num` is compared with: groups of a batch or all that ended, episodes, or the largest slice."""
    seconds: Seconds = 0.0
    """For how long: a trainer without a batch (`lost_groups`), or not heard of (`overdue`, `last_request`,
    `not_asking`)."""
    usual_s: Seconds = 0.0
    """`overdue`: how long the steps before took."""
    fate: Label = ""
    """`lost_groups`: how most of the groups ended."""
    name: Label = ""
    """The filter (`lost_groups`), evaluation set (`eval_episodes`), or newest request, empty if there was
    none (`last_request`, `not_asking`)."""
    pinned: Annotated[tuple[tuple[Label, Version], ...], Meta(max_length=1024)] = ()
    """`eval_episodes`: (policy, version)."""
    detail: Label = ""
    """What another program said, such as its error message. It is shown to people; no program reads it."""


WaitReasons: TypeAlias = Annotated[tuple[WaitReason, ...], Meta(max_length=4096)]


class Wait(Item, frozen=True, kw_only=True):
    """`who` has been waiting for `whom` since `since_s`, for `reasons`. The first reason is the main one."""

    who: Party
    whom: Party
    reasons: WaitReasons = ()
    since_s: UnixSeconds

    def has(self, kinds: frozenset[WaitKind]) -> bool:
        """Whether one of the reasons is of one of these kinds."""
        return any(reason.kind in kinds for reason in self.reasons)
