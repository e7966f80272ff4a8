"""The text of `astraflow status`. The live screen shows parts of it too."""

from collections.abc import Mapping, Sequence

from rich.text import Text

from astraflow.processes.service_state import ServiceState
from astraflow.report.overview import RunOverview, duration_text, speed_text, step_text
from astraflow.report.silence import full_policies, silent_parts, silent_trainer, subject, waits_text
from astraflow.types import PolicyStatus, ScalingAdvice, StatusReply, WaitReason, WorkerStatus
from astraflow.types.wait_words import party_text, reasons_text, scaling_text

__all__ = [
    "advice_text",
    "episodes_text",
    "is_silent",
    "num_dropped",
    "pushed_text",
    "scores_text",
    "services_text",
    "status_lines",
    "worker_wait_text",
]

_SILENT_S = 10.0
"""A rollout service that has missed its heartbeats is marked as silent after this time, or later if its
heartbeats are further apart."""


def status_lines(run: RunOverview, status: StatusReply) -> list[str]:
    """Returns the lines of `astraflow status`.

    The run comes first, then one line per policy and rollout service, then who waits for whom.
    """
    silent = silent_parts(run.services, status)
    elapsed = duration_text(status.now_s - run.started_s)
    speed = f"generating {speed_text(run.generated_tokens_per_s())}"
    return [
        f"astraflow {run.name}  {status.state}  {elapsed}  {run.where}  {speed}",
        *(_policy_line(run, policy) for policy in status.policies),
        *(_worker_line(worker, status, silent) for worker in status.workers),
        *(waits_text(status, run.services) or ["nobody waits"]),
        *filter(None, (advice_text(status.scaling, silent), pushed_text(status))),
    ]


def _policy_line(run: RunOverview, policy: PolicyStatus) -> str:
    records = run.steps.get(policy.name)
    at_step = f"{policy.name} at step {policy.step}/{policy.num_steps}"
    return (
        f"{step_text(run, records[-1]) if records else at_step}; staleness bound {policy.staleness_bound}, "
        f"{policy.num_tickets}/{policy.max_tickets} tickets, "
        f"{policy.num_ready_groups}/{policy.groups_per_batch} groups ready, {num_dropped(policy)} dropped"
    )


def _worker_line(worker: WorkerStatus, status: StatusReply, silent: Mapping[str, float]) -> str:
    unheard_s = max(status.now_s - worker.last_seen_s, 0.0)
    versions = " ".join(f"{v.policy}:{v.versions[-1]}" for v in worker.load.versions if v.versions)
    parts = (
        f"{worker.name}: {episodes_text(worker)} episodes",
        speed_text(worker.load.tokens_per_s),
        f"heard of {unheard_s:.0f} s ago",
        f"versions {versions or '-'}",
        scores_text(worker),
        f"waits for {worker_wait_text(worker, unheard_s, silent) or '-'}",
    )
    return ", ".join(filter(None, parts))


# --- parts of lines -------------------------------------------------------------------------------


def num_dropped(policy: PolicyStatus) -> int:
    """Returns the number of groups that ended without being trained on."""
    fates = policy.fates
    return fates.drawn - fates.trained - fates.live


def episodes_text(worker: WorkerStatus) -> str:
    """Returns the number of a rollout service's episodes, with its slots and their ceiling if they differ. A
    service has no slots while a trainer has its device."""
    load = worker.load
    if load.num_slots >= load.max_slots:
        return f"{worker.num_leases}"
    if load.num_slots == 0:
        return f"{worker.num_leases} (a trainer has its device)"
    return f"{worker.num_leases} (slots: {load.num_slots} of {load.max_slots})"


def scores_text(worker: WorkerStatus) -> str:
    """Describes the scores of a rollout service that arrived late or not at all; empty if there are none."""
    load = worker.load
    if not load.num_late_scores and not load.num_scorer_errors:
        return ""
    return f"{load.num_late_scores:,} scores came too late, {load.num_scorer_errors:,} scorer errors"


def pushed_text(status: StatusReply | None) -> str:
    """Says how many tasks users pushed to the run; empty if none."""
    if status is None or not (status.pushed.num_accepted or status.pushed.num_refused):
        return ""
    pushed = status.pushed
    counts = f"{pushed.num_accepted} accepted, {pushed.num_waiting} waiting, {pushed.num_refused} refused"
    return f"pushed tasks: {counts}"


def is_silent(worker: WorkerStatus, unheard_s: float, silent: Mapping[str, float]) -> bool:
    """Whether a rollout service is one of the silent parts of the run, and not only since a moment ago."""
    return unheard_s >= _SILENT_S and worker.name in silent


def worker_wait_text(worker: WorkerStatus, unheard_s: float, silent: Mapping[str, float]) -> str:
    """Says what a rollout service waits for, or that it is silent or set aside; empty if it is working."""
    if is_silent(worker, unheard_s, silent):
        return "silent"
    if worker.is_set_aside:
        return f"set aside after {worker.failed_in_a_row} failures in a row"
    return _service_wait_text(worker.load.waits_for, silent)


def services_text(services: Sequence[ServiceState]) -> Text:
    """Lists the processes and the time of each one's last sign of life."""
    text = Text()
    for service in services:
        word = "restart" if service.restarts == 1 else "restarts"
        restarts = f" ({service.restarts} {word})" if service.restarts else ""
        style = {"running": "green", "restarting": "red", "failed": "red"}.get(service.state, "dim")
        style = "red" if service.trouble or service.is_silent else style
        state = "silent" if service.state == "running" and service.is_silent else service.state
        text.append(f"{service.name} {state}{restarts}{_sign_of_life(service)}  ", style=style)
    return text


def _sign_of_life(service: ServiceState) -> str:
    """Says when a running process last showed a sign of life, or for how long it has been starting."""
    if service.state != "running":
        return ""
    if service.silent_s is not None:
        return f", alive {service.silent_s:.0f} s ago"
    return f", starting for {service.age_s:.0f} s" if service.age_s else ""


def advice_text(advice: ScalingAdvice, silent: Mapping[str, float]) -> str:
    """The advice on the number of services. There is none while a part is silent, because then the wait
    shares don't measure the pool's size."""
    if silent and advice.verdict != "none":
        return f"no advice while {subject(silent)} silent"
    return scaling_text(advice)


def _service_wait_text(reasons: Sequence[WaitReason], silent: Mapping[str, float]) -> str:
    """What a rollout service reports that it waits for, short enough for a table cell; empty if it waits for
    nothing.

    Why the policies take no more groups is said once for all services, below the table.
    """
    if trainer := silent_trainer(reasons, silent):
        return f"{party_text(trainer)}, which is silent"
    if policies := full_policies(reasons):
        return f"trainer {', '.join(policies)}"
    return reasons_text(reasons) if reasons else ""
