"""What the watchdog sees, built in a line: a healthy run, with changes."""

import msgspec

from astraflow.report.watch.run_snapshot import RunSnapshot
from astraflow.types import (
    FateCounts,
    Load,
    MetricItem,
    PolicyStatus,
    ServedVersions,
    StatusReply,
    StepRecord,
    Wait,
    WaitReason,
    WorkerStatus,
)
from astraflow.types.waits import POOL, Party

__all__ = [
    "NOW_S",
    "TRAINER",
    "make_policy_status",
    "make_snapshot",
    "make_steps",
    "make_wait",
    "make_worker",
]

NOW_S = 1000.0


def make_worker(name: str = "rollout-0", *, unheard_s: float = 0.5, **load: object) -> WorkerStatus:
    """A busy service."""
    usual: dict[str, object] = {
        "num_running": 16,
        "num_slots": 16,
        "tokens_per_s": 1500.0,
        "versions": (ServedVersions(policy="actor", versions=(9,)),),
    }
    return WorkerStatus(
        id=f"{name}.1", name=name, engine="torch", hosts=("actor",), num_leases=16,
        load=Load(**(usual | load)), last_seen_s=NOW_S - unheard_s,  # type: ignore[arg-type]
    )  # fmt: skip


def make_policy_status(**changes: object) -> PolicyStatus:
    """A policy after 9 of 100 steps."""
    policy = PolicyStatus(
        name="actor", step=9, num_steps=100, newest_version=9, durable_step=8, epoch=1, num_tickets=8,
        max_tickets=12, num_running_groups=6, num_ready_groups=2, groups_per_batch=4, staleness_bound=2,
        redone_steps=0, fates=FateCounts(drawn=44, trained=36, live=8),
    )  # fmt: skip
    return msgspec.structs.replace(policy, **changes)


def make_steps(num: int = 9, *, every_s: float = 1.0, **metrics: float) -> list[StepRecord]:
    """Steps whose reward rises, the last one just made."""
    usual = {"batch_wait_s": 0.2, "train_s": 0.5, "entropy": 0.5, "episode/score_s": 0.01} | metrics
    return [
        StepRecord(
            policy="actor", step=step, version=step + 1, at_s=NOW_S - (num - 1 - step) * every_s,
            reward_mean=0.1 + 0.01 * step, staleness_mean=1.0, staleness_max=1, num_groups=4, num_samples=16,
            num_trained_tokens=300, num_discarded_groups=0,
            metrics=tuple(MetricItem(name, value) for name, value in usual.items()),
        )
        for step in range(num)
    ]  # fmt: skip


TRAINER = Party(kind="trainer", name="actor")


def make_wait(waited_s: float, *reasons: WaitReason, who: Party = TRAINER, whom: Party = POOL) -> Wait:
    return Wait(who=who, whom=whom, reasons=reasons, since_s=NOW_S - waited_s)


def make_snapshot(**changes: object) -> RunSnapshot:
    """A healthy run: one service, one policy. `policy`, `workers` and `waits` change its status."""
    status = StatusReply(
        name="demo", state="running", reason="", now_s=NOW_S,
        policies=(changes.pop("policy", make_policy_status()),),  # type: ignore[arg-type]
        workers=changes.pop("workers", (make_worker(),)),  # type: ignore[arg-type]
        waits=changes.pop("waits", ()),  # type: ignore[arg-type]
    )  # fmt: skip
    if "scaling" in changes:
        status = msgspec.structs.replace(status, scaling=changes.pop("scaling"))
    fields: dict[str, object] = {"now_s": NOW_S, "status": status, "steps": {"actor": make_steps()}}
    return RunSnapshot(**(fields | changes))  # type: ignore[arg-type]
