"""Sentences about waits and about the size of the pool, made from their kinds and numbers.

Only people read them, no program does. So every word may change.
"""

from collections.abc import Callable, Mapping, Sequence

from astraflow.types import ScalingAdvice, Wait, WaitReason
from astraflow.types.status import ScalingVerdict
from astraflow.types.waits import Party, WaitKind

__all__ = ["party_text", "reason_text", "reasons_text", "scaling_text", "wait_line", "waiting_text"]


def party_text(party: Party) -> str:
    """One side of a wait. Example: `trainer actor`."""
    match party.kind:
        case "trainer":
            return f"trainer {party.name}"
        case "eval":
            return f"eval of {party.name}"
        case "service":
            return party.name
        case "pool":
            return "rollout"
        case "person":
            return "a person"
        case "run" | "dataflow":
            return party.kind


def wait_line(wait: Wait) -> str:
    """A whole wait without its length. Example: `rollout waits for trainer actor: version 0 of actor is not
    published`."""
    return f"{waiting_text(wait.who, wait.whom)}: {reasons_text(wait.reasons)}"


def waiting_text(who: Party, whom: Party) -> str:
    """Who waits for whom, without the reason.

    A rollout service can wait for itself, for example until it has loaded a version. It is then named once.
    """
    return f"{party_text(who)} waits" if who == whom else f"{party_text(who)} waits for {party_text(whom)}"


def reasons_text(reasons: Sequence[WaitReason]) -> str:
    """All reasons of a wait in one phrase."""
    text = ""
    joint = ""
    for reason in reasons:
        text += f"{joint}{reason_text(reason)}"
        joint = ", and " if reason.kind in {"none_running", "admission_all"} else "; "
    return text or "leases"


def reason_text(reason: WaitReason) -> str:
    """One reason as a phrase."""
    return _PHRASES[reason.kind](reason)


def _lost_groups(r: WaitReason) -> str:
    by = f" by {r.name}" if r.name else ""
    return f"no batch for {r.seconds:.0f} s: {r.num:,} of {r.total:,} groups {r.fate}{by}"


def _batch_failed(r: WaitReason) -> str:
    return (
        f"the batch of step {r.step + 1} could not be trained {r.num} times in a row: {r.detail}. "
        f"`astraflow drop-batch RUN {r.policy}` drops it, and training continues with other groups; or fix "
        "the cause and restart the run"
    )


def _batch_too_large(r: WaitReason) -> str:
    return (
        f"the batch of step {r.step + 1} has {r.num} bytes for each rank, and at most {r.total} can be sent "
        f"at once; `astraflow drop-batch RUN {r.policy}` drops it. The trainer must ask for it in pages "
        f"(`page=0`, docs/protocol/routes.md). Or lower policies.{r.policy}.table.groups_per_batch, its "
        "group_size, or its sampling.max_tokens, or use more ranks"
    )


def _last_request(r: WaitReason) -> str:
    if not r.name:
        return "it has made no request since the dataflow started"
    return f"its last request, `{r.name}`, was answered {r.seconds:.0f} s ago"


def _overdue(r: WaitReason) -> str:
    return (
        f"it is overdue: it has been silent for {r.seconds:.0f} s, and the steps before took "
        f"{r.usual_s:.1f} s each; is it, or its publisher, stopped?"
    )


def _eval_episodes(r: WaitReason) -> str:
    pins = ", ".join(f"{policy} {version}" for policy, version in r.pinned)
    return f"{r.name}: {r.num}/{r.total} episodes at {pins}"


_PHRASES: Mapping[WaitKind, Callable[[WaitReason], str]] = {
    "groups": lambda r: (
        f"step {r.step + 1}" + (f": {r.num} groups ready, {r.total} make a batch" if r.total else "")
    ),
    "lost_groups": _lost_groups,
    "none_running": lambda _: "none is on its way",
    "no_service": lambda _: "no rollout service has joined",
    "batch_failed": _batch_failed,
    "batch_too_large": _batch_too_large,
    "not_asking": lambda r: f"it does not ask for a batch: {_last_request(r)}; is it stopped?",
    "tickets": lambda r: f"all {r.num} tickets of policy {r.policy!r} are charged",
    "complete": lambda r: f"policy {r.policy!r} has all the groups that it needs",
    "repeats_steps": lambda r: (
        f"the trainer of policy {r.policy!r} repeats steps and has not published far enough"
    ),
    "admission_all": lambda _: "with admission: all, nothing is drawn for one policy alone",
    "limiter_failed": lambda r: r.detail,
    "not_attached": lambda _: "it has not attached yet",
    "unpublished": lambda r: f"version {r.version} of {r.policy} is not published",
    "overdue": _overdue,
    "last_request": _last_request,
    "held_back": lambda _: "its batch is held back until a person acts",
    "eval_version": lambda r: f"evaluation of version {r.version} needs version 0 of {r.policy}",
    "eval_episodes": _eval_episodes,
    "silent": lambda _: "no sign of life",
    "behind": lambda r: f"it serves version {r.served} of {r.policy}, and needs {r.version} or newer",
    "set_aside": lambda r: f"it is set aside after {r.num} failures in a row, the last: {r.detail}",
    "run_over": lambda r: f"the run is over ({r.detail})",
    "no_dataflow": lambda _: "the dataflow does not answer",
    "first_version": lambda r: f"the first version of {r.policy}",
    "weights_failed": lambda r: f"a version of {r.policy}: {r.detail}",
    "scoring": lambda r: r.detail,
}


def scaling_text(advice: ScalingAdvice) -> str:
    """The advice on the number of services; empty if there is none."""
    trainers = advice.trainer_wait_frac
    policy = max(trainers, key=lambda name: trainers[name], default="")
    name = f" {policy}" if len(trainers) > 1 else ""
    trainer = f"trainer{name} waits {trainers.get(policy, 0.0):.0%}"
    pool = f"rollouts wait {advice.rollout_wait_frac:.0%}"
    num = abs(advice.missing_services)
    plural = "" if num == 1 else "s"
    texts: Mapping[ScalingVerdict, str] = {
        "none": "",
        "too_early": "no advice yet: too little was seen",
        "unheard": f"no advice while these are silent: {', '.join(map(party_text, advice.unheard[:3]))}",
        "take_turns": f"{trainer}, {pool}: they take turns; a larger max_staleness lets them overlap",
        "too_few": f"{trainer}: about {num} more service{plural}",
        "has_grown": f"{trainer}, but the pool has grown since",
        "too_many": f"{pool}: {num} service{plural} too many",
        "balanced": f"balanced: {trainer}, {pool}",
    }
    return texts[advice.verdict]
