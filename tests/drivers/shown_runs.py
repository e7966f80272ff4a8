"""Steps, evaluations and statuses of a run as its views get them."""

import msgspec

from astraflow.recipe.service_state import ServiceState
from astraflow.types import (
    EvalRecord,
    FateCounts,
    Load,
    PolicyStatus,
    ScalingAdvice,
    ServedVersions,
    StatusReply,
    StepRecord,
    Wait,
    WaitReason,
    WorkerStatus,
)
from astraflow.types.waits import POOL, Party

TRAINER = Party(kind="trainer", name="actor")
GROUPS = WaitReason(kind="groups", policy="actor", step=2, num=0, total=4)
TICKETS = WaitReason(kind="tickets", policy="actor", num=8)


def make_step(step: int, **changes: object) -> StepRecord:
    fields: dict[str, object] = {
        "policy": "actor",
        "step": step,
        "version": step + 1,
        "at_s": 100.0 + step,
        "reward_mean": 0.5,
        "staleness_mean": 0.25,
        "staleness_max": 1,
        "num_groups": 4,
        "num_samples": 16,
        "num_trained_tokens": 300,
        "num_discarded_groups": 0,
        "metrics": (),
    }
    return StepRecord(**(fields | changes))  # type: ignore[arg-type]


def make_eval(version: int, score: float) -> EvalRecord:
    return EvalRecord(
        policy="actor", version=version, step=version, eval_set="heldout", num_tasks=16, num_samples=16,
        num_failed=0, score_mean=score, score_stderr=0.01, at_s=100.0,
    )  # fmt: skip


def make_status() -> StatusReply:
    policy = PolicyStatus(
        name="actor", step=3, num_steps=10, newest_version=3, durable_step=2, epoch=1, num_tickets=5,
        max_tickets=8, num_running_groups=2, num_ready_groups=3, groups_per_batch=4, staleness_bound=2,
        redone_steps=0, fates=FateCounts(drawn=20, trained=12, filtered=3, live=5),
    )  # fmt: skip
    load = Load(tokens_per_s=1500.0, versions=(ServedVersions(policy="actor", versions=(3,)),))
    worker = WorkerStatus(
        id="r.1",
        name="rollout-0",
        engine="torch",
        hosts=("actor",),
        num_leases=7,
        load=load,
        last_seen_s=99.0,
    )
    wait = Wait(who=TRAINER, whom=POOL, reasons=(GROUPS,), since_s=98.0)
    return StatusReply(
        name="demo", state="running", reason="", now_s=100.0, policies=(policy,), workers=(worker,),
        waits=(wait,),
    )  # fmt: skip


def make_silent(name: str, silent_s: float) -> ServiceState:
    trouble = "it is stopped; `kill -CONT 7` lets it continue"
    return ServiceState(
        name, state="running", pid=7, age_s=90.0, silent_s=silent_s, is_silent=True, trouble=trouble
    )


def make_waiting(who: Party, whom: Party, reason: WaitReason) -> StatusReply:
    wait = Wait(who=who, whom=whom, reasons=(reason,), since_s=86.0)
    scaling = ScalingAdvice(verdict="take_turns")
    return msgspec.structs.replace(make_status(), waits=(wait,), scaling=scaling)
